/* SPDX-License-Identifier: Apache-2.0 */
// Operators for which torch prescribes another way on devices than on the CPU: here they take the CPU's kernels, so that
// losses are the same bits.
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <torch/library.h>

#include "operators.h"

namespace dovetail::emu {

namespace {

using Maybe = std::optional<at::Tensor>;

bool given(const Maybe& t) { return t.has_value() && t->defined(); }

// The CPU's has no generator among its arguments, and would draw from the host's.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {x.clone(), at::ones_like(x, at::kBool)};
  auto mask = at::empty_like(x, at::kBool).bernoulli_(1 - p);
  return {x.mul(mask).mul_(p < 1 ? 1 / (1 - p) : 0.0), mask};
}

at::Tensor native_dropout_backward(const at::Tensor& grad, const at::Tensor& mask, double scale) {
  return grad.mul(mask).mul_(scale);
}

// Which attention kernel: asked of the CPU, for tensors of the same shapes without data.
int64_t fused_sdp_choice(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Maybe& mask,
                         double dropout, bool causal, std::optional<double> scale, bool enable_gqa) {
  auto like = [](const at::Tensor& t) { return seen(t).requires_grad_(t.requires_grad()); };
  return at::_fused_sdp_choice(like(query), like(key), like(value), given(mask) ? Maybe(like(*mask)) : std::nullopt,
                               dropout, causal, scale, enable_gqa);
}

}  // namespace

}  // namespace dovetail::emu

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  namespace emu = dovetail::emu;
  m.impl("native_dropout", emu::native_dropout);
  m.impl("native_dropout_backward", emu::native_dropout_backward);
  m.impl("_fused_sdp_choice", emu::fused_sdp_choice);
}
