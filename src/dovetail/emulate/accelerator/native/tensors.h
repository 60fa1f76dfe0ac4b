/* SPDX-License-Identifier: Apache-2.0 */
// Tensors of the device made without going through torch's dispatcher, and loops over the tensors of a call.
#pragma once
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include "device.h"

namespace dovetail::emu {

using c10::IValue;
using torch::jit::Stack;

// Shape of a result, as a meta kernel told it.
struct Shape {
  bool defined = false;
  c10::SmallVector<int64_t, 5> sizes, strides;
  int64_t offset = 0;
  at::ScalarType dtype = at::kFloat;
  bool conjugated = false, negated = false;
};

Shape shape_of(const at::Tensor& tensor);
at::Tensor fresh_tensor(const Shape& shape, int device);                     // uninitialised
at::Tensor alias_tensor(const at::Tensor& self, const Shape& shape);         // of self's storage
at::Tensor meta_tensor(const at::Tensor& like);
at::Tensor uploaded(const at::Tensor& host, int device);                     // a copy; `host` must not change any more

// f(const at::Tensor&) for every defined tensor of a value.
template <typename F>
void each_tensor(const IValue& value, F&& f) {
  if (value.isTensor()) {
    if (const auto& t = value.toTensor(); t.defined()) f(t);
  } else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorList())
      if (t.defined()) f(t);
  } else if (value.isList() && value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorList())
      if (t.has_value() && t->defined()) f(*t);
  }
}

// The value with every defined tensor replaced by f(tensor).
template <typename F>
IValue map_tensors(const IValue& value, F&& f) {
  if (value.isTensor()) {
    const auto& t = value.toTensor();
    return t.defined() ? IValue(f(t)) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    auto in = value.toTensorList();
    out.reserve(in.size());
    for (const at::Tensor& t : in) out.push_back(t.defined() ? f(t) : t);
    return out;
  }
  if (value.isList() && value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    auto in = value.toOptionalTensorList();
    out.reserve(in.size());
    for (const std::optional<at::Tensor>& t : in)
      out.push_back(t.has_value() && t->defined() ? std::optional<at::Tensor>(f(*t)) : t);
    return out;
  }
  return value;
}

// A CPU tensor over memory that somebody else owns.
at::Tensor over_memory(void* memory, at::IntArrayRef sizes, at::IntArrayRef strides, caffe2::TypeMeta dtype);

}  // namespace dovetail::emu
