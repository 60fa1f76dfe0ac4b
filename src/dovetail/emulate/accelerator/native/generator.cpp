/* SPDX-License-Identifier: Apache-2.0 */
// Random numbers as on CUDA: a generator is a seed and an offset that the host moves on at the launch, so that the
// numbers do not depend on when a kernel runs.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include "device.h"

namespace dovetail::emu {

namespace {

constexpr uint64_t FIRST_SEED = 67280421310721ull;  // torch's
constexpr size_t STATE_BYTES = 2 * sizeof(uint64_t);

uint64_t mixed(uint64_t seed, uint64_t offset) {
  uint64_t z = seed * 0x9E3779B97F4A7C15ull + (offset + 1) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

struct DeviceGenerator final : c10::GeneratorImpl {
  uint64_t seed_ = FIRST_SEED, offset_ = 0;
  explicit DeviceGenerator(int device)
      : c10::GeneratorImpl(device_of(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  static c10::DeviceType device_type() { return c10::kPrivateUse1; }
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.device().is_cpu() && state.dtype() == caffe2::TypeMeta::Make<uint8_t>() &&
                    size_t(state.numel()) == STATE_BYTES && state.is_contiguous(),
                "RNG state must be a torch.ByteTensor of ", STATE_BYTES, " bytes on the CPU");
    auto* values = static_cast<const uint64_t*>(state.data());
    seed_ = values[0];
    offset_ = values[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({int64_t(STATE_BYTES)}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* values = static_cast<uint64_t*>(state.mutable_data_ptr());
    values[0] = seed_;
    values[1] = offset_;
    return state.getIntrusivePtr();
  }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
};

}  // namespace

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < config().devices; i++) made->push_back(new_generator(i));
    return made;
  }();
  TORCH_CHECK(device >= 0 && size_t(device) < all->size(), "emu:", device, " has no generator");
  return (*all)[size_t(device)];
}

at::Generator new_generator(int device) { return at::make_generator<DeviceGenerator>(device); }

at::Generator draw(const std::optional<at::Generator>& generator, int device) {
  bool given = generator.has_value() && generator->defined();
  TORCH_CHECK(!given || generator->device().type() == c10::kPrivateUse1,
              "Expected a 'emu' device type for generator but found '", given ? generator->device().str() : "", "'");
  auto from = given ? *generator : default_generator(device);
  std::lock_guard<std::mutex> lock(from.mutex());
  auto seed = mixed(from.current_seed(), from.get_offset());
  from.set_offset(from.get_offset() + 4);  // CUDA's offsets are multiples of 4
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

}  // namespace dovetail::emu
