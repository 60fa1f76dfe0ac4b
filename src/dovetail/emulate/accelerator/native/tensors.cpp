/* SPDX-License-Identifier: Apache-2.0 */
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/TensorImpl.h>

namespace dovetail::emu {

namespace {

// Bytes from the first to behind the last element.
size_t extent(at::IntArrayRef sizes, at::IntArrayRef strides, size_t element) {
  size_t last = 0;
  for (size_t i = 0; i < sizes.size(); i++) {
    if (sizes[i] == 0) return 0;
    last += size_t(strides[i]) * size_t(sizes[i] - 1);
  }
  return (last + 1) * element;
}

at::Tensor made(c10::Storage storage, c10::DispatchKey key, caffe2::TypeMeta dtype, at::IntArrayRef sizes,
                at::IntArrayRef strides, int64_t offset) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

}  // namespace

Shape shape_of(const at::Tensor& t) {
  Shape s;
  s.defined = true;
  s.sizes.assign(t.sizes().begin(), t.sizes().end());
  s.strides.assign(t.strides().begin(), t.strides().end());
  s.offset = t.storage_offset();
  s.dtype = t.scalar_type();
  s.conjugated = t.is_conj();
  s.negated = t.is_neg();
  return s;
}

at::Tensor over_memory(void* memory, at::IntArrayRef sizes, at::IntArrayRef strides, caffe2::TypeMeta dtype) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), extent(sizes, strides, dtype.itemsize()),
                       c10::DataPtr(memory, c10::Device(c10::kCPU)), nullptr, false);
  return made(std::move(storage), c10::DispatchKey::CPU, dtype, sizes, strides, 0);
}

at::Tensor seen(const at::Tensor& t) {
  void* memory = t.numel() ? shadow(t.const_data_ptr()) : nullptr;
  auto out = over_memory(memory, t.sizes(), t.strides(), t.dtype());
  auto* impl = t.unsafeGetTensorImpl();
  if (impl->is_wrapped_number()) out.unsafeGetTensorImpl()->set_wrapped_number(true);
  return out;
}

// Two loops describe most views: rows of consecutive bytes at a constant distance. What does not fit is a plain range.
Range range(const at::Tensor& t, bool write) {
  if (t.numel() == 0) return {0, 0, write};
  auto lo = uintptr_t(t.const_data_ptr());
  size_t element = t.element_size();
  Range r{lo, lo + extent(t.sizes(), t.strides(), element), write};
  if (t.is_non_overlapping_and_dense()) return r;
  // Strides from the smallest on: merge what is consecutive into the row; the next stride is the pitch.
  c10::SmallVector<std::pair<size_t, size_t>, 5> dims;
  for (int64_t i = 0; i < t.dim(); i++)
    if (t.size(i) > 1 && t.stride(i) > 0) dims.emplace_back(size_t(t.stride(i)) * element, size_t(t.size(i)));
  std::sort(dims.begin(), dims.end());
  size_t width = element, pitch = 0, length = 0;
  for (auto [stride, size] : dims) {
    if (!pitch && stride <= width)
      width = std::max(width, stride * (size - 1) + width);
    else if (!pitch) {
      pitch = stride;
      length = size;
    } else if (stride == pitch * length) {
      length *= size;
    } else {
      return r;
    }
  }
  if (pitch > width) {
    r.width = width;
    r.pitch = pitch;
  }
  return r;
}

at::Tensor meta_tensor(const at::Tensor& t) {
  size_t bytes = extent(t.sizes(), t.strides(), t.element_size()) + size_t(t.storage_offset()) * t.element_size();
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, c10::Device(c10::kMeta)),
                       c10::GetAllocator(c10::kMeta), true);
  auto out = made(std::move(storage), c10::DispatchKey::Meta, t.dtype(), t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) out.unsafeGetTensorImpl()->set_wrapped_number(true);
  return out;
}

at::Tensor fresh_tensor(const Shape& shape, int device) {
  auto dtype = c10::scalarTypeToTypeMeta(shape.dtype);
  size_t bytes = extent(shape.sizes, shape.strides, dtype.itemsize());
  void* memory;
  try {
    memory = mem_alloc(bytes, device, current_stream(device));
  } catch (const OutOfMemory& e) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, e.what());
  }
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes,
                       c10::DataPtr(memory, memory, &mem_free, device_of(device)), device_allocator(), true);
  return made(std::move(storage), c10::DispatchKey::PrivateUse1, dtype, shape.sizes, shape.strides, 0);
}

at::Tensor alias_tensor(const at::Tensor& self, const Shape& shape) {
  auto out = made(c10::Storage(self.storage()), c10::DispatchKey::PrivateUse1, c10::scalarTypeToTypeMeta(shape.dtype),
                  shape.sizes, shape.strides, shape.offset);
  if (shape.conjugated) out._set_conj(true);
  if (shape.negated) out._set_neg(true);
  return out;
}

at::Tensor uploaded(const at::Tensor& host, int device) {
  TORCH_CHECK(host.layout() == c10::kStrided, "sparse tensors are not supported on the emulated accelerator");
  auto shape = shape_of(host);
  if (!host.is_non_overlapping_and_dense()) {
    auto dense = at::empty_strided(host.sizes(), host.strides(), host.options().device(c10::kMeta)).contiguous();
    shape.strides.assign(dense.strides().begin(), dense.strides().end());
  }
  auto out = fresh_tensor(shape, device);
  if (!host.numel()) return out;
  auto to = range(out, true);
  to.overwrites = true;
  static Kernel& what = kernel("copy H2D");
  enqueue(current_stream(device), what, {to}, body_of([host, d = seen(out)]() mutable { d.copy_(host); }));
  return out;
}

}  // namespace dovetail::emu
