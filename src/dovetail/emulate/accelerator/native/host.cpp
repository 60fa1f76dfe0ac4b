/* SPDX-License-Identifier: Apache-2.0 */
// What the driver asks of the host: the Python line that runs, the host thread that a thread works for, and how to wait
// without Python's lock.
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/Exceptions.h>

#include <deque>
#include <mutex>
#include <unordered_map>

#include "python.h"

namespace py = pybind11;

namespace dovetail::emu {

namespace {

// --- Lines --------------------------------------------------------------------------------------------------------------

struct Lines {
  std::mutex mu;                                                       // of `all`; Python's lock guards the rest
  std::deque<std::string> all{""};                                     // by Site: "folder/file.py:12 in function"
  std::unordered_map<PyCodeObject*, bool> library;                     // whether code is torch's (or ours)
  std::unordered_map<PyCodeObject*, std::unordered_map<int, Site>> known;  // by instruction
  std::unordered_map<std::string, Site> by_text;                       // instructions of one line are one site
};
Lines& lines() {
  static auto* it = new Lines;
  return *it;
}

std::vector<std::string>& library_folders() {
  static auto* it = new std::vector<std::string>;
  return *it;
}

bool is_library(PyCodeObject* code) {
  auto& known = lines().library;
  if (auto it = known.find(code); it != known.end()) return it->second;
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  if (!file) PyErr_Clear();
  std::string path = file ? file : "";
  bool library = path.empty() || path[0] == '<';
  for (const auto& folder : library_folders()) library = library || path.rfind(folder, 0) == 0;
  Py_INCREF(code);  // for ever: its address stands for it
  return known[code] = library;
}

Site site_of(PyCodeObject* code, PyFrameObject* frame) {
  int instruction = PyFrame_GetLasti(frame);
  auto& known = lines().known[code];
  if (auto it = known.find(instruction); it != known.end()) return it->second;
  const char* file = PyUnicode_AsUTF8(code->co_filename);
  const char* name = PyUnicode_AsUTF8(code->co_qualname);
  PyErr_Clear();
  std::string path = file ? file : "?";
  if (auto slash = path.rfind('/'); slash != std::string::npos && slash > 0)
    if (auto before = path.rfind('/', slash - 1); before != std::string::npos) path = path.substr(before + 1);
  auto text = path + ":" + std::to_string(PyFrame_GetLineNumber(frame)) + " in " + (name ? name : "?");
  std::lock_guard<std::mutex> lock(lines().mu);
  auto& site = lines().by_text[text];
  if (!site) {
    lines().all.push_back(text);
    site = Site(lines().all.size() - 1);
  }
  return known[instruction] = site;
}

// The innermost line outside torch: somebody's own code. Guarded by Python's lock, but for the texts.
Site current_site() {
  if (!Py_IsInitialized() || !PyGILState_GetThisThreadState()) return 0;  // not a thread of Python
  auto state = PyGILState_Ensure();
  Site found = 0;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame && !found) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (!is_library(code)) found = site_of(code, frame);
    Py_DECREF(code);
    PyFrameObject* back = found ? nullptr : PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  PyGILState_Release(state);
  return found;
}

std::string describe(Site site) {
  std::lock_guard<std::mutex> lock(lines().mu);
  return site < lines().all.size() ? lines().all[site] : "";
}

// --- Host threads -------------------------------------------------------------------------------------------------------

// torch hands this to the threads that work for a thread: autograd's, above all.
struct Introduced final : c10::DebugInfoBase {
  std::shared_ptr<HostThread> thread = host_thread_new();
};
constexpr std::string_view KIND_NAME = "DOVETAIL_HOST_THREAD";
const c10::DebugInfoKind KIND(&KIND_NAME);

void introduce() {
  if (!c10::ThreadLocalDebugInfo::get(KIND)) c10::ThreadLocalDebugInfo::_push(KIND, std::make_shared<Introduced>());
}

HostThread* acting_for() {
  auto* info = static_cast<Introduced*>(c10::ThreadLocalDebugInfo::get(KIND));
  return info ? info->thread.get() : nullptr;
}

void unlocked(const std::function<void()>& f) {
  if (Py_IsInitialized() && PyGILState_Check()) {
    py::gil_scoped_release released;
    f();
  } else {
    f();
  }
}

// --- Errors -------------------------------------------------------------------------------------------------------------

PyObject* race_type = nullptr;

struct PythonRace final : torch::PyTorchError {
  using PyTorchError::PyTorchError;
  PyObject* python_type() override { return race_type ? race_type : PyExc_RuntimeError; }
};

[[noreturn]] void race(const std::string& line) { throw PythonRace(line); }

}  // namespace

void register_host(py::module& m) {
  host_hooks() = {acting_for, current_site, describe, unlocked, race};
  py::class_<Handover, std::shared_ptr<Handover>>(m, "Handover")
      .def(py::init([] { return handover_new(); }))
      .def("release", [](Handover& h) { handover_release(h); })
      .def("acquire", [](Handover& h) { handover_acquire(h); });
  m.def("introduce", &introduce, "Gives the calling thread a clock of its own.");
  m.def("set_library_folders", [](std::vector<std::string> folders) { library_folders() = std::move(folders); });
  m.def("set_race_type", [](py::object type) { race_type = type.release().ptr(); });
}

}  // namespace dovetail::emu
