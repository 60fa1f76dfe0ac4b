/* SPDX-License-Identifier: Apache-2.0 */
// torch's side of the emulated accelerator: how tensors, streams and devices of torch are those of the driver.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <optional>

#include "runtime.h"

namespace dovetail::emu {

int current_device();               // of the calling thread
void set_current_device(int device);
int current_stream(int device);     // the slot that the calling thread launches on
int slot_of_stream(const c10::Stream& stream);
c10::Stream stream_of(int slot);

inline bool ours(const at::Tensor& t) { return t.defined() && t.device().type() == c10::kPrivateUse1; }
inline c10::Device device_of(int index) { return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(index)}; }

// The tensor as kernels see it: a CPU tensor over the same bytes that owns nothing. Only for bodies of kernels.
at::Tensor seen(const at::Tensor& tensor);
// The bytes that a kernel touches of it.
Range range(const at::Tensor& tensor, bool write);

c10::Allocator* device_allocator();
void resize_storage(const c10::Storage& storage, size_t bytes);

// A CPU generator for one kernel, seeded by the given generator (or the device's), which moves on by one draw.
at::Generator draw(const std::optional<at::Generator>& generator, int device);
const at::Generator& default_generator(int device);
at::Generator new_generator(int device);

}  // namespace dovetail::emu
