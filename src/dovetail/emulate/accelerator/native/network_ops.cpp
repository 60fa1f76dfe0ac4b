// Operators for which torch prescribes another way on devices than on the CPU: here they take the CPU's kernels, so that
// losses are the same bits.
#include <ATen/TensorOperators.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
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

// Devices have a fused cell of an LSTM: gates in the order input, forget, cell, output.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& from_input, const at::Tensor& from_hidden,
                                                         const at::Tensor& cx, const Maybe& input_bias,
                                                         const Maybe& hidden_bias) {
  auto input = given(input_bias) ? from_input + *input_bias : from_input;
  auto hidden = given(hidden_bias) ? from_hidden + *hidden_bias : from_hidden;
  auto gates = hidden.add(input).chunk(4, 1);
  auto i = gates[0].sigmoid(), f = gates[1].sigmoid(), c = gates[2].tanh(), o = gates[3].sigmoid();
  auto cy = (f * cx).add_(i * c);
  return {o * cy.tanh(), cy, at::cat({i, f, c, o}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const Maybe& grad_hy, const Maybe& grad_cy,
                                                                  const at::Tensor& cx, const at::Tensor& cy,
                                                                  const at::Tensor& workspace, bool has_bias) {
  if (!given(grad_hy) && !given(grad_cy)) return {};
  auto gates = workspace.chunk(4, 1);
  auto i = gates[0], f = gates[1], c = gates[2], o = gates[3], t = cy.tanh();
  auto dh = given(grad_hy) ? *grad_hy : at::zeros_like(cy);
  auto dc = dh * o * (1 - t * t);
  if (given(grad_cy)) dc = dc + *grad_cy;
  auto dgates =
      at::cat({dc * c * i * (1 - i), dc * cx * f * (1 - f), dc * i * (1 - c * c), dh * t * o * (1 - o)}, 1);
  return {dgates, dc * f, has_bias ? dgates.sum(0, false) : at::Tensor()};
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
  m.impl("_thnn_fused_lstm_cell", emu::lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", emu::lstm_cell_backward);
  m.impl("_fused_sdp_choice", emu::fused_sdp_choice);
}
