/* SPDX-License-Identifier: Apache-2.0 */
// Whether a process group still works, and who notices that it does not.
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "wire.h"

namespace dovetail::emu {

using Moment = std::chrono::steady_clock::time_point;

// One operation, from its launch until its memory may be freed.
struct Operation {
  std::string told;  // "all_reduce (SUM) of float32[4], collective 3"
  Moment deadline;
  std::chrono::milliseconds timeout;
  int slot;                        // the stream it is on
  std::atomic<bool> over{false};   // on the device
  std::mutex guard;
  Tensors stash;  // kept until somebody waits, or until it is over: nobody else may hold these tensors
};

std::string seconds_text(std::chrono::milliseconds duration);  // "2.5 s"

// A group works until the first of these, and never again.
enum class Ending { none, timed_out, failed, failed_elsewhere, aborted, destroyed };

// A group fails as a whole: the first reason stays, is told to the other ranks through the store, and is what every
// later call raises. A thread, from the first operation until close(), looks for operations that take too long.
//
//   what happens                              | ending           | the wire is cut | streams raise
//   an operation takes longer than it may     | timed_out        | at once         | yes
//   ranks call different operations           | failed           | after a second  | yes
//   a connection breaks                       | failed           | at once         | yes
//   another rank has published its reason     | failed_elsewhere | at once         | yes
//   abort()                                   | aborted          | at once         | no
//   shutdown(), after all operations are over | destroyed        | no              | no
class Watchdog {
 public:
  Watchdog(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Wire> wire, int rank, int size);
  ~Watchdog();

  void watch(const std::shared_ptr<Operation>& operation);
  void finished(Operation& operation);  // the device is done with it

  Ending ending() const { return ending_; }
  bool working() const { return ending_ == Ending::none; }
  void check() const;         // throws c10::DistBackendError where the group does not work any more
  std::string line() const;   // with this text: the rank and the reason

  // The group ends. Only the first call has an effect.
  void end(Ending ending, const std::string& reason, bool cut = true);
  // On the thread of a stream: an operation met this error. Finds out what it means, and ends the group.
  void blame(const Operation& operation, const std::exception& error);

  // Waits until all operations are over, for as long as they may take; then no thread and no connection is left.
  void close();

 private:
  void look();
  void forget_finished();  // under guard_
  std::string reason_elsewhere();
  std::string key(int rank) const { return "failed/" + std::to_string(rank); }

  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<Wire> wire_;
  const int rank_, size_;

  mutable std::mutex guard_;
  std::condition_variable news_;
  std::list<std::shared_ptr<Operation>> watched_;
  std::atomic<Ending> ending_{Ending::none};
  std::string reason_;
  Moment wakes_ = Moment::max();   // when the thread looks next
  Moment cut_at_ = Moment::max();
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace dovetail::emu
