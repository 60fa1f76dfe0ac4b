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

// What the meta kernel says of a call.
struct Promise {
  bool blind = false;  // nothing: the results' shapes depend on data, or there is no meta kernel
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
  bool synchronous = false;       // the host cannot know the shapes
  bool tried = false;             // the CPU's kernel itself tells the shapes, from arguments full of zeros
  bool admits_host_tensors = false;
  bool overwrites = false;        // writes all of its first argument without reading it

  // The shapes of a call's results; checks the arguments as the meta kernel does.
  std::shared_ptr<const Promise> promise(const c10::OperatorHandle& op, const IValue* args);

 private:
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
