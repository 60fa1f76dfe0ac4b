/* SPDX-License-Identifier: Apache-2.0 */
// A process group with NCCL's semantics: operations run on streams, wait() orders streams and does not block the host.
// `wire.h` carries the bytes, `watchdog.h` knows whether the group still works; collectives.cpp has torch's interface.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "device.h"
#include "watchdog.h"
#include "wire.h"

namespace pybind11 {
class module_;
}

namespace dovetail::emu {

void bind_group(pybind11::module_& module);  // group_module.cpp

constexpr const char* BACKEND_NAME = "eccl";

// Makes gloo's group of a store, a rank and a size. Set once: gloo's own class cannot be made in C++ outside of torch.
using GlooFactory = std::function<c10::intrusive_ptr<c10d::Backend>(const c10::intrusive_ptr<c10d::Store>&, int rank,
                                                                    int size, std::chrono::milliseconds timeout)>;
GlooFactory& gloo_factory();

// One operation of torch's interface, checked, and not yet on a stream.
struct Call {
  c10d::OpType type;
  std::string name;  // "all_reduce"
  Claim claim;       // without the number that it gets when it is launched
  Tensors inputs, outputs;           // device tensors, for the race detector and so that they outlive the operation
  std::function<void(Wire&)> carry;  // a collective: on the thread of the stream, when all ranks have agreed
  std::optional<Message> message;    // or a send or receive
  bool async = true;                 // on the group's own stream; false: on the current one
  std::chrono::milliseconds timeout = c10d::kUnsetTimeout;
};

class GroupWork final : public c10d::Work {
 public:
  GroupWork(int rank, c10d::OpType type, const char* title, const Tensors& inputs);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  // Orders the current stream behind the work. A barrier, and a wait with a time-out, block the host too.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  void abort() override;
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  uint64_t getSequencenumber() const override { return number; }

  void end_profile();

  Event end;
  int device = 0;
  bool barrier = false;
  uint64_t number = 0;
  Tensors outputs;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::shared_ptr<Operation> operation;
  std::shared_ptr<Watchdog> watchdog;
};

// Collectives of one group take the wire in the order of their launches, on whatever streams they are: NCCL does the
// same with the kernels of one communicator. That orders nothing for the race detector.
class Turns {
 public:
  void enter(uint64_t turn);
  void leave();

 private:
  std::mutex guard_;
  std::condition_variable moved_;
  uint64_t now_ = 0;
};

class Group final : public c10d::Backend {
 public:
  struct Options final : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
        : c10d::Backend::Options(BACKEND_NAME, timeout) {}
  };

  Group(const c10::intrusive_ptr<c10d::Store>& store, c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size,
        c10::intrusive_ptr<Options> options);
  ~Group() override;

  const std::string getBackendName() const override { return BACKEND_NAME; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return collectives_; }
  void eagerConnectSingleDevice(at::Device) override { eager_ = true; }
  c10d::ErrorType getError() override;
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& options) override;
  void abort() override;
  void shutdown() override;

  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;

  c10::intrusive_ptr<c10d::Work> broadcast(Tensors&, const c10d::BroadcastOptions&) override;
  c10::intrusive_ptr<c10d::Work> allreduce(Tensors&, const c10d::AllreduceOptions&) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions&) override;
  c10::intrusive_ptr<c10d::Work> reduce(Tensors&, const c10d::ReduceOptions&) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(Tensors&, Tensors&,
                                                                 const c10d::AllgatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) override;
  c10::intrusive_ptr<c10d::Work> scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(Tensors&, std::vector<Tensors>&,
                                                const c10d::ReduceScatterOptions&) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor&, at::Tensor&,
                                                      const c10d::ReduceScatterOptions&) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(Tensors&, Tensors&,
                                                                 const c10d::ReduceScatterOptions&) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
                                               const c10d::AllToAllOptions&) override;
  c10::intrusive_ptr<c10d::Work> alltoall(Tensors&, Tensors&, const c10d::AllToAllOptions&) override;
  c10::intrusive_ptr<c10d::Work> send(Tensors&, int to, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(Tensors&, int from, int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(Tensors&, int tag) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions&) override;

 private:
  static constexpr int EVERYBODY = -1;

  Call reduced(const at::Tensor& tensor, const c10d::ReduceOp& op) const;
  Call gathered(const at::Tensor& output, const at::Tensor& input) const;
  Call scattered(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op) const;
  Call message(const at::Tensor& tensor, int peer, bool sends) const;

  // Launches the call, or keeps it where calls are being coalesced (then there is no work).
  c10::intrusive_ptr<GroupWork> submit(Call call);
  // Several calls as one operation.
  c10::intrusive_ptr<GroupWork> submit(std::vector<Call> calls, c10d::OpType type, bool async,
                                       std::chrono::milliseconds timeout);
  c10::intrusive_ptr<GroupWork> launch(const std::vector<Call>& calls, c10d::OpType type, int device, int slot,
                                       bool async, std::chrono::milliseconds timeout);
  int device_for(const Call& call) const;
  int stream_for(int device, int peer);
  void follow_current(int device, int slot);  // the stream waits for what the current one has so far
  void free_finished();

  c10::intrusive_ptr<Options> options_;
  std::shared_ptr<Wire> wire_;
  std::shared_ptr<Watchdog> watchdog_;
  std::shared_ptr<Turns> turns_ = std::make_shared<Turns>();

  std::mutex launching_;  // all below
  std::map<std::pair<int, int>, int> streams_;  // by device, and peer or EVERYBODY
  std::vector<std::shared_ptr<Operation>> stashes_;
  uint64_t collectives_ = 0, messages_ = 0, next_turn_ = 0;
  bool eager_ = false;       // bound to a device: then sends and receives share the collectives' stream, as NCCL's do
  bool coalescing_ = false;
  std::vector<Call> batch_;
};

}  // namespace dovetail::emu
