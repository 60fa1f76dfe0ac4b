/* SPDX-License-Identifier: Apache-2.0 */
// Kernels by name, and how long each takes.
#include <mutex>
#include <unordered_map>

#include "runtime.h"

namespace dovetail::emu {

namespace {

struct Kernels {
  std::mutex mu;
  std::unordered_map<std::string, Kernel*> all;
  std::map<std::string, double> seconds;

  double seconds_of(const std::string& name) const {
    auto it = seconds.find(name);
    if (it == seconds.end())
      if (auto colons = name.find("::"); colons != std::string::npos) it = seconds.find(name.substr(0, name.find('.')));
    return it == seconds.end() ? BY_KERNEL : it->second;
  }
};

Kernels& kernels() {
  static auto* it = new Kernels;
  return *it;
}

}  // namespace

Kernel& kernel(const std::string& name) {
  std::lock_guard<std::mutex> lock(kernels().mu);
  auto*& found = kernels().all[name];
  if (!found) {
    found = new Kernel;
    found->name = name;
    found->seconds = kernels().seconds_of(name);
  }
  return *found;
}

std::vector<Kernel*> all_kernels() {
  std::lock_guard<std::mutex> lock(kernels().mu);
  std::vector<Kernel*> out;
  for (auto& [name, it] : kernels().all) out.push_back(it);
  return out;
}

void set_kernel_seconds(const std::map<std::string, double>& by_name) {
  std::lock_guard<std::mutex> lock(kernels().mu);
  kernels().seconds = by_name;
  for (auto& [name, it] : kernels().all) it->seconds = kernels().seconds_of(name);
}

std::map<std::string, double> kernel_seconds() {
  std::lock_guard<std::mutex> lock(kernels().mu);
  return kernels().seconds;
}

}  // namespace dovetail::emu
