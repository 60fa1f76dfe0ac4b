/* SPDX-License-Identifier: Apache-2.0 */
// Which operators take the deferring launch: every one that has no kernel of its own here, and those that torch would
// otherwise take apart into several launches.
#include <torch/library.h>

#include <algorithm>
#include <cstring>

#include "operators.h"

namespace dovetail::emu {

namespace {

void fallback(const c10::OperatorHandle& op, Stack* stack) { launch(op, stack); }

bool begins_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

// One launch where torch's own way is several: out= variants after an allocation, loops over lists of tensors, a choice
// among kernels that the CPU makes anyway, and what the CPU has a kernel for and other devices compose of others.
bool launched_whole(const c10::OperatorName& name) {
  static const auto* chosen = new std::vector<std::string>{
      "aten::convolution", "aten::convolution_backward", "aten::native_batch_norm", "aten::embedding_dense_backward"};
  if (!begins_with(name.name, "aten::")) return false;
  if (begins_with(name.name, "aten::_foreach_")) return true;
  if (name.overload_name.empty() && std::find(chosen->begin(), chosen->end(), name.name) != chosen->end()) return true;
  auto op = c10::Dispatcher::singleton().findSchema(name);
  auto has = [&](c10::DispatchKey key) { return op->hasKernelForDispatchKey(key); };
  return op.has_value() && has(c10::DispatchKey::CPU) && !has(c10::DispatchKey::PrivateUse1) &&
         (has(c10::DispatchKey::CompositeExplicitAutogradNonFunctional) ||
          has(c10::DispatchKey::CompositeExplicitAutograd) ||
          (has(c10::DispatchKey::CompositeImplicitAutograd) && has(c10::DispatchKey::Autograd)));
}

}  // namespace

void register_operators() {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames())
    if (launched_whole(name)) {
      auto full = name.name.substr(strlen("aten::")) + (name.overload_name.empty() ? "" : "." + name.overload_name);
      library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
}

}  // namespace dovetail::emu

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&dovetail::emu::fallback>());
}
