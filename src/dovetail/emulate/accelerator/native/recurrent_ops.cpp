/* SPDX-License-Identifier: Apache-2.0 */
// Recurrent networks the way the CPU computes them. torch takes fused cells for granted on other devices; here they are
// needed for packed sequences only, and differ from the CPU in the last bit.
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/lstm_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "device.h"

namespace dovetail::emu {

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

constexpr int64_t LSTM = 2;  // oneDNN's number of the kind of cell

bool given(const Maybe& t) { return t.has_value() && t->defined(); }

// --- Fused cells --------------------------------------------------------------------------------------------------------

// Gates in the order input, forget, cell, output.
Three fused_lstm_cell(const Tensor& from_input, const Tensor& from_hidden, const Tensor& cx, const Maybe& input_bias,
                      const Maybe& hidden_bias) {
  auto input = given(input_bias) ? from_input + *input_bias : from_input;
  auto hidden = given(hidden_bias) ? from_hidden + *hidden_bias : from_hidden;
  auto gates = hidden.add(input).chunk(4, 1);
  auto i = gates[0].sigmoid(), f = gates[1].sigmoid(), c = gates[2].tanh(), o = gates[3].sigmoid();
  auto cy = (f * cx).add_(i * c);
  return {o * cy.tanh(), cy, at::cat({i, f, c, o}, 1)};
}

Three fused_lstm_cell_backward(const Maybe& grad_hy, const Maybe& grad_cy, const Tensor& cx, const Tensor& cy,
                               const Tensor& workspace, bool has_bias) {
  if (!given(grad_hy) && !given(grad_cy)) return {};
  auto gates = workspace.chunk(4, 1);
  auto i = gates[0], f = gates[1], c = gates[2], o = gates[3], t = cy.tanh();
  auto dh = given(grad_hy) ? *grad_hy : at::zeros_like(cy);
  auto dc = dh * o * (1 - t * t);
  if (given(grad_cy)) dc = dc + *grad_cy;
  auto dgates =
      at::cat({dc * c * i * (1 - i), dc * cx * f * (1 - f), dc * i * (1 - c * c), dh * t * o * (1 - o)}, 1);
  return {dgates, dc * f, has_bias ? dgates.sum(0, false) : Tensor()};
}

// Gates in the order reset, update, new; the workspace keeps them, the hidden part of the new gate, and hx.
std::tuple<Tensor, Tensor> fused_gru_cell(const Tensor& from_input, const Tensor& from_hidden, const Tensor& hx,
                                          const Maybe& input_bias, const Maybe& hidden_bias) {
  auto input = (given(input_bias) ? from_input + *input_bias : from_input).chunk(3, 1);
  auto hidden = (given(hidden_bias) ? from_hidden + *hidden_bias : from_hidden).chunk(3, 1);
  auto r = hidden[0].add(input[0]).sigmoid(), z = hidden[1].add(input[1]).sigmoid();
  auto n = input[2].add(hidden[2].mul(r)).tanh();
  return {(hx - n).mul_(z).add_(n), at::cat({r, z, n, hidden[2], hx}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> fused_gru_cell_backward(const Tensor& grad_hy,
                                                                            const Tensor& workspace, bool has_bias) {
  auto kept = workspace.chunk(5, 1);
  auto r = kept[0], z = kept[1], n = kept[2], hidden = kept[3], hx = kept[4];
  auto dn = grad_hy * (1 - z) * (1 - n * n);
  auto dz = grad_hy * (hx - n) * z * (1 - z), dr = dn * hidden * r * (1 - r);
  auto dinput = at::cat({dr, dz, dn}, 1), dhidden = at::cat({dr, dz, dn * r}, 1);
  return {dinput, dhidden, grad_hy * z, has_bias ? dinput.sum(0, false) : Tensor(),
          has_bias ? dhidden.sum(0, false) : Tensor()};
}

// --- The CPU's ways -----------------------------------------------------------------------------------------------------

std::tuple<Tensor, Tensor> lstm_cell(const Tensor& input, at::TensorList hx, const Tensor& w_ih, const Tensor& w_hh,
                                     const Maybe& b_ih, const Maybe& b_hh) {
  TORCH_CHECK(hx.size() == 2, "lstm_cell expects two hidden states");
  auto gates = at::linear(hx[0], w_hh, b_hh).add_(at::linear(input, w_ih, b_ih)).unsafe_chunk(4, 1);
  auto i = gates[0].sigmoid_(), f = gates[1].sigmoid_(), c = gates[2].tanh_(), o = gates[3].sigmoid_();
  auto cy = (f * hx[1]).add_(i * c);
  return {o * cy.tanh(), cy};
}

Tensor gru_cell(const Tensor& input, const Tensor& hx, const Tensor& w_ih, const Tensor& w_hh, const Maybe& b_ih,
                const Maybe& b_hh) {
  auto from_input = at::linear(input, w_ih, b_ih).unsafe_chunk(3, 1);
  auto from_hidden = at::linear(hx, w_hh, b_hh).unsafe_chunk(3, 1);
  auto r = from_hidden[0].add_(from_input[0]).sigmoid_(), z = from_hidden[1].add_(from_input[1]).sigmoid_();
  auto n = from_input[2].add(from_hidden[2].mul_(r)).tanh_();
  return (hx - n).mul_(z).add_(n);
}

// oneDNN's layers, one direction at a time, as the CPU strings them together.
Three lstm_of_layers(const Tensor& input_, at::TensorList hx, at::TensorList params, bool has_biases,
                     int64_t num_layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  auto input = (batch_first ? input_.transpose(0, 1) : input_).contiguous();
  auto h = hx[0].contiguous(), c = hx[1].contiguous();
  const int64_t directions = bidirectional ? 2 : 1, stride = has_biases ? 4 : 2, hidden = h.size(2);
  std::vector<Tensor> hy, cy;
  for (int64_t layer = 0; layer < num_layers; layer++) {
    std::vector<Tensor> outputs;
    for (int64_t direction = 0; direction < directions; direction++) {
      const int64_t index = layer * directions + direction;
      auto weights = params.slice(size_t(index * stride), size_t(stride));
      auto none = [](const Tensor& t) { return at::zeros(t.sizes(), t.options()); };
      auto [out, h_out, c_out, workspace] = at::mkldnn_rnn_layer(
          input, weights[0], weights[1], has_biases ? weights[2] : none(weights[0]),
          has_biases ? weights[3] : none(weights[1]), h[index], c[index], direction > 0, {}, LSTM, hidden, num_layers,
          has_biases, bidirectional, batch_first, train);
      outputs.push_back(out);
      hy.push_back(h_out);
      cy.push_back(c_out);
    }
    input = directions == 1 ? outputs[0] : at::cat(outputs, -1);
    if (dropout != 0 && train && layer < num_layers - 1) input = at::dropout(input, dropout, true);
  }
  return {batch_first ? input.transpose(0, 1) : input, at::stack(hy, 0), at::stack(cy, 0)};
}

// As the CPU chooses, but for projections, which oneDNN does not have: torch's own way, with the fused cell.
Three lstm(const Tensor& input, at::TensorList hx, at::TensorList params, bool has_biases, int64_t num_layers,
           double dropout, bool train, bool bidirectional, bool batch_first) {
  TORCH_CHECK(hx.size() == 2, "lstm expects two hidden states");
  bool projected = hx[0].size(2) != hx[1].size(2);
  bool layers = at::globalContext().userEnabledMkldnn() && input.scalar_type() == at::kFloat && input.numel() != 0;
  if (layers && !projected)
    return lstm_of_layers(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first);
  return at::compositeimplicitautograd::lstm(input, hx, params, has_biases, num_layers, dropout, train, bidirectional,
                                             batch_first);
}

}  // namespace

static void register_recurrent(torch::Library& m) {
  m.impl("lstm.input", lstm);
  m.impl("lstm_cell", lstm_cell);
  m.impl("gru_cell", gru_cell);
}

}  // namespace dovetail::emu

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  namespace emu = dovetail::emu;
  m.impl("_thnn_fused_lstm_cell", emu::fused_lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", emu::fused_lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", emu::fused_gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", emu::fused_gru_cell_backward);
  emu::register_recurrent(m);
}
// Differentiable, because they are made of operators that are.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { dovetail::emu::register_recurrent(m); }
