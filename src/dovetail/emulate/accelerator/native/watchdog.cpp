/* SPDX-License-Identifier: Apache-2.0 */
#include "watchdog.h"

#include <c10/util/Exception.h>
#include <pthread.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "runtime.h"

namespace dovetail::emu {

namespace {

using namespace std::chrono_literals;
constexpr auto GRACE = 1s;          // in which the other ranks find a mismatch themselves, or publish their reason
constexpr auto STORE_TIMEOUT = 5s;  // of one request to the store

}  // namespace

std::string seconds_text(std::chrono::milliseconds duration) {
  auto text = std::to_string(double(duration.count()) / 1e3);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

Watchdog::Watchdog(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Wire> wire, int rank, int size)
    : store_(std::move(store)), wire_(std::move(wire)), rank_(rank), size_(size) {
  // A connection of its own, made now: a request of somebody else's may block the shared one for minutes, and when
  // something has failed there may be nobody left to connect to. (A store in a file counts its copies, and would be
  // removed with the first of them.)
  auto below = store_;
  if (auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store_.get())) below = prefixed->getUnderlyingNonPrefixStore();
  if (dynamic_cast<c10d::TCPStore*>(below.get())) {
    store_ = store_->clone();
    store_->setTimeout(STORE_TIMEOUT);
  }
}

Watchdog::~Watchdog() {
  end(Ending::aborted, "the group was dropped");
  close();
}

void Watchdog::watch(const std::shared_ptr<Operation>& operation) {
  std::lock_guard<std::mutex> lock(guard_);
  forget_finished();
  watched_.push_back(operation);
  if (!thread_.joinable()) thread_ = std::thread([this] { look(); });
  if (operation->deadline < wakes_) news_.notify_all();
}

void Watchdog::finished(Operation& operation) {
  operation.over = true;
  std::lock_guard<std::mutex> lock(guard_);
  if (closing_) news_.notify_all();
}

void Watchdog::forget_finished() {
  watched_.remove_if([](const auto& operation) { return operation->over.load(); });
}

void Watchdog::look() {
  pthread_setname_np(pthread_self(), "eccl watchdog");
  std::unique_lock<std::mutex> lock(guard_);
  for (;;) {
    forget_finished();
    if (closing_ && watched_.empty()) return;
    auto now = std::chrono::steady_clock::now();
    std::shared_ptr<Operation> late;
    wakes_ = cut_at_;
    for (const auto& operation : watched_) {
      if (working() && operation->deadline <= now && !late) late = operation;
      if (working()) wakes_ = std::min(wakes_, operation->deadline);
    }
    bool cuts = cut_at_ <= now;
    if (cuts) cut_at_ = Moment::max();
    if (late || cuts) {
      lock.unlock();
      if (late) end(Ending::timed_out, late->told + " did not finish within " + seconds_text(late->timeout));
      if (cuts) wire_->cut();
      late.reset();
      lock.lock();
    } else if (wakes_ == Moment::max()) {
      news_.wait(lock);
    } else {
      news_.wait_until(lock, wakes_);
    }
  }
}

std::string Watchdog::line() const {
  std::lock_guard<std::mutex> lock(guard_);
  return "eccl: rank " + std::to_string(rank_) + ": " + reason_;
}

void Watchdog::check() const {
  if (working()) return;
  auto line = this->line();
  // A stream may have met the same failure; the host learns of it once.
  try {
    check_error();
  } catch (const std::exception& error) {
    if (std::string(error.what()).find(line) == std::string::npos) throw;
  }
  C10_THROW_ERROR(DistBackendError, line);
}

void Watchdog::end(Ending ending, const std::string& reason, bool cut) {
  {
    std::lock_guard<std::mutex> lock(guard_);
    if (!working()) return;
    reason_ = reason;
    ending_ = ending;
    if (!cut) cut_at_ = std::chrono::steady_clock::now() + GRACE;
    news_.notify_all();
  }
  if (ending == Ending::destroyed) return;
  if (ending != Ending::failed_elsewhere) {
    try {
      store_->set(key(rank_), std::vector<uint8_t>(reason.begin(), reason.end()));
    } catch (const std::exception&) {  // the rank that keeps the store is gone: nobody can be told
    }
  }
  if (cut) wire_->cut();
}

std::string Watchdog::reason_elsewhere() {
  try {
    for (auto until = std::chrono::steady_clock::now() + GRACE; working();) {
      for (int rank = 0; rank < size_; rank++)
        if (rank != rank_ && store_->check({key(rank)})) {
          auto value = store_->get(key(rank));
          return "rank " + std::to_string(rank) + " gave up: " + std::string(value.begin(), value.end());
        }
      if (std::chrono::steady_clock::now() > until) break;
      std::this_thread::sleep_for(20ms);
    }
  } catch (const std::exception&) {  // the store is gone with its rank
  }
  return "";
}

void Watchdog::blame(const Operation& operation, const std::exception& error) {
  if (!working()) return;
  if (dynamic_cast<const Mismatch*>(&error)) return end(Ending::failed, error.what(), false);
  auto elsewhere = reason_elsewhere();
  if (!elsewhere.empty()) return end(Ending::failed_elsewhere, operation.told + " ended, because " + elsewhere);
  auto said = plain_error(error);
  auto hint = said.find("peer") == std::string::npos ? "" : "; a rank has ended, or left the group";
  end(Ending::failed, operation.told + " failed: " + said + hint);
}

void Watchdog::close() {
  if (!working()) wire_->cut();  // what is still on the wire ends now
  {
    std::lock_guard<std::mutex> lock(guard_);
    closing_ = true;
    news_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  end(Ending::destroyed, "the group was destroyed");
  wire_->close();
}

}  // namespace dovetail::emu
