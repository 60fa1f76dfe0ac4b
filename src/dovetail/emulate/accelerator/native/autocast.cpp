/* SPDX-License-Identifier: Apache-2.0 */
// Autocast: torch has the lists of operators and the cache of casts; a device only has to apply them. One boxed function
// per policy does, in place of a template per operator.
#include <ATen/autocast_mode.h>

#include "tensors.h"

namespace dovetail::emu {

namespace {

constexpr auto DEVICE_TYPE = c10::kPrivateUse1;

at::ScalarType lower() { return at::autocast::get_autocast_dtype(DEVICE_TYPE); }

void cast_all(IValue* args, size_t count, at::ScalarType type) {
  for (size_t i = 0; i < count; i++)
    args[i] = map_tensors(args[i], [&](const at::Tensor& t) { return at::autocast::cached_cast(type, t, DEVICE_TYPE); });
}


enum class Policy { lower_precision, fp32, fp32_dtype, promote };

template <Policy policy>
void cast(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard once(c10::DispatchKey::AutocastPrivateUse1);
  const auto& formals = op.schema().arguments();
  const size_t n = formals.size();
  IValue* args = &*(stack->end() - std::ptrdiff_t(n));
  if (policy == Policy::lower_precision) {
    cast_all(args, n, lower());
  } else if (policy == Policy::fp32) {
    cast_all(args, n, at::kFloat);
  } else if (policy == Policy::promote) {
    bool wide = false;
    for (size_t i = 0; i < n; i++)
      each_tensor(args[i], [&](const at::Tensor& t) {
        wide = wide || (at::autocast::is_eligible(t, DEVICE_TYPE) && t.scalar_type() == at::kFloat);
      });
    cast_all(args, n, wide ? at::kFloat : lower());
  } else if (args[0].isTensor() && at::autocast::is_eligible(args[0].toTensor(), DEVICE_TYPE)) {
    // Computed in the type that the caller names, or in float32.
    for (size_t i = 0; i < n; i++)
      if (formals[i].name() == "dtype" && args[i].isNone()) args[i] = int64_t(at::kFloat);
  }
  op.callBoxed(stack);
}

void refuse(const c10::OperatorHandle&, Stack*) {
  TORCH_CHECK(false,
              "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. Use "
              "binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss.");
}

}  // namespace

}  // namespace dovetail::emu

#define NAMED1(op) #op
#define NAMED2(op, overload) #op "." #overload
#define PICK(_1, _2, NAME, ...) NAME
#define NAMED(...) PICK(__VA_ARGS__, NAMED2, NAMED1)(__VA_ARGS__)
#define WITH(policy, ...) \
  m.impl(NAMED(__VA_ARGS__), torch::CppFunction::makeFromBoxedFunction<&emu::cast<emu::Policy::policy>>());
#define LOWER(...) WITH(lower_precision, __VA_ARGS__)
#define WIDE(...) WITH(fp32, __VA_ARGS__)
#define WIDE_DTYPE(...) WITH(fp32_dtype, __VA_ARGS__)
#define PROMOTED(...) WITH(promote, __VA_ARGS__)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  namespace emu = dovetail::emu;
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(WIDE)
  AT_FORALL_FP32_SET_OPT_DTYPE(WIDE_DTYPE)
  AT_FORALL_PROMOTE(PROMOTED)
  WIDE(norm, Scalar)
  WIDE(norm, ScalarOpt_dim)
  m.impl("binary_cross_entropy", torch::CppFunction::makeFromBoxedFunction<&emu::refuse>());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
