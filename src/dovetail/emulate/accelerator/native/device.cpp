/* SPDX-License-Identifier: Apache-2.0 */
// What torch asks of a device: its allocators, its guard (current device, streams, events), its hooks.
#include "device.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace dovetail::emu {

namespace {

thread_local int device_now = 0;
thread_local std::vector<int> streams_now;  // by device; -1: the default stream

int index_of(c10::DeviceIndex device) { return device < 0 ? device_now : int(device); }

void check_index(int device) {
  TORCH_CHECK(device >= 0 && device < config().devices, "emu:", device, " does not exist: there are ", config().devices,
              " emulated devices");
}

void* allocate(size_t bytes, int device) {
  try {
    return mem_alloc(bytes, device, current_stream(device));
  } catch (const OutOfMemory& e) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, e.what());
  }
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* p = emu::allocate(bytes, device_now);
    return {p, p, &mem_free, device_of(device_now)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &mem_free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    auto at = [](const void* p) { return uintptr_t(p); };
    static Kernel& what = kernel("copy of a storage");
    enqueue(current_stream(device_now), what,
            {{at(from), at(from) + bytes, false}, {at(to), at(to) + bytes, true, true}},
            body_of([d = shadow(to), s = shadow(from), bytes] { std::memcpy(d, s, bytes); }));
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { mem_empty_cache(); }
  void recordStream(const c10::DataPtr& p, c10::Stream s) override { mem_record(p.get(), slot_of_stream(s)); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    auto now = mem_stats(index_of(device));
    c10::CachingDeviceAllocator::DeviceStats out;
    auto set = [](auto& stat, size_t current, size_t peak) {
      stat[0].current = int64_t(current);
      stat[0].peak = int64_t(peak);
    };
    set(out.allocated_bytes, now.allocated, now.allocated_peak);
    set(out.active_bytes, now.allocated, now.allocated_peak);
    set(out.requested_bytes, now.allocated, now.allocated_peak);
    set(out.reserved_bytes, now.reserved, now.reserved_peak);
    out.num_ooms = int64_t(now.out_of_memory);
    return out;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { mem_reset_peak(index_of(device)); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    auto now = mem_stats(index_of(device));
    return {now.limit - std::min(now.limit, now.allocated), now.limit};
  }
};
DeviceMemory device_memory;
REGISTER_ALLOCATOR(c10::kPrivateUse1, &device_memory)

struct PinnedMemory final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* p = pinned_alloc(bytes);
    return {p, p, &pinned_free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &pinned_free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool record_event(void* pointer, void*, c10::Stream stream) override {
    mem_record(pointer, slot_of_stream(stream));
    return true;
  }
  void empty_cache() override { pinned_empty_cache(); }
  at::HostStats get_stats() override {
    auto now = mem_stats(-1);
    at::HostStats out;
    out.active_bytes.current = int64_t(now.allocated);
    out.active_bytes.peak = int64_t(now.allocated_peak);
    out.allocated_bytes.current = int64_t(now.reserved);
    out.allocated_bytes.peak = int64_t(now.reserved_peak);
    return out;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override { mem_reset_peak(-1); }
};
PinnedMemory pinned_memory;
REGISTER_HOST_ALLOCATOR(c10::kPrivateUse1, &pinned_memory)

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::kPrivateUse1;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override { return device_of(device_now); }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) device_now = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return stream_of(current_stream(index_of(device.index()))); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(stream_default(index_of(device.index())));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return stream_of(stream_pooled(index_of(device.index()), priority < 0));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override {
    return stream_of(stream_pooled(index_of(device.index()), high));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    int device = stream.device_index();
    auto old = stream_of(current_stream(device));
    streams_now[size_t(device)] = slot_of_stream(stream);
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(config().devices); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    auto* it = static_cast<Event*>(*event);
    if (!it) {
      it = new Event;
      it->timing = flag == c10::EventFlag::BACKEND_DEFAULT;
      *event = it;
    }
    event_record(*it, slot_of_stream(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) event_block(*static_cast<Event*>(event), slot_of_stream(stream));
  }
  bool queryEvent(void* event) const override { return !event || event_query(*static_cast<Event*>(event)); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryStream(const c10::Stream& stream) const override { return stream_query(slot_of_stream(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override {
    stream_sync(slot_of_stream(stream), "stream.synchronize()");
  }
  void synchronizeEvent(void* event) const override {
    if (event) event_sync(*static_cast<Event*>(event), "event.synchronize()");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    device_sync(index_of(device), "synchronize()");
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& stream) const override {
    mem_record(p.get(), slot_of_stream(stream));
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    TORCH_CHECK(from && to, "Both events must be recorded before calculating elapsed time.");
    return event_elapsed_ms(*static_cast<Event*>(from), *static_cast<Event*>(to));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override { check_fork(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(config().devices); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(device_now); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto old = getCurrentDevice();
    if (device >= 0) set_current_device(device);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(index_of(device));
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(index_of(device)); }
  at::Device getDeviceFromPtr(void* pointer) const override { return device_of(mem_device(pointer)); }
  bool isPinnedPtr(const void* pointer) const override { return pinned_owns(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

}  // namespace

void register_device() { at::RegisterPrivateUse1HooksInterface(new Hooks); }

int current_device() { return device_now; }

void set_current_device(int device) {
  check_index(device);
  device_now = device;
}

int current_stream(int device) {
  if (streams_now.size() <= size_t(device)) {
    check_index(device);
    streams_now.resize(size_t(config().devices), -1);
  }
  int slot = streams_now[size_t(device)];
  return slot < 0 ? stream_default(device) : slot;
}

// torch's StreamId 0 is the default stream of a device; others are the slot and one.
int slot_of_stream(const c10::Stream& stream) {
  return stream.id() == 0 ? stream_default(stream.device_index()) : int(stream.id() - 1);
}

c10::Stream stream_of(int slot) {
  int device = stream_device(slot);
  int64_t id = stream_default(device) == slot ? 0 : slot + 1;
  return c10::Stream(c10::Stream::UNSAFE, device_of(device), id);
}

c10::Allocator* device_allocator() { return &device_memory; }

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  c10::DeviceGuard guard(storage.device());
  auto fresh = device_memory.allocate(bytes);
  if (size_t keep = std::min(bytes, storage.nbytes())) device_memory.copy_data(fresh.get(), storage.data(), keep);
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(bytes);
}

}  // namespace dovetail::emu
