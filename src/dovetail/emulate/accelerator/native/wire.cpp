/* SPDX-License-Identifier: Apache-2.0 */
#include "wire.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <thread>

namespace dovetail::emu {

namespace {

using c10d::ReduceOp;
constexpr size_t CLAIM_BYTES = 512;  // the key's hash, then the text, cut off where it is longer
constexpr int CUT_TAG = 99;          // nobody sends under this tag
constexpr auto AT_ONCE = std::chrono::milliseconds(1);

uint64_t hash_of(const std::string& text) {  // FNV-1a
  uint64_t hash = 0xcbf29ce484222325ull;
  for (unsigned char c : text) hash = (hash ^ c) * 0x100000001b3ull;
  return hash;
}

at::Tensor bytes_of(const at::Tensor& tensor) { return tensor.view(at::kByte); }

at::Tensor packed(const Claim& claim) {
  auto block = at::zeros({CLAIM_BYTES}, at::kByte);
  auto* to = block.mutable_data_ptr<uint8_t>();
  uint64_t hash = hash_of(claim.key);
  std::memcpy(to, &hash, sizeof hash);
  std::memcpy(to + sizeof hash, claim.told.data(), std::min(claim.told.size(), CLAIM_BYTES - sizeof hash - 1));
  return block;
}

uint64_t hash_in(const at::Tensor& block) {
  uint64_t hash;
  std::memcpy(&hash, block.const_data_ptr<uint8_t>(), sizeof hash);
  return hash;
}

std::string told_in(const at::Tensor& block) {
  return reinterpret_cast<const char*>(block.const_data_ptr<uint8_t>() + sizeof(uint64_t));
}

// "rank 0 called X; ranks 1, 2 called Y", by rank.
std::string who_called_what(const std::vector<std::string>& told) {
  std::vector<std::pair<std::string, std::vector<int>>> groups;
  for (size_t rank = 0; rank < told.size(); rank++) {
    auto same = std::find_if(groups.begin(), groups.end(), [&](const auto& g) { return g.first == told[rank]; });
    if (same == groups.end()) same = groups.insert(groups.end(), {told[rank], {}});
    same->second.push_back(int(rank));
  }
  std::string text;
  for (const auto& [what, ranks] : groups) {
    text += text.empty() ? "rank" : "; rank";
    if (ranks.size() > 1) text += "s";
    for (size_t i = 0; i < ranks.size(); i++) text += (i ? ", " : " ") + std::to_string(ranks[i]);
    text += " called " + what;
  }
  return text;
}

// What gloo adds up: NCCL's bool is a byte, and the sum of bytes that are 0 or 1 is their maximum.
ReduceOp added_up(const Reduction& reduction, bool boolean) {
  if (boolean && reduction.op == ReduceOp::SUM) return ReduceOp::MAX;
  bool sums = reduction.op == ReduceOp::AVG || reduction.op == ReduceOp::PREMUL_SUM;
  return sums ? ReduceOp(ReduceOp::SUM) : ReduceOp(reduction.op);
}

void before(at::Tensor& values, const Reduction& reduction) {
  if (reduction.op != ReduceOp::PREMUL_SUM) return;
  if (reduction.factors.defined())
    values.mul_(reduction.factors);
  else
    values.mul_(reduction.factor);
}

void after(at::Tensor& values, const Reduction& reduction, int size) {
  if (reduction.op != ReduceOp::AVG) return;
  if (at::isIntegralType(values.scalar_type(), false))
    values.div_(size, "trunc");
  else
    values.div_(size);
}

void accumulate(at::Tensor& into, const at::Tensor& next, ReduceOp::RedOpType op) {
  switch (op) {
    case ReduceOp::PRODUCT: into.mul_(next); break;
    case ReduceOp::MIN: at::minimum_out(into, into, next); break;
    case ReduceOp::MAX: at::maximum_out(into, into, next); break;
    default: into.add_(next);
  }
}

at::Tensor numbers(const at::Tensor& tensor) {  // bool as gloo and NCCL count it
  return tensor.scalar_type() == at::kBool ? tensor.view(at::kByte) : tensor;
}

}  // namespace

Wire::Wire(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size)
    : gloo_(std::move(gloo)), rank_(rank), size_(size) {
  // Who waits for how long is the watchdog's to decide; gloo's own limit only has to be longer.
  gloo_->setTimeout(std::chrono::hours(24));
}

c10::intrusive_ptr<c10d::Work> Wire::post(const Post& call) {
  std::lock_guard<std::mutex> lock(posting_);
  if (!gloo_) throw std::runtime_error("the group was destroyed");
  return call(*gloo_);
}

void Wire::agree(const Claim& claim) {
  if (size_ == 1) return;
  auto own = packed(claim);
  auto all = at::empty({size_, int64_t(CLAIM_BYTES)}, at::kByte);
  auto flat = all.view(-1);
  run([&](auto& gloo) { return gloo._allgather_base(flat, own); });
  bool equal = true;
  std::vector<std::string> told;
  for (int rank = 0; rank < size_; rank++) {
    equal = equal && hash_in(all[rank]) == hash_in(own);
    told.push_back(told_in(all[rank]));
  }
  if (!equal) throw Mismatch("ranks called different collectives: " + who_called_what(told));
}

void Wire::all_reduce(at::Tensor& values, const Reduction& reduction) {
  if (!values.numel()) return;
  bool boolean = values.scalar_type() == at::kBool;
  auto flat = numbers(values);
  before(flat, reduction);
  c10d::AllreduceOptions options;
  options.reduceOp = added_up(reduction, boolean);
  Tensors list{flat};
  run([&](auto& gloo) { return gloo.allreduce(list, options); });
  after(flat, reduction, size_);
}

void Wire::reduce(at::Tensor& values, const Reduction& reduction, int root) {
  if (!values.numel()) return;
  bool boolean = values.scalar_type() == at::kBool;
  auto copy = numbers(values).clone();  // gloo uses the memory of all ranks; NCCL leaves all but the root's alone
  before(copy, reduction);
  c10d::ReduceOptions options;
  options.reduceOp = added_up(reduction, boolean);
  options.rootRank = root;
  Tensors list{copy};
  run([&](auto& gloo) { return gloo.reduce(list, options); });
  if (rank_ != root) return;
  after(copy, reduction, size_);
  numbers(values).copy_(copy);
}

// Every rank sends each other one its part and adds up its own part in the order of ranks: (n-1)/n of the bytes of one
// rank's input leave it. gloo's own sends those of an all-reduce.
void Wire::reduce_scatter(at::Tensor& own, const at::Tensor& all, const Reduction& reduction) {
  if (!own.numel()) return;
  bool boolean = own.scalar_type() == at::kBool;
  auto mine = numbers(all).clone();
  before(mine, reduction);
  auto parts = at::empty_like(mine).view({size_, -1});
  auto from = bytes_of(mine), to = bytes_of(parts).view(-1);
  std::vector<int64_t> equal;
  run([&](auto& gloo) { return gloo.alltoall_base(to, from, equal, equal); });
  auto sum = parts[0];
  for (int rank = 1; rank < size_; rank++) accumulate(sum, parts[rank], added_up(reduction, boolean));
  after(sum, reduction, size_);
  numbers(own).copy_(sum);
}

void Wire::reduce_scatter(at::Tensor& own, const Tensors& parts, const Reduction& reduction) {
  reduce_scatter(own, at::cat(parts), reduction);
}

void Wire::broadcast(at::Tensor& bytes, int root) {
  if (!bytes.numel()) return;
  c10d::BroadcastOptions options;
  options.rootRank = root;
  Tensors list{bytes_of(bytes)};
  run([&](auto& gloo) { return gloo.broadcast(list, options); });
}

void Wire::all_gather(at::Tensor& all, const at::Tensor& own) {
  if (!own.numel()) return;
  auto mine = bytes_of(own).clone();  // which may be a part of `all`
  auto to = bytes_of(all);
  run([&](auto& gloo) { return gloo._allgather_base(to, mine); });
}

void Wire::all_gather(Tensors& parts, const at::Tensor& own) {
  parts[size_t(rank_)].copy_(own);
  bool equal = true;
  for (const auto& part : parts) equal = equal && part.numel() == parts[0].numel();
  if (!equal) {
    for (int root = 0; root < size_; root++) broadcast(parts[size_t(root)], root);
    return;
  }
  auto all = at::empty({size_ * own.numel()}, own.options());
  all_gather(all, own);
  for (int rank = 0; rank < size_; rank++)
    parts[size_t(rank)].copy_(all.narrow(0, rank * own.numel(), own.numel()));
}

void Wire::gather(Tensors& parts, const at::Tensor& own, int root) {
  if (!own.numel()) return;
  c10d::GatherOptions options;
  options.rootRank = root;
  Tensors from{bytes_of(own)};
  std::vector<Tensors> to;
  if (rank_ == root) {
    to.emplace_back();
    for (const auto& part : parts) to[0].push_back(bytes_of(part));
  }
  run([&](auto& gloo) { return gloo.gather(to, from, options); });
}

void Wire::scatter(at::Tensor& own, const Tensors& parts, int root) {
  if (!own.numel()) return;
  c10d::ScatterOptions options;
  options.rootRank = root;
  Tensors to{bytes_of(own)};
  std::vector<Tensors> from;
  if (rank_ == root) {
    from.emplace_back();
    for (const auto& part : parts) from[0].push_back(bytes_of(part));
  }
  run([&](auto& gloo) { return gloo.scatter(to, from, options); });
}

void Wire::all_to_all(at::Tensor& to, const std::vector<int64_t>& expected, const at::Tensor& from,
                      const std::vector<int64_t>& sent) {
  auto lengths = at::empty({2, size_}, at::kLong);
  std::copy(sent.begin(), sent.end(), lengths.mutable_data_ptr<int64_t>());
  std::copy(expected.begin(), expected.end(), lengths.mutable_data_ptr<int64_t>() + size_);
  auto every = at::empty({size_, 2, size_}, at::kLong);
  auto flat = bytes_of(every.view(-1)), own = bytes_of(lengths.view(-1));
  run([&](auto& gloo) { return gloo._allgather_base(flat, own); });
  auto at = every.accessor<int64_t, 3>();
  for (int i = 0; i < size_; i++)
    for (int j = 0; j < size_; j++)
      if (at[i][0][j] != at[j][1][i])
        throw Mismatch("all_to_all: rank " + std::to_string(i) + " sends " + std::to_string(at[i][0][j]) +
                       " bytes to rank " + std::to_string(j) + ", which expects " + std::to_string(at[j][1][i]));
  auto output = bytes_of(to), input = bytes_of(from);
  auto in = sent, out = expected;
  run([&](auto& gloo) { return gloo.alltoall_base(output, input, out, in); });
}

void Wire::transfer(const Message& message, Channel channel) {
  // The sender offers, the receiver answers, then the bytes follow: a send waits for its receive, as a large one of
  // NCCL's does, and both ranks know what the other one called.
  const int offer = 4 * int(channel), answer = offer + 1, data = offer + 2;
  auto send = [&](const at::Tensor& bytes, int tag) {
    Tensors list{bytes};
    run([&](auto& gloo) { return gloo.send(list, message.peer, tag); });
  };
  auto receive = [&](const at::Tensor& bytes, int tag) {
    Tensors list{bytes};
    run([&](auto& gloo) { return gloo.recv(list, message.peer, tag); });
  };
  auto own = packed(message.claim);
  auto other = at::empty({CLAIM_BYTES}, at::kByte);
  if (message.sends) {
    send(own, offer);
    receive(other, answer);
  } else {
    receive(other, offer);
    send(own, answer);
  }
  if (hash_in(own) != hash_in(other))
    throw Mismatch("a send and its receive do not fit: rank " + std::to_string(rank_) + " called " +
                   message.claim.told + "; rank " + std::to_string(message.peer) + " called " + told_in(other));
  if (!message.bytes.numel()) return;
  if (message.sends)
    send(bytes_of(message.bytes), data);
  else
    receive(bytes_of(message.bytes), data);
}

void Wire::exchange(const std::vector<Message>& messages) {
  std::map<std::pair<int, bool>, std::vector<const Message*>> lines;
  for (const auto& message : messages) lines[{message.peer, message.sends}].push_back(&message);
  std::mutex guard;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (auto& [line, queue] : lines)
    threads.emplace_back([&, queue = &queue] {
      try {
        for (const auto* message : *queue) transfer(*message, Channel::batch);
      } catch (...) {
        {
          std::lock_guard<std::mutex> lock(guard);
          if (!first) first = std::current_exception();
        }
        cut();  // else the others would wait for the time-out
      }
    });
  for (auto& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

void Wire::cut() noexcept {
  if (size_ == 1) return;
  // A receive that times out closes all connections of its gloo group.
  try {
    Tensors nothing{at::empty({1}, at::kByte)};
    post([&](auto& gloo) { return gloo.recv(nothing, (rank_ + 1) % size_, CUT_TAG); })->wait(AT_ONCE);
  } catch (const std::exception&) {  // as intended
  }
}

void Wire::close() {
  c10::intrusive_ptr<c10d::Backend> last;
  std::lock_guard<std::mutex> lock(posting_);
  last.swap(gloo_);
}

std::string plain_error(const std::exception& error) {
  std::string text = error.what();
  text = text.substr(0, text.find('\n'));
  if (!text.empty() && text[0] == '[')
    if (auto end = text.find("] "); end != std::string::npos) text = text.substr(end + 2);
  if (auto end = text.find(". This is typically"); end != std::string::npos) text = text.substr(0, end);
  return text;
}

}  // namespace dovetail::emu
