/* SPDX-License-Identifier: Apache-2.0 */
// What is known of an operator's call before it runs: from its schema, and from its meta kernel.
//
// A meta kernel's answer depends on shapes, types and plain arguments only, so it is kept: a training loop makes the same
// calls in every iteration, and a meta kernel written in Python costs more than everything else here.
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/Exceptions.h>

#include <cstring>
#include <unordered_set>

#include "operators.h"

namespace dovetail::emu {

namespace {

constexpr size_t MOST_PROMISES = 4096;  // per operator; then all are forgotten

using Key = std::vector<int64_t>;

// Appends what the answer of a meta kernel may depend on; false: the value has no such form.
bool append(Key& key, const IValue& value, bool with_offset) {
  auto tensor = [&](const at::Tensor& t) {
    if (!t.defined()) {
      key.push_back(-1);
      return;
    }
    auto* impl = t.unsafeGetTensorImpl();
    key.push_back(int64_t(t.scalar_type()) | int64_t(t.dim()) << 8 | int64_t(ours(t)) << 16 |
                  int64_t(impl->is_wrapped_number()) << 17 | int64_t(t.device().is_cpu()) << 18);
    key.insert(key.end(), t.sizes().begin(), t.sizes().end());
    key.insert(key.end(), t.strides().begin(), t.strides().end());
    if (with_offset) key.push_back(t.storage_offset());
  };
  auto bits = [&](double d) {
    int64_t b;
    std::memcpy(&b, &d, sizeof b);
    key.push_back(b);
  };
  if (value.isTensor()) {
    key.push_back('T');
    tensor(value.toTensor());
  } else if (value.isNone()) {
    key.push_back('N');
  } else if (value.isInt()) {
    key.push_back('I');
    key.push_back(value.toInt());
  } else if (value.isDouble()) {
    key.push_back('D');
    bits(value.toDouble());
  } else if (value.isBool()) {
    key.push_back(value.toBool() ? 'B' : 'b');
  } else if (value.isIntList()) {
    auto list = value.toIntList();
    key.push_back('i');
    key.push_back(int64_t(list.size()));
    for (int64_t i : list) key.push_back(i);
  } else if (value.isTensorList()) {
    auto list = value.toTensorList();
    key.push_back('t');
    key.push_back(int64_t(list.size()));
    for (const at::Tensor& t : list) tensor(t);
  } else if (value.isDoubleList()) {
    auto list = value.toDoubleList();
    key.push_back('d');
    key.push_back(int64_t(list.size()));
    for (double d : list) bits(d);
  } else if (value.isBoolList()) {
    auto list = value.toBoolList();
    key.push_back('o');
    key.push_back(int64_t(list.size()));
    for (bool b : list) key.push_back(b);
  } else if (value.isComplexDouble()) {
    key.push_back('C');
    bits(value.toComplexDouble().real());
    bits(value.toComplexDouble().imag());
  } else if (value.isDevice()) {
    key.push_back('V');
  } else if (value.isGenerator()) {
    key.push_back('G');
  } else if (value.isString()) {
    const auto& text = value.toStringRef();
    key.push_back('S');
    key.push_back(int64_t(text.size()));
    for (char c : text) key.push_back(c);
  } else if (value.isList()) {
    auto list = value.toListRef();
    key.push_back('l');
    key.push_back(int64_t(list.size()));
    for (const auto& item : list)
      if (!append(key, item, with_offset)) return false;
  } else {
    return false;
  }
  return true;
}

PromisedResult promised(const IValue& value, const std::string& name) {
  PromisedResult out;
  auto add = [&](const at::Tensor& t) {
    if (!t.defined()) {
      out.shapes.emplace_back();
      return;
    }
    TORCH_CHECK(t.layout() == c10::kStrided, name, ": sparse tensors are not supported on the emulated accelerator");
    out.shapes.push_back(shape_of(t));
  };
  if (value.isTensor()) {
    out.kind = PromisedResult::tensor;
    add(value.toTensor());
  } else if (value.isTensorList()) {
    out.kind = PromisedResult::tensors;
    for (const at::Tensor& t : value.toTensorList()) add(t);
  } else {
    out.kind = PromisedResult::value;
    out.value_ = value;
  }
  return out;
}

// Calls the operator with tensors without data. False: there is no meta kernel, or it needs the data.
bool call_meta(const c10::OperatorHandle& op, Stack& stack) {
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  try {
    op.callBoxed(&stack);
    return true;
  } catch (const c10::NotImplementedError&) {
    return false;
  } catch (python_error& e) {
    pybind11::gil_scoped_acquire gil;
    if (!e.type) e.persist();
    if (PyErr_GivenExceptionMatches(e.type, PyExc_NotImplementedError)) return false;
    throw;
  } catch (pybind11::error_already_set& e) {
    pybind11::gil_scoped_acquire gil;
    if (e.matches(PyExc_NotImplementedError)) return false;
    throw;
  }
}

}  // namespace

size_t Signature::KeyHash::operator()(const Key& key) const {
  uint64_t h = key.size();
  for (int64_t v : key) h = (h ^ uint64_t(v)) * 0x9E3779B97F4A7C15ull, h ^= h >> 29;
  return size_t(h);
}

Signature::Signature(const c10::OperatorHandle& op) {
  // The meta kernels of these say something else than the CPU's kernels, or nothing that one can rely on.
  static const auto* data_decides = new std::unordered_set<std::string>{
      "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::repeat_interleave"};
  // Their meta kernels speak for CUDA, or not at all; their shapes do not depend on data.
  static const auto* cpu_decides = new std::unordered_set<std::string>{
      "aten::_embedding_bag", "aten::_embedding_bag_forward_only", "aten::mkldnn_rnn_layer",
      "aten::mkldnn_rnn_layer_backward", "aten::_logcumsumexp"};
  static const auto* host_tensors = new std::unordered_set<std::string>{
      "aten::index", "aten::_index_put_impl_", "aten::index_put_", "aten::index_put", "aten::_unsafe_index",
      "aten::_unsafe_index_put"};
  static const auto* overwriting = new std::unordered_set<std::string>{
      "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_", "aten::random_", "aten::bernoulli_",
      "aten::exponential_", "aten::cauchy_", "aten::log_normal_", "aten::geometric_"};
  const auto& schema = op.schema();
  const auto& name = schema.name();
  kernel = &emu::kernel(schema.overload_name().empty() ? name : name + "." + schema.overload_name());
  synchronous = data_decides->count(name) > 0;
  tried = cpu_decides->count(name) > 0;
  reshapes = op.hasTag(at::Tag::inplace_view);
  admits_host_tensors = host_tensors->count(name) > 0;
  overwrites = overwriting->count(name) > 0;
  for (const auto& formal : schema.arguments()) {
    auto type = formal.type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    Argument a;
    a.write = formal.alias_info() && formal.alias_info()->isWrite();
    a.out = formal.is_out();
    a.generator = type->kind() == c10::TypeKind::GeneratorType;
    outs = outs || a.out;
    arguments.push_back(a);
  }
  for (const auto& result : schema.returns()) {
    int which = -1;
    if (const auto* alias = result.alias_info()) {
      if (!alias->isWrite()) view = true;
      for (size_t i = 0; alias->isWrite() && i < arguments.size(); i++)
        if (arguments[i].write && schema.arguments()[i].alias_info()->beforeSets() == alias->beforeSets()) which = int(i);
    }
    returned.push_back(which);
    makes = makes || which < 0;
  }
}

std::shared_ptr<const Promise> Signature::promise(const c10::OperatorHandle& op, const IValue* args) {
  thread_local Key key;
  key.clear();
  bool keyed = true;
  for (size_t i = 0; keyed && i < arguments.size(); i++) keyed = append(key, args[i], view);
  if (keyed) {
    std::lock_guard<std::mutex> lock(mu_);
    auto it = known_.find(key);
    if (it != known_.end()) return it->second;
  }
  auto out = std::make_shared<Promise>();
  out->blind = synchronous;
  if (!synchronous) {
    Key mine = std::move(key);  // a meta kernel in Python may launch operators
    Stack stack;
    for (size_t i = 0; i < arguments.size(); i++) {
      IValue v = map_tensors(args[i], [&](const at::Tensor& t) {
        if (tried && ours(t)) return at::zeros_like(meta_tensor(t), t.options().device(at::kCPU));
        return ours(t) || (admits_host_tensors && t.dim()) ? meta_tensor(t) : t;
      });
      if (v.isDevice()) v = c10::Device(tried ? c10::kCPU : c10::kMeta);
      if (arguments[i].generator) v = IValue();
      stack.push_back(std::move(v));
    }
    if (call_meta(op, stack)) {
      for (const auto& v : stack) out->results.push_back(promised(v, kernel->name));
    } else {
      out->blind = makes || outs;
    }
    key = std::move(mine);
  }
  if (keyed) {
    std::lock_guard<std::mutex> lock(mu_);
    if (known_.size() >= MOST_PROMISES) known_.clear();
    known_.emplace(key, out);
  }
  return out;
}

Signature& signature_of(const c10::OperatorHandle& op) {
  static auto* mu = new std::mutex;
  static auto* all = new std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<Signature>>;
  thread_local std::unordered_map<const c10::FunctionSchema*, Signature*> mine;
  const auto* schema = &op.schema();
  auto& found = mine[schema];
  if (!found) {
    std::lock_guard<std::mutex> lock(*mu);
    auto& made = (*all)[schema];
    if (!made) made = std::make_unique<Signature>(op);
    found = made.get();
  }
  return *found;
}

}  // namespace dovetail::emu
