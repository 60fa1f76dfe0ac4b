/* SPDX-License-Identifier: Apache-2.0 */
// Launching operators: their results are allocated, with shapes that are known before they run, and the CPU's kernel runs
// later on the stream's thread. Where shapes depend on data the host waits, and that is counted.
#include "operators.h"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <cstring>

namespace dovetail::emu {

namespace {

// Warnings were given by the rehearsal, at the launch.
struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// What the thread of a stream needs to be, once: kernels are below autograd, and use as many threads as the host said.
void prepare_thread(int threads, bool grad_mode) {
  static auto* silent = new Silent;
  thread_local at::AutoDispatchBelowADInplaceOrView below;
  c10::GradMode::set_enabled(grad_mode);  // oneDNN's recurrent layers ask whether there will be a backward pass
  thread_local int last = 0;
  if (!last) c10::WarningUtils::set_warning_handler(silent);
  if (last != threads) at::set_num_threads(last = threads);
}

void copy_result(const at::Tensor& to, const at::Tensor& from, const std::string& name) {
  if (!from.defined() || from.numel() == 0) return;  // what nobody will read, as statistics of batch norm in evaluation
  TORCH_CHECK(to.sizes() == from.sizes(), name, ": promised a result of ", to.sizes(), ", gave ", from.sizes());
  if (to.dtype() == from.dtype() && to.strides() == from.strides() && from.is_non_overlapping_and_dense() &&
      !from.is_conj() && !from.is_neg())
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
  else
    const_cast<at::Tensor&>(to).copy_(from);
}

struct OperatorCall final : Body {
  c10::OperatorHandle op;
  Stack stack;
  std::vector<IValue> into;  // by result: memory that it is copied to
  const std::string* name;
  int threads = at::get_num_threads();
  bool grad_mode = c10::GradMode::is_enabled();
  bool keep = false;         // the results stay on the stack, for the host

  OperatorCall(const c10::OperatorHandle& o, const std::string& n) : op(o), name(&n) {}

  void run() override {
    prepare_thread(threads, grad_mode);
    try {
      op.callBoxed(&stack);
    } catch (const c10::Error& e) {
      throw std::runtime_error(e.what_without_backtrace());  // of this thread, where nobody wrote code
    }
    for (size_t i = 0; i < into.size(); i++) {
      if (into[i].isTensor()) {
        copy_result(into[i].toTensor(), stack[i].toTensor(), *name);
      } else if (into[i].isTensorList()) {
        auto to = into[i].toTensorList(), from = stack[i].toTensorList();
        TORCH_CHECK(to.size() == from.size(), *name, ": promised ", to.size(), " tensors, gave ",
                    from.size());
        for (size_t k = 0; k < to.size(); k++)
          if (at::Tensor t = to[k]; t.defined()) copy_result(t, from[k], *name);
      }
    }
    if (!keep) stack.clear();
  }
};

// A call that the host waits for keeps its results: the stream's job only points to it.
struct Waited final : Body {
  std::shared_ptr<OperatorCall> call;
  explicit Waited(std::shared_ptr<OperatorCall> c) : call(std::move(c)) {}
  void run() override { call->run(); }
};

int device_of_call(const Signature& signature, const IValue* args) {
  int device = -1;
  const size_t n = signature.arguments.size();
  for (size_t i = 0; device < 0 && i < n; i++)
    each_tensor(args[i], [&](const at::Tensor& t) {
      if (device < 0 && ours(t)) device = t.device().index();
    });
  for (size_t i = 0; device < 0 && i < n; i++)
    if (args[i].isDevice() && args[i].toDevice().type() == c10::kPrivateUse1) device = args[i].toDevice().index();
  if (device < 0) device = current_device();
  for (size_t i = 0; i < n; i++)
    each_tensor(args[i], [&](const at::Tensor& t) {
      bool fits = ours(t) ? t.device().index() == device
                          : t.device().is_cpu() && !signature.arguments[i].write &&
                                (t.dim() == 0 || signature.admits_host_tensors);
      TORCH_CHECK(fits, "Expected all tensors to be on the same device, but found at least two devices, emu:", device,
                  " and ", t.device(), "! (when launching ", signature.kernel->name, ")");
    });
  return device;
}

// A host tensor as of now: the kernel runs later, when it may have changed. Wrapped numbers never change.
at::Tensor host_value(const at::Tensor& t) {
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) return t;
  return t.clone();
}

void resize_outs(const Signature& signature, const Promise& promise, const IValue* args) {
  for (size_t r = 0; r < signature.returned.size() && r < promise.results.size(); r++) {
    int i = signature.returned[r];
    if (i < 0 || !args[i].isTensor() || promise.results[r].kind != PromisedResult::tensor) continue;
    const auto& out = args[i].toTensor();
    const auto& shape = promise.results[r].shapes[0];
    if (out.defined() && shape.defined && out.sizes() != at::IntArrayRef(shape.sizes)) out.resize_(shape.sizes);
  }
}

IValue view_of(const at::Tensor& self, const PromisedResult& result) {
  if (result.kind == PromisedResult::tensor) return alias_tensor(self, result.shapes[0]);
  c10::List<at::Tensor> out;
  for (const auto& shape : result.shapes) out.push_back(alias_tensor(self, shape));
  return out;
}

void replace(Stack* stack, size_t count, std::vector<IValue>& results) {
  torch::jit::drop(*stack, count);
  for (auto& r : results) stack->push_back(std::move(r));
}

// The call as the stream's thread will make it, and the bytes it touches.
void translate(const Signature& signature, const IValue* args, int device, bool blind, Stack& call,
               std::vector<Range>& ranges) {
  const size_t n = signature.arguments.size();
  call.reserve(n);
  for (size_t i = 0; i < n; i++) {
    const auto& argument = signature.arguments[i];
    if (argument.generator) {
      call.emplace_back(draw(args[i].isGenerator() ? std::optional(args[i].toGenerator()) : std::nullopt, device));
      continue;
    }
    if (args[i].isDevice()) {
      call.emplace_back(c10::Device(c10::kCPU));
      continue;
    }
    call.push_back(map_tensors(args[i], [&](const at::Tensor& t) {
      if (!ours(t)) return host_value(t);
      if (blind && argument.out) return at::empty({0}, t.options().device(at::kCPU));
      ranges.push_back(range(t, argument.write));
      ranges.back().overwrites = argument.out || (i == 0 && signature.overwrites);
      return seen(t);
    }));
  }
}

void launch_and_wait(const c10::OperatorHandle& op, Signature& signature, Stack* stack, int device) {
  const size_t n = signature.arguments.size();
  const IValue* args = &*(stack->end() - std::ptrdiff_t(n));
  auto call = std::make_shared<OperatorCall>(op, signature.kernel->name);
  call->keep = true;
  std::vector<Range> ranges;
  translate(signature, args, device, true, call->stack, ranges);
  signature.kernel->synchronous++;
  int slot = current_stream(device);
  enqueue(slot, *signature.kernel, ranges, std::make_unique<Waited>(call));
  stream_sync(slot, signature.kernel->name.c_str());
  std::vector<IValue> results;
  for (size_t r = 0; r < signature.returned.size(); r++) {
    int i = signature.returned[r];
    if (i < 0) {
      results.push_back(map_tensors(call->stack[r], [&](const at::Tensor& t) { return uploaded(t, device); }));
    } else {
      if (signature.arguments[size_t(i)].out) {
        auto out = args[i].toTensor();
        auto value = call->stack[r].toTensor();
        out.resize_(value.sizes());
        out.copy_(uploaded(value, device));
      }
      results.push_back(args[i]);
    }
  }
  replace(stack, n, results);
}

}  // namespace

void launch(const c10::OperatorHandle& op, Stack* stack) {
  auto& signature = signature_of(op);
  const size_t n = signature.arguments.size();
  const IValue* args = &*(stack->end() - std::ptrdiff_t(n));
  int device = device_of_call(signature, args);
  auto promise = signature.promise(op, args);
  std::vector<IValue> results;

  if (signature.view) {
    TORCH_CHECK(!promise->blind, signature.kernel->name, ": no meta kernel, so no view on the emulated accelerator");
    at::Tensor self;
    each_tensor(args[0], [&](const at::Tensor& t) { self = t; });
    for (const auto& r : promise->results) results.push_back(view_of(self, r));
    replace(stack, n, results);
    return;
  }
  if (signature.reshapes) {
    const auto& shape = promise->results.at(0).shapes.at(0);
    args[0].toTensor().unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes, shape.strides, shape.offset);
    results.push_back(args[0]);
    replace(stack, n, results);
    return;
  }
  if (promise->blind) {
    launch_and_wait(op, signature, stack, device);
    return;
  }
  if (signature.outs) resize_outs(signature, *promise, args);

  auto call = std::make_unique<OperatorCall>(op, signature.kernel->name);
  std::vector<Range> ranges;
  ranges.reserve(n + 2);
  translate(signature, args, device, false, call->stack, ranges);
  auto make = [&](const Shape& shape) {
    if (!shape.defined) return at::Tensor();
    auto t = fresh_tensor(shape, device);
    ranges.push_back(range(t, true));
    ranges.back().overwrites = true;
    return t;
  };
  for (size_t r = 0; r < signature.returned.size(); r++) {
    int i = signature.returned[r];
    if (i >= 0) {
      results.push_back(args[i]);
      call->into.emplace_back();
      continue;
    }
    const auto& result = promise->results[r];
    if (result.kind == PromisedResult::tensor) {
      results.emplace_back(make(result.shapes[0]));
    } else if (result.kind == PromisedResult::tensors) {
      c10::List<at::Tensor> list;
      for (const auto& shape : result.shapes) list.push_back(make(shape));
      results.emplace_back(std::move(list));
    } else {
      results.push_back(result.value_);
    }
    bool copied = result.kind != PromisedResult::value && !(results.back().isTensor() && !results.back().toTensor().defined());
    call->into.push_back(copied ? map_tensors(results.back(), [](const at::Tensor& t) { return seen(t); }) : IValue());
  }
  int slot = current_stream(device);
  enqueue(slot, *signature.kernel, ranges, std::move(call));
  if (signature.writes_by_mask(args)) stream_sync(slot, "a mask as an index");
  replace(stack, n, results);
}

void launch_named(const char* name, const char* overload, Stack* stack) {
  launch(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload), stack);
}

}  // namespace dovetail::emu
