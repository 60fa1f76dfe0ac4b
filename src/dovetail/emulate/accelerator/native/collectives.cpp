/* SPDX-License-Identifier: Apache-2.0 */
// torch's interface of a process group: checks what is given, with NCCL's words, and says what is to be carried.
#include <numeric>

#include "checks.h"
#include "group.h"

namespace dovetail::emu {

using c10d::OpType;
using c10d::ReduceOp;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

template <typename Options>
static Call with(Call call, const Options& options) {
  call.async = options.asyncOp;
  call.timeout = options.timeout;
  return call;
}

// A work where somebody is to wait for it; none where the operation is on the current stream, or waits for its batch.
static WorkPtr handed(c10::intrusive_ptr<GroupWork> work, bool async) { return async ? WorkPtr(std::move(work)) : nullptr; }

Call Group::reduced(const at::Tensor& tensor, const ReduceOp& op) const {
  Call call{OpType::ALLREDUCE, "all_reduce", {}, {}, {tensor}};
  auto reduction = checked(op, tensor, call.inputs);
  std::string name = std::string("all_reduce (") + name_of(op.op_) + ")";
  call.claim = {name + " " + key_of(tensor), name + " of " + shown(tensor)};
  call.carry = [values = flat_real(tensor), reduction](Wire& wire) mutable { wire.all_reduce(values, reduction); };
  return call;
}

WorkPtr Group::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return handed(submit(with(reduced(only(tensors), options.reduceOp), options)), options.asyncOp);
}

WorkPtr Group::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<Call> calls;
  for (const auto& tensor : tensors) {
    check(tensor);
    calls.push_back(reduced(tensor, options.reduceOp));
  }
  return handed(submit(std::move(calls), OpType::COALESCED, options.asyncOp, options.timeout), options.asyncOp);
}

WorkPtr Group::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  const auto& tensor = only(tensors);
  check_rank(options.rootRank, getSize(), "root");
  int root = int(options.rootRank);
  auto from = "broadcast from rank " + std::to_string(root);
  Call call{OpType::BROADCAST, "broadcast", {from + " " + key_of(tensor), from + " of " + shown(tensor)}};
  (getRank() == root ? call.inputs : call.outputs).push_back(tensor);
  call.carry = [bytes = flat(tensor), root](Wire& wire) mutable { wire.broadcast(bytes, root); };
  auto work = submit(with(std::move(call), options));
  if (work) work->outputs = tensors;  // on the root too
  return handed(work, options.asyncOp);
}

WorkPtr Group::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const auto& tensor = only(tensors);
  check_rank(options.rootRank, getSize(), "root");
  int root = int(options.rootRank);
  Call call{OpType::REDUCE, "reduce"};
  auto reduction = checked(options.reduceOp, tensor, call.inputs);
  std::string to = std::string("reduce (") + name_of(options.reduceOp.op_) + ") to rank " + std::to_string(root);
  call.claim = {to + " " + key_of(tensor), to + " of " + shown(tensor)};
  (getRank() == root ? call.outputs : call.inputs).push_back(tensor);
  call.carry = [values = flat_real(tensor), reduction, root](Wire& wire) mutable {
    wire.reduce(values, reduction, root);
  };
  return handed(submit(with(std::move(call), options)), options.asyncOp);
}

Call Group::gathered(const at::Tensor& output, const at::Tensor& input) const {
  check(output);
  check(input);
  TORCH_CHECK_WITH(TypeError, input.scalar_type() == output.scalar_type(),
                   "output tensor must have the same type as input tensor");
  TORCH_CHECK_WITH(ValueError, input.numel() * getSize() == output.numel(),
                   "output tensor size must be equal to world_size times input tensor size");
  Call call{OpType::_ALLGATHER_BASE, "all_gather_into_tensor", {}, {input}, {output}};
  call.claim = {"all_gather " + key_of(input), "all_gather_into_tensor of " + shown(input)};
  call.carry = [all = flat(output), own = flat(input)](Wire& wire) mutable { wire.all_gather(all, own); };
  return call;
}

WorkPtr Group::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return handed(submit(with(gathered(output, input), options)), options.asyncOp);
}

WorkPtr Group::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                               const c10d::AllgatherOptions& options) {
  TORCH_CHECK_WITH(ValueError, outputs.size() == inputs.size(), "expected as many outputs as inputs");
  std::vector<Call> calls;
  for (size_t i = 0; i < inputs.size(); i++) calls.push_back(gathered(outputs[i], inputs[i]));
  return handed(submit(std::move(calls), OpType::COALESCED, options.asyncOp, options.timeout), options.asyncOp);
}

WorkPtr Group::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  const auto& input = only(inputs);
  TORCH_CHECK_WITH(ValueError, outputs.size() == 1 && int(outputs[0].size()) == getSize(),
                   "Tensor list input to scatter/gather must match number of collective participants");
  check_same_type(outputs[0], input);
  TORCH_CHECK_WITH(ValueError, outputs[0][size_t(getRank())].numel() == input.numel(),
                   "all_gather: this rank's output has another size than its input");
  Call call{OpType::ALLGATHER, "all_gather", {}, inputs, outputs[0]};
  bool equal = true;
  std::string sizes;
  for (const auto& part : outputs[0]) {
    equal = equal && part.numel() == input.numel();
    sizes += " " + std::to_string(part.numel());
  }
  call.claim = {"all_gather " + (equal ? key_of(input) : dtype(input) + sizes), "all_gather of " + shown(input)};
  call.carry = [parts = flat(outputs[0]), own = flat(input)](Wire& wire) mutable { wire.all_gather(parts, own); };
  return handed(submit(with(std::move(call), options)), options.asyncOp);
}

WorkPtr Group::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  const auto& input = only(inputs);
  check_rank(options.rootRank, getSize(), "root");
  int root = int(options.rootRank);
  Tensors parts;
  if (getRank() == root) {
    TORCH_CHECK_WITH(ValueError, outputs.size() == 1 && int(outputs[0].size()) == getSize(),
                     "Incorrect output list size ", outputs.empty() ? 0 : outputs[0].size(),
                     ". Output list size should be ", getSize(), ", same as size of the process group.");
    parts = outputs[0];
    check_same_type(parts, input);
    for (const auto& part : parts)
      TORCH_CHECK_WITH(ValueError, part.sizes() == input.sizes(), "Tensors must have identical size");
  } else {
    TORCH_CHECK_WITH(ValueError, outputs.empty(), "requires empty output on non-root");
  }
  auto to = "gather to rank " + std::to_string(root);
  Call call{OpType::GATHER, "gather", {to + " " + key_of(input), to + " of " + shown(input)}, inputs, parts};
  call.carry = [parts = flat(parts), own = flat(input), root](Wire& wire) mutable { wire.gather(parts, own, root); };
  return handed(submit(with(std::move(call), options)), options.asyncOp);
}

WorkPtr Group::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  const auto& output = only(outputs);
  check_rank(options.rootRank, getSize(), "root");
  int root = int(options.rootRank);
  Tensors parts;
  if (getRank() == root) {
    TORCH_CHECK_WITH(ValueError, inputs.size() == 1 && int(inputs[0].size()) == getSize(), "Incorrect input list size ",
                     inputs.empty() ? 0 : inputs[0].size(), ". Input list size should be ", getSize(),
                     ", same as size of the process group.");
    parts = inputs[0];
    check_same_type(parts, output);
    for (const auto& part : parts)
      TORCH_CHECK_WITH(ValueError, part.sizes() == output.sizes(), "Tensors must have identical size");
  } else {
    TORCH_CHECK_WITH(ValueError, inputs.empty(), "requires empty input on non-root");
  }
  auto from = "scatter from rank " + std::to_string(root);
  Call call{OpType::SCATTER, "scatter", {from + " " + key_of(output), from + " of " + shown(output)}, parts, outputs};
  call.carry = [own = flat(output), parts = flat(parts), root](Wire& wire) mutable { wire.scatter(own, parts, root); };
  return handed(submit(with(std::move(call), options)), options.asyncOp);
}

Call Group::scattered(const at::Tensor& output, const at::Tensor& input, const ReduceOp& op) const {
  check(output);
  check(input);
  TORCH_CHECK_WITH(TypeError, input.scalar_type() == output.scalar_type(),
                   "input tensor must be the same type as the output tensor.");
  TORCH_CHECK_WITH(ValueError, input.numel() == output.numel() * getSize(),
                   "input tensor must be the same size as output size times world size");
  Call call{OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", {}, {input}, {output}};
  auto reduction = checked(op, input, call.inputs);
  std::string name = std::string(" (") + name_of(op.op_) + ")";
  call.claim = {"reduce_scatter" + name + " " + key_of(output), "reduce_scatter_tensor" + name + " of " + shown(input)};
  call.carry = [own = flat_real(output), all = flat_real(input), reduction](Wire& wire) mutable {
    wire.reduce_scatter(own, all, reduction);
  };
  return call;
}

WorkPtr Group::_reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  return handed(submit(with(scattered(output, input, options.reduceOp), options)), options.asyncOp);
}

WorkPtr Group::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK_WITH(ValueError, outputs.size() == inputs.size(), "expected as many outputs as inputs");
  std::vector<Call> calls;
  for (size_t i = 0; i < inputs.size(); i++) calls.push_back(scattered(outputs[i], inputs[i], options.reduceOp));
  return handed(submit(std::move(calls), OpType::COALESCED, options.asyncOp, options.timeout), options.asyncOp);
}

WorkPtr Group::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                              const c10d::ReduceScatterOptions& options) {
  const auto& output = only(outputs);
  TORCH_CHECK_WITH(ValueError, inputs.size() == 1 && int(inputs[0].size()) == getSize(),
                   "Tensor list input to scatter/gather must match number of collective participants");
  check_same_type(inputs[0], output);
  for (const auto& part : inputs[0])
    TORCH_CHECK_WITH(ValueError, part.numel() == output.numel(), "reduce_scatter: inputs must have the output's size");
  Call call{OpType::REDUCE_SCATTER, "reduce_scatter", {}, inputs[0], outputs};
  auto reduction = checked(options.reduceOp, output, call.inputs);
  std::string name = std::string("reduce_scatter (") + name_of(options.reduceOp.op_) + ")";
  call.claim = {name + " " + key_of(output), name + " to " + shown(output)};
  Tensors parts;
  for (const auto& part : inputs[0]) parts.push_back(flat_real(part));
  call.carry = [own = flat_real(output), parts, reduction](Wire& wire) mutable {
    wire.reduce_scatter(own, parts, reduction);
  };
  return handed(submit(with(std::move(call), options)), options.asyncOp);
}

WorkPtr Group::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                             std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  check(output);
  check_same_type({input}, output);
  auto sent = byte_lengths(input, input_splits, getSize(), "input");
  auto expected = byte_lengths(output, output_splits, getSize(), "output");
  Call call{OpType::ALLTOALL_BASE, "all_to_all_single", {}, {input}, {output}};
  call.claim = {"all_to_all " + dtype(input), "all_to_all_single of " + shown(input)};
  call.carry = [to = flat(output), from = flat(input), sent, expected](Wire& wire) mutable {
    wire.all_to_all(to, expected, from, sent);
  };
  return handed(submit(with(std::move(call), options)), options.asyncOp);
}

WorkPtr Group::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  TORCH_CHECK_WITH(ValueError, int(inputs.size()) == getSize() && int(outputs.size()) == getSize(),
                   "Number of input and output tensors not equal to group size");
  check_same_type(inputs, inputs[0]);
  check_same_type(outputs, inputs[0]);
  Call call{OpType::ALLTOALL, "all_to_all", {}, inputs, outputs};
  call.claim = {"all_to_all " + dtype(inputs[0]), "all_to_all of " + shown(inputs)};
  call.carry = [to = flat(outputs), from = flat(inputs), expected = byte_lengths(outputs),
                sent = byte_lengths(inputs)](Wire& wire) mutable {
    auto all = at::cat(from);
    auto arrived = at::empty({std::accumulate(expected.begin(), expected.end(), int64_t(0))}, at::kByte);
    wire.all_to_all(arrived, expected, all, sent);
    int64_t offset = 0;
    for (size_t rank = 0; rank < to.size(); offset += expected[rank++])
      to[rank].view(at::kByte).copy_(arrived.narrow(0, offset, expected[rank]));
  };
  return handed(submit(with(std::move(call), options)), options.asyncOp);
}

Call Group::message(const at::Tensor& tensor, int peer, bool sends) const {
  // Messages may have any strides, as long as they are one piece of memory.
  TORCH_CHECK_WITH(ValueError, ours(tensor) && !tensor.is_sparse(), "Tensors must be on an emu device and dense");
  TORCH_CHECK_WITH(ValueError, tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
  TORCH_CHECK_WITH(TypeError, known(tensor.scalar_type()),
                   "Input tensor data type is not supported for NCCL process group: ", tensor.scalar_type());
  check_rank(peer, getSize(), sends ? "destination" : "source");
  TORCH_CHECK_WITH(ValueError, peer != getRank(), "a rank cannot send to itself");
  Call call{sends ? OpType::SEND : OpType::RECV, sends ? "send" : "recv"};
  call.claim = {key_of(tensor), (sends ? "send to rank " : "recv from rank ") + std::to_string(peer) + " of " + shown(tensor)};
  (sends ? call.inputs : call.outputs).push_back(tensor);
  call.message = Message{flat(tensor), peer, sends, call.claim};
  return call;
}

WorkPtr Group::send(Tensors& tensors, int to, int) {
  TORCH_CHECK_WITH(ValueError, tensors.size() == 1, "Expecting one tensor only but got ", tensors.size());
  return submit(message(tensors[0], to, true));
}

WorkPtr Group::recv(Tensors& tensors, int from, int) {
  TORCH_CHECK_WITH(ValueError, tensors.size() == 1, "Expecting one tensor only but got ", tensors.size());
  return submit(message(tensors[0], from, false));
}

WorkPtr Group::recvAnysource(Tensors&, int) {
  C10_THROW_ERROR(NotImplementedError, "eccl does not support recvAnysource, as NCCL does not");
}

WorkPtr Group::barrier(const c10d::BarrierOptions& options) {
  // All ranks agree, and that is it. As NCCL's, on a device, and the host waits for it.
  int device = current_device();
  if (!options.device_ids.empty())
    device = int(options.device_ids[0]);
  else if (options.device && options.device->has_index())
    device = options.device->index();
  else if (auto bound = getBoundDeviceId())
    device = bound->index();
  c10::DeviceGuard guard(device_of(device));
  Call call{OpType::BARRIER, "barrier", {"barrier", "barrier"}};
  call.carry = [](Wire&) {};
  auto work = submit(with(std::move(call), options));
  if (!work) return nullptr;
  work->barrier = true;
  if (options.asyncOp) return work;
  work->wait();
  return nullptr;
}

}  // namespace dovetail::emu
