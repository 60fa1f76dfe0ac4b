/* SPDX-License-Identifier: Apache-2.0 */
// Copies between host and device, and between devices, with CUDA's rules for who waits for whom.
//
// To the device: from pinned memory with non_blocking=True the host goes on, and the bytes are read when the stream gets
// there; otherwise they are taken over at the call, and without non_blocking the host waits for the stream, as torch does
// on CUDA. To the host: the host waits, unless the destination is pinned and non_blocking is given. Between devices the
// source's stream copies, after and before what the destination's stream does.
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include "tensors.h"

namespace dovetail::emu {

namespace {

struct Copy final : Body {
  at::Tensor to, from;
  Copy(at::Tensor t, at::Tensor f) : to(std::move(t)), from(std::move(f)) {}
  void run() override {
    c10::AutoGradMode no_grad(false);
    at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  }
};

bool pinned(const at::Tensor& t) { return t.device().is_cpu() && t.numel() && pinned_owns(t.const_data_ptr()); }

at::Tensor as_kernels_see(const at::Tensor& t) {
  auto out = seen(t);
  if (t.is_conj()) out._set_conj(true);
  if (t.is_neg()) out._set_neg(true);
  return out;
}

Range overwritten(const at::Tensor& t) {
  auto r = range(t, true);
  r.overwrites = true;
  return r;
}

void use_pinned(const at::Tensor& t, int slot) { mem_record(const_cast<void*>(t.storage().data()), slot); }

void to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  static Kernel& what = kernel("copy H2D");
  int slot = current_stream(to.device().index());
  if (pinned(from)) {
    enqueue(slot, what, {range(from, false), overwritten(to)},
            std::make_unique<Copy>(as_kernels_see(to), as_kernels_see(from)));
    use_pinned(from, slot);
  } else {
    enqueue(slot, what, {overwritten(to)}, std::make_unique<Copy>(as_kernels_see(to), from.clone()));
  }
  if (!non_blocking) stream_sync(slot, "copy to the device");
}

void to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  static Kernel& what = kernel("copy D2H");
  int slot = current_stream(from.device().index());
  bool is_pinned = pinned(to);
  std::vector<Range> ranges{range(from, false)};
  if (is_pinned) ranges.push_back(overwritten(to));
  enqueue(slot, what, ranges, std::make_unique<Copy>(is_pinned ? as_kernels_see(to) : to, as_kernels_see(from)));
  if (is_pinned) use_pinned(to, slot);
  if (!is_pinned || !non_blocking) stream_sync(slot, "copy to the host");
}

void on_device(const at::Tensor& from, const at::Tensor& to) {
  static Kernel& what = kernel("copy D2D");
  int slot = current_stream(from.device().index()), other = current_stream(to.device().index());
  if (slot != other) {
    Event ready;
    event_record(ready, other);
    event_block(ready, slot);
  }
  enqueue(slot, what, {range(from, false), overwritten(to)},
          std::make_unique<Copy>(as_kernels_see(to), as_kernels_see(from)));
  if (slot != other) {
    Event done;
    event_record(done, slot);
    event_block(done, other);
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  TORCH_CHECK(self.layout() == c10::kStrided && to.layout() == c10::kStrided,
              "sparse tensors are not supported on the emulated accelerator");
  if (ours(self) && ours(to))
    on_device(self, to);
  else if (ours(to))
    to_device(self, to, non_blocking);
  else
    to_host(self, to, non_blocking);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

}  // namespace

}  // namespace dovetail::emu

// Copies resolve lazy conjugation and negation themselves, as the CPU's kernel does.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", dovetail::emu::copy_from);
  m.impl("_copy_from_and_resize", dovetail::emu::copy_from_and_resize);
}
