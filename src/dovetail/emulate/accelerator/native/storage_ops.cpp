/* SPDX-License-Identifier: Apache-2.0 */
// Operators that make, alias, resize or read tensors: those that torch leaves to a device, apart from kernels.
#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/all.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "tensors.h"

namespace dovetail::emu {

namespace {

using Device = std::optional<at::Device>;

void check_new(std::optional<at::Layout> layout, std::optional<bool> pin) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided,
              "sparse tensors are not supported on the emulated accelerator");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "Only dense CPU tensors can be pinned");
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 Device device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  check_new(layout, pin);
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> layout, Device device, std::optional<bool> pin) {
  check_new(layout, pin);
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// A tensor of zeros without memory, which torch makes real when somebody reads it.
at::Tensor efficient_zeros(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                           Device device, std::optional<bool> pin) {
  check_new(layout, pin);
  c10::OptionalDeviceGuard guard(device);
  at::native::ZeroTensorAllocator allocator(device_of(current_device()));
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1) | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), std::nullopt);
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  int64_t numel = c10::multiply_integers(size);
  size_t bytes = size_t(impl->storage_offset() + numel) * self.element_size();
  if (numel && self.storage().nbytes() < bytes) resize_storage(self.storage(), bytes);
  impl->set_sizes_contiguous(size);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_to(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size,
                   at::IntArrayRef stride) {
  TORCH_CHECK(storage.device() == self.device() || self.numel() == 0, "set_: expected a storage of ", self.device(),
              ", got one of ", storage.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr)
    impl->set_sizes_contiguous(size);
  else
    impl->set_sizes_and_strides(size, stride);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  int64_t n = int64_t(storage.nbytes() / self.element_size());
  return set_to(self, std::move(storage), 0, {n}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_to(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_to(self, at::empty({0}, self.options()).storage(), 0, {0}, {1});
}

at::Scalar item(const at::Tensor& self) {
  int slot = current_stream(self.device().index());
  static Kernel& what = kernel("aten::item");
  enqueue(slot, what, {range(self, false)}, body_of([] {}));
  stream_sync(slot, "item()");
  return seen(self).item();
}

bool equal(const at::Tensor& a, const at::Tensor& b) {
  TORCH_CHECK(a.device() == b.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
              a.device(), " and ", b.device(), "!");
  if (a.sizes() != b.sizes()) return false;
  return at::all(at::eq(a, b)).item().toBool();
}

bool is_set_to(const at::Tensor& self, const at::Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
         self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() &&
         self.strides() == other.strides();
}

void record_stream(at::Tensor& self, at::Stream stream) {
  mem_record(const_cast<void*>(self.storage().data()), slot_of_stream(stream));
}

// torch lets a parameter keep its identity when it moves between the devices that it knows itself; so module.to(device)
// keeps tied weights tied, and optimisers keep their parameters.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  auto dense = [](const at::Tensor& t) {
    return t.layout() == c10::kStrided && (t.device().is_cpu() || t.device().type() == c10::kPrivateUse1);
  };
  return dense(self) && dense(from);
}

}  // namespace

}  // namespace dovetail::emu

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  namespace emu = dovetail::emu;
  m.impl("empty.memory_format", emu::empty);
  m.impl("empty_strided", emu::empty_strided);
  m.impl("_efficientzerotensor", emu::efficient_zeros);
  m.impl("as_strided", emu::as_strided);
  m.impl("view", emu::view);
  m.impl("_reshape_alias", emu::reshape_alias);
  m.impl("resize_", emu::resize);
  m.impl("set_.source_Storage_storage_offset", emu::set_to);
  m.impl("set_.source_Storage", emu::set_storage);
  m.impl("set_.source_Tensor", emu::set_tensor);
  m.impl("set_", emu::set_nothing);
  m.impl("_local_scalar_dense", emu::item);
  m.impl("equal", emu::equal);
  m.impl("is_set_to", emu::is_set_to);
  m.impl("record_stream", emu::record_stream);
  m.impl("_has_compatible_shallow_copy_type", emu::has_compatible_shallow_copy_type);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", dovetail::emu::has_compatible_shallow_copy_type);
}
