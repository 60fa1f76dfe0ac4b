/* SPDX-License-Identifier: Apache-2.0 */
// What Python sees of the process group.
#include <torch/csrc/utils/pybind.h>

#include "group.h"

#include <pybind11/chrono.h>

namespace dovetail::emu {

void bind_group(pybind11::module_& m) {
  namespace py = pybind11;
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  using OptionsPtr = c10::intrusive_ptr<Group::Options>;
  py::class_<Group::Options, OptionsPtr, c10d::Backend::Options>(m, "GroupOptions")
      .def(py::init([](std::chrono::milliseconds timeout) { return c10::make_intrusive<Group::Options>(timeout); }),
           py::arg("timeout") = kBackendDefaultTimeout)
      .def("__deepcopy__",
           [](const Group::Options& self, const py::dict&) { return c10::make_intrusive<Group::Options>(self); });
  py::class_<Group, c10::intrusive_ptr<Group>, c10d::Backend>(m, "Group")
      .def(py::init([](const StorePtr& store, BackendPtr gloo, int rank, int size, OptionsPtr options) {
             return c10::make_intrusive<Group>(store, std::move(gloo), rank, size, std::move(options));
           }),
           py::arg("store"), py::arg("gloo"), py::arg("rank"), py::arg("size"), py::arg("options"))
      // What torch's own backends have beside the interface that all share.
      .def_property_readonly("options", [](Group& self) {
        return c10::dynamic_intrusive_pointer_cast<Group::Options>(self.getBackendOptions());
      })
      .def("_set_default_timeout", &Group::setTimeout, py::arg("timeout"))
      // torch asks this of backends that can be split, when a rank is not in a new group.
      .def("perform_nocolor_split", [](Group&, const py::object&) {}, py::arg("device"));
  m.def("set_gloo_factory", [](const py::function& factory) {
    auto* kept = new py::function(factory);
    gloo_factory() = [kept](const StorePtr& store, int rank, int size, std::chrono::milliseconds timeout) {
      py::gil_scoped_acquire lock;
      return (*kept)(store, rank, size, timeout).cast<BackendPtr>();
    };
  });
}

}  // namespace dovetail::emu
