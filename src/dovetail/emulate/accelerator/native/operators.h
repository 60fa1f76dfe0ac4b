/* SPDX-License-Identifier: Apache-2.0 */
// Launching any operator of torch on the device: one boxed function for all of them.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <mutex>
#include <unordered_map>

#include "tensors.h"

namespace dovetail::emu {

// One result of an operator, before the operator has run.
struct PromisedResult {
  enum { nothing, tensor, tensors, value } kind = nothing;
  std::vector<Shape> shapes;
  IValue value_;
};

// What is known of a call's results before it runs.
struct Promise {
  bool blind = false;  // nothing: their shapes depend on data
  std::vector<PromisedResult> results;
};

// What a schema says of an operator's calls: worked out once.
struct Signature {
  struct Argument {
    bool write = false, out = false, generator = false;
  };
  explicit Signature(const c10::OperatorHandle& op);
  Kernel* kernel;
  std::vector<Argument> arguments;
  std::vector<int> returned;      // by result: the argument that it is, or -1
  bool view = false;              // results alias the first argument
  bool outs = false;              // has out= arguments, which may be given another shape
  bool makes = false;             // has results of its own
  bool reshapes = false;          // only gives its first argument another shape: squeeze_, transpose_
  bool data_decides = false;      // shapes depend on data, so the host has to wait
  bool mask_decides = false;      // they do where an index is a mask
  bool indexed_write = false;
  bool values_checked = false;    // made-up values would be refused
  bool draws = false;             // random numbers, from a generator that is not among its arguments
  bool admits_host_tensors = false;
  bool overwrites = false;        // writes all of its first argument without reading it

  // CUDA turns masks into indices before it writes, and waits for their number.
  bool writes_by_mask(const IValue* args) const;
  // The shapes of a call's results. Throws what the call would throw for arguments of these shapes.
  std::shared_ptr<const Promise> promise(const c10::OperatorHandle& op, const IValue* args);

 private:
  std::shared_ptr<const Promise> ask(const c10::OperatorHandle& op, const IValue* args) const;
  // Calls the operator on the host with made-up values, or with tensors without data; leaves the results.
  void rehearse(const c10::OperatorHandle& op, const IValue* args, Stack& stack, double floats, int64_t integers) const;
  bool call_meta(const c10::OperatorHandle& op, const IValue* args, Stack& stack) const;
  struct KeyHash {
    size_t operator()(const std::vector<int64_t>& key) const;
  };
  std::mutex mu_;
  std::unordered_map<std::vector<int64_t>, std::shared_ptr<const Promise>, KeyHash> known_;
};

Signature& signature_of(const c10::OperatorHandle& op);

// Runs `op` for the arguments on top of the stack and leaves its results there.
void launch(const c10::OperatorHandle& op, Stack* stack);
// launch() of the operator with this name: aten::name.overload.
void launch_named(const char* name, const char* overload, Stack* stack);

}  // namespace dovetail::emu
