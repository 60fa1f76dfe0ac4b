/* SPDX-License-Identifier: Apache-2.0 */
// Python's side: which line runs, which host thread works for which, errors as Python's.
#pragma once
#include <torch/csrc/utils/pybind.h>

#include "device.h"

namespace dovetail::emu {

void register_device();     // device.cpp
void register_operators();  // fallback.cpp
void register_host(pybind11::module& module);  // host.cpp

}  // namespace dovetail::emu
