/* SPDX-License-Identifier: Apache-2.0 */
// What a collective may be given, with NCCL's words for what it may not, and how a tensor is named in messages.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <numeric>
#include <string>
#include <vector>

#include "device.h"
#include "wire.h"

namespace dovetail::emu {

using c10d::ReduceOp;

// What NCCL knows. (Complex numbers are pairs of real ones.)
inline bool known(at::ScalarType type) {
  switch (c10::toRealValueType(type)) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kByte:
    case at::kBool:
    case at::kInt:
    case at::kLong:
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2:
    case at::kFloat8_e4m3fnuz:
    case at::kFloat8_e5m2fnuz: return true;
    default: return false;
  }
}

inline void check(const at::Tensor& tensor) {
  if (!ours(tensor) || tensor.is_sparse()) C10_THROW_ERROR(ValueError, "Tensors must be on an emu device and dense");
  if (!tensor.is_contiguous(tensor.suggest_memory_format())) C10_THROW_ERROR(ValueError, "Tensors must be contiguous");
  TORCH_CHECK_WITH(TypeError, known(tensor.scalar_type()),
                   "Input tensor data type is not supported for NCCL process group: ", tensor.scalar_type());
}

inline const at::Tensor& only(const Tensors& tensors) {
  TORCH_CHECK_WITH(ValueError, tensors.size() == 1, "Expecting one tensor only but got ", tensors.size(),
                   ": several devices under one thread are not supported");
  check(tensors[0]);
  return tensors[0];
}

inline void check_rank(int64_t rank, int size, const char* what) {
  TORCH_CHECK_WITH(ValueError, rank >= 0 && rank < size, "invalid ", what, " rank: ", rank);
}

inline std::string dtype(const at::Tensor& tensor) { return std::string(c10::getDtypeNames(tensor.scalar_type()).first); }

inline std::string shown(const at::Tensor& tensor) {  // "float32[4, 3]"
  return dtype(tensor) + c10::str(tensor.sizes());
}

inline std::string key_of(const at::Tensor& tensor) { return dtype(tensor) + " " + std::to_string(tensor.numel()); }

inline std::string shown(const Tensors& tensors) {
  return tensors.size() == 1 ? shown(tensors[0]) : std::to_string(tensors.size()) + " tensors, first " + shown(tensors[0]);
}

// The tensor's memory as kernels see it, in one dimension.
inline at::Tensor flat(const at::Tensor& tensor) { return seen(tensor).as_strided({tensor.numel()}, {1}); }

inline Tensors flat(const Tensors& tensors) {
  Tensors all;
  for (const auto& tensor : tensors) all.push_back(flat(tensor));
  return all;
}

inline at::Tensor flat_real(const at::Tensor& tensor) {
  auto values = flat(tensor);
  return values.is_complex() ? at::view_as_real(values).view(-1) : values;
}

inline const char* name_of(ReduceOp::RedOpType op) {
  switch (op) {
    case ReduceOp::SUM: return "SUM";
    case ReduceOp::AVG: return "AVG";
    case ReduceOp::PRODUCT: return "PRODUCT";
    case ReduceOp::MIN: return "MIN";
    case ReduceOp::MAX: return "MAX";
    case ReduceOp::BAND: return "BAND";
    case ReduceOp::BOR: return "BOR";
    case ReduceOp::BXOR: return "BXOR";
    case ReduceOp::PREMUL_SUM: return "PREMUL_SUM";
    default: return "an unknown operation";
  }
}

// The reduction, and what it reads besides its input.
inline Reduction checked(const ReduceOp& op, const at::Tensor& tensor, Tensors& inputs) {
  Reduction reduction;
  reduction.op = op.op_;
  auto type = tensor.scalar_type();
  TORCH_CHECK_WITH(ValueError, op.op_ < ReduceOp::BAND || op.op_ == ReduceOp::PREMUL_SUM, "Cannot use ReduceOp.",
                   name_of(op.op_), " with NCCL");
  TORCH_CHECK_WITH(TypeError, type != at::kBool || op.op_ != ReduceOp::AVG,
                   "Cannot use ReduceOp.AVG with Boolean inputs");
  TORCH_CHECK(!tensor.is_complex() || c10d::isComplexViewAsRealAllowed(op), "all_reduce does not support ",
              name_of(op.op_), " on complex tensors");
  TORCH_CHECK_WITH(TypeError, !c10::isFloat8Type(type), "Unsupported Float8 type for NCCL reduction");
  if (op.op_ == ReduceOp::PREMUL_SUM) {
    TORCH_CHECK_WITH(TypeError, at::isFloatingType(type), "PreMulSum Data type must be half, float, bfloat16 or double");
    const auto* supplement = dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
    TORCH_CHECK_WITH(ValueError, supplement, "PREMUL_SUM without its factor");
    reduction.factor = supplement->double_factor;
    if (supplement->tensor_factor.defined()) {
      check(supplement->tensor_factor);
      inputs.push_back(supplement->tensor_factor);
      reduction.factors = flat(supplement->tensor_factor);
    }
  }
  return reduction;
}

inline std::vector<int64_t> byte_lengths(const at::Tensor& tensor, const std::vector<int64_t>& splits, int size,
                                  const char* side) {
  if (!splits.empty()) {
    TORCH_CHECK_WITH(ValueError, int(splits.size()) == size, "Number of tensor splits not equal to group size");
    int64_t sum = std::accumulate(splits.begin(), splits.end(), int64_t(0));
    TORCH_CHECK_WITH(ValueError, tensor.dim() > 0 ? sum == tensor.size(0) : sum == 0,
                     "Split sizes doesn't match total dim 0 size of the ", side, " tensor");
  } else {
    TORCH_CHECK_WITH(ValueError, tensor.dim() > 0 && tensor.size(0) % size == 0,
                     "Tensor's dim 0 does not divide equally across group size");
  }
  std::vector<int64_t> lengths;
  int64_t row = tensor.dim() && tensor.size(0) ? tensor.numel() / tensor.size(0) * int64_t(tensor.element_size()) : 0;
  for (int rank = 0; rank < size; rank++)
    lengths.push_back(row * (splits.empty() ? tensor.size(0) / size : splits[size_t(rank)]));
  return lengths;
}

inline std::vector<int64_t> byte_lengths(const Tensors& tensors) {
  std::vector<int64_t> lengths;
  for (const auto& tensor : tensors) lengths.push_back(tensor.numel() * int64_t(tensor.element_size()));
  return lengths;
}

inline void check_same_type(const Tensors& tensors, const at::Tensor& with) {
  for (const auto& tensor : tensors) {
    check(tensor);
    TORCH_CHECK_WITH(TypeError, tensor.scalar_type() == with.scalar_type(), "Tensors must have identical type");
  }
}

}  // namespace dovetail::emu
