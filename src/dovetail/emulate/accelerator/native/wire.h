/* SPDX-License-Identifier: Apache-2.0 */
// What carries the bytes of a process group: gloo, on the memory as kernels see it. Everything here blocks the calling
// thread, which is a stream's, takes host tensors, and throws where the bytes do not arrive.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace dovetail::emu {

using Tensors = std::vector<at::Tensor>;

// Ranks that met in one operation called different ones. Every rank that took part throws it, with the same text.
class Mismatch : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What a rank says of an operation to those it meets there.
struct Claim {
  std::string key;   // equal on all of them, or they do not fit together
  std::string told;  // for people: "all_reduce (SUM) of float32[4], collective 3"
};

// A reduction as NCCL knows it.
struct Reduction {
  c10d::ReduceOp::RedOpType op = c10d::ReduceOp::SUM;
  double factor = 1;    // PREMUL_SUM: every rank's values are multiplied by it first,
  at::Tensor factors;   // or, where this is defined, by its only element
};

// One message between two ranks.
struct Message {
  at::Tensor bytes;  // flat
  int peer;
  bool sends;
  Claim claim;
};

// Messages of the two kinds do not meet: NCCL sends them through different communicators.
enum class Channel { pair = 0, batch = 1 };

class Wire {
 public:
  Wire(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size);

  // Collectives: all ranks call the same one, in the same order. Tensors are flat and contiguous.
  // Before each of them. Returns when all ranks have called it; throws Mismatch unless their keys are equal.
  void agree(const Claim& claim);
  void all_reduce(at::Tensor& values, const Reduction& reduction);
  void reduce(at::Tensor& values, const Reduction& reduction, int root);
  void reduce_scatter(at::Tensor& own, const at::Tensor& all, const Reduction& reduction);
  void reduce_scatter(at::Tensor& own, const Tensors& parts, const Reduction& reduction);
  void broadcast(at::Tensor& bytes, int root);
  void all_gather(at::Tensor& all, const at::Tensor& own);
  void all_gather(Tensors& parts, const at::Tensor& own);  // parts may differ in size
  void gather(Tensors& parts, const at::Tensor& own, int root);
  void scatter(at::Tensor& own, const Tensors& parts, int root);
  // Lengths in bytes, by rank. Throws Mismatch where a rank sends another number of bytes than the other one expects.
  void all_to_all(at::Tensor& to, const std::vector<int64_t>& expected, const at::Tensor& from,
                  const std::vector<int64_t>& sent);

  // Point to point: a send ends when it has met its receive. Messages of one direction between two ranks keep their
  // order; within `exchange` all others are independent.
  void transfer(const Message& message, Channel channel);
  void exchange(const std::vector<Message>& messages);

  // Ends whatever blocks in the functions above, here and on all other ranks, with an error, now and later.
  void cut() noexcept;
  // Closes all connections, when nothing is on the wire any more: no thread and no socket is left.
  void close();

 private:
  using Post = std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)>;
  c10::intrusive_ptr<c10d::Work> post(const Post& call);
  void run(const Post& call) { post(call)->wait(); }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::mutex posting_;  // gloo counts what is posted without a lock of its own
  int rank_, size_;
};

// The first line of an error of gloo's, without the place in its source.
std::string plain_error(const std::exception& error);

}  // namespace dovetail::emu
