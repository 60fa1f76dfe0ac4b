/* SPDX-License-Identifier: Apache-2.0 */
// What is known of an operator's call before it runs: from its schema, and from a rehearsal.
//
// The first call of an operator with arguments of certain shapes is rehearsed on the host, by the CPU's kernel with
// made-up values: the results have the shapes and strides that the CPU gives them, and wrong arguments raise at the call.
// That depends on shapes, types and plain arguments only, so it is kept: a training loop makes the same calls in every
// iteration. Meta kernels tell of views, of large tensors, and of what made-up values cannot be used for. They are second
// choice, because most are written in Python, are made for CUDA's strides, and load torch's compiler first (seconds).
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/enum_tag.h>
#include <torch/csrc/Exceptions.h>

#include <cstring>
#include <unordered_set>

#include "operators.h"

namespace dovetail::emu {

namespace {

constexpr size_t MOST_PROMISES = 4096;                 // per operator; then all are forgotten
constexpr size_t MOST_REHEARSED = size_t(64) << 20;  // bytes of a call's tensors

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

bool is_mask(const at::Tensor& t) { return t.scalar_type() == at::kBool || t.scalar_type() == at::kByte; }

size_t bytes_of(const IValue* args, size_t count) {
  size_t sum = 0;
  for (size_t i = 0; i < count; i++) each_tensor(args[i], [&](const at::Tensor& t) { sum += t.nbytes(); });
  return sum;
}

// What a rehearsal draws is drawn again by nobody.
struct KeepRandomState {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  at::Tensor state = generator.get_state();
  ~KeepRandomState() { generator.set_state(state); }
};

}  // namespace

size_t Signature::KeyHash::operator()(const Key& key) const {
  uint64_t h = key.size();
  for (int64_t v : key) h = (h ^ uint64_t(v)) * 0x9E3779B97F4A7C15ull, h ^= h >> 29;
  return size_t(h);
}

Signature::Signature(const c10::OperatorHandle& op) {
  static const auto* host_tensors = new std::unordered_set<std::string>{
      "aten::index", "aten::_index_put_impl_", "aten::index_put_", "aten::index_put", "aten::_unsafe_index",
      "aten::_unsafe_index_put"};
  static const auto* overwriting = new std::unordered_set<std::string>{
      "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_", "aten::random_", "aten::bernoulli_",
      "aten::exponential_", "aten::cauchy_", "aten::log_normal_", "aten::geometric_"};
  const auto& schema = op.schema();
  const auto& name = schema.name();
  kernel = &emu::kernel(schema.overload_name().empty() ? name : name + "." + schema.overload_name());
  mask_decides = name == "aten::index" || name == "aten::_unsafe_index";
  values_checked = name == "aten::segment_reduce";
  indexed_write = name == "aten::_index_put_impl_";
  data_decides = !mask_decides && op.hasTag(at::Tag::dynamic_output_shape);
  reshapes = op.hasTag(at::Tag::inplace_view);
  draws = op.hasTag(at::Tag::nondeterministic_seeded);
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
    draws = draws && !a.generator;
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

bool Signature::writes_by_mask(const IValue* args) const {
  if (!indexed_write || args[2].toTensor().numel() == 1) return false;  // one value: a masked fill
  bool masked = false;
  each_tensor(args[1], [&](const at::Tensor& t) { masked = masked || is_mask(t); });
  return masked;
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
  Key mine = std::move(key);  // a meta kernel in Python may launch operators
  auto out = ask(op, args);
  key = std::move(mine);
  if (keyed) {
    std::lock_guard<std::mutex> lock(mu_);
    if (known_.size() >= MOST_PROMISES) known_.clear();
    known_.emplace(key, out);
  }
  return out;
}

std::shared_ptr<const Promise> Signature::ask(const c10::OperatorHandle& op, const IValue* args) const {
  auto out = std::make_shared<Promise>();
  bool masked = false;
  if (mask_decides) each_tensor(args[1], [&](const at::Tensor& t) { masked = masked || is_mask(t); });
  if (data_decides || masked) {
    out->blind = true;
    return out;
  }
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  Stack stack;
  bool known = false;
  if (!view && !reshapes && !values_checked && bytes_of(args, arguments.size()) <= MOST_REHEARSED) {
    try {
      rehearse(op, args, stack, 1.0, 0);
      known = true;
    } catch (const c10::NotImplementedError&) {
      throw;
    } catch (const c10::Error&) {
      // Arguments that do not fit fail with any values; a division by zero does not fail with these.
      auto wrong = std::current_exception();
      try {
        rehearse(op, args, stack, 0.5, 1);
        known = true;
      } catch (const c10::LinAlgError&) {
      } catch (const c10::Error&) {
        std::rethrow_exception(wrong);
      }
    }
  }
  if (known || call_meta(op, args, stack)) {
    for (const auto& v : stack) out->results.push_back(promised(v, kernel->name));
  } else {
    out->blind = makes || outs;
  }
  return out;
}

void Signature::rehearse(const c10::OperatorHandle& op, const IValue* args, Stack& stack, double floats,
                         int64_t integers) const {
  std::optional<KeepRandomState> kept;
  if (draws) kept.emplace();
  stack.clear();
  for (size_t i = 0; i < arguments.size(); i++) {
    if (arguments[i].generator) {
      stack.emplace_back(at::make_generator<at::CPUGeneratorImpl>());
      continue;
    }
    stack.push_back(args[i].isDevice() ? IValue(c10::Device(c10::kCPU)) : map_tensors(args[i], [&](const at::Tensor& t) {
      if (!ours(t)) return t.unsafeGetTensorImpl()->is_wrapped_number() ? t : t.clone();
      auto made = at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type());
      at::Tensor like(made);
      if (t.is_floating_point() || t.is_complex())
        like.fill_(floats);
      else
        like.fill_(integers);
      return like;
    }));
  }
  op.callBoxed(&stack);
}

bool Signature::call_meta(const c10::OperatorHandle& op, const IValue* args, Stack& stack) const {
  stack.clear();
  for (size_t i = 0; i < arguments.size(); i++) {
    IValue v = map_tensors(args[i], [&](const at::Tensor& t) {
      return ours(t) || (admits_host_tensors && t.dim()) ? meta_tensor(t) : t;
    });
    if (v.isDevice()) v = c10::Device(c10::kMeta);
    if (arguments[i].generator) v = IValue();
    stack.push_back(std::move(v));
  }
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
