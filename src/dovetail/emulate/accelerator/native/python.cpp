/* SPDX-License-Identifier: Apache-2.0 */
// The extension as Python sees it.
#include "python.h"

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>
#include <torch/csrc/Generator.h>

#if __has_include("group.h")
#include "group.h"
#endif

namespace py = pybind11;
using namespace dovetail::emu;

namespace {

Detection detection_of(const std::string& name) {
  if (name == "off") return Detection::off;
  if (name == "raise") return Detection::raise;
  if (name == "collect") return Detection::collect;
  throw std::invalid_argument("detector: expected 'raise', 'collect' or 'off', got '" + name + "'");
}

const char* name_of(Detection mode) {
  return mode == Detection::off ? "off" : mode == Detection::raise ? "raise" : "collect";
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("start", [](int devices, size_t memory_bytes) {
    config().devices = devices;
    register_device();
    register_operators();
    for (int d = 0; d < devices; d++) mem_limit(d, memory_bytes);
    install_fault_handler();
  });
  register_host(m);
  m.def("device_count", [] { return config().devices; });
  m.def("current_device", &current_device);
  m.def("set_device", &set_current_device);
  m.def("default_generator", [](int device) { return default_generator(device); });
  m.def("forked", &forked);
  m.def("close", [](double seconds) {
    py::gil_scoped_release released;
    return drain_all(seconds);
  });

  m.def("set_detector", [](const std::string& mode) { config().detection = detection_of(mode); });
  m.def("detector", [] { return name_of(config().detection); });
  m.def("set_poison", [](bool on) { config().poison = on; });
  m.def("races", &races, py::arg("clear"));
  m.def("host_syncs", [](bool clear) {
    std::vector<std::tuple<std::string, std::string, uint64_t>> out;
    for (auto& r : host_syncs(clear)) out.emplace_back(r.what, r.where, r.count);
    return out;
  });
  m.def("kernels_launched", &kernels_launched);

  m.def("kernel_counts", [] {
    std::vector<std::tuple<std::string, uint64_t, uint64_t>> out;
    for (auto* k : all_kernels()) out.emplace_back(k->name, k->launches.load(), k->synchronous.load());
    return out;
  });

  m.def("set_durations", [](double seconds, double jitter, uint64_t seed, const std::map<std::string, double>& table) {
    config().seconds = seconds;
    config().jitter = jitter;
    config().seed = seed;
    set_kernel_seconds(table);
  });
  m.def("durations", [] {
    return std::make_tuple(config().seconds.load(), config().jitter.load(), config().seed.load(), kernel_seconds());
  });
  m.def("occupy", [](double seconds, int device, intptr_t event) {
    auto* since = reinterpret_cast<Event*>(event);
    occupy(current_stream(device), seconds, since ? *since : Event());
  });

  m.def("memory", [](int device) {
    auto s = mem_stats(device);
    py::dict out;
    out["allocated"] = s.allocated;
    out["allocated_peak"] = s.allocated_peak;
    out["reserved"] = s.reserved;
    out["reserved_peak"] = s.reserved_peak;
    out["limit"] = s.limit;
    out["allocations"] = s.allocations;
    out["reuses"] = s.reuses;
    out["out_of_memory"] = s.out_of_memory;
    return out;
  });
  m.def("reset_peak_memory", &mem_reset_peak);
  m.def("set_memory_limit", &mem_limit);
  m.def("empty_cache", [] {
    py::gil_scoped_release released;
    mem_empty_cache();
  });
  m.def("empty_pinned_cache", &pinned_empty_cache);
#if __has_include("group.h")
  bind_group(m);
#endif
}
