/* SPDX-License-Identifier: Apache-2.0 */
// Events: points in a stream's order that other streams and the host can wait for.
#include <chrono>
#include <cmath>

#include "world.h"

namespace dovetail::emu {

void Mark::finish(double time, double stalled_until_then) {
  std::lock_guard<std::mutex> lock(mu);
  at = time;
  stalled = stalled_until_then;
  done = true;
  cv.notify_all();
}

double Mark::wait() {
  std::unique_lock<std::mutex> lock(mu);
  cv.wait(lock, [&] { return done; });
  return at;
}

bool Mark::wait_for(double seconds) {
  std::unique_lock<std::mutex> lock(mu);
  return cv.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return done; });
}

bool Mark::query() {
  std::lock_guard<std::mutex> lock(mu);
  return done;
}

std::shared_ptr<Mark> mark_stream(Stream& stream) {
  flush_fresh(stream);
  auto mark = std::make_shared<Mark>();
  mark->stream = &stream;
  tick(stream);
  mark->clock = stream.clock;
  Job job;
  job.reaches = mark;
  job.launched = now();
  put(stream, std::move(job));
  return mark;
}

void event_record(Event& event, int slot) {
  check_fork();
  std::lock_guard<std::mutex> lock(world().mu);
  auto& stream = stream_at(slot);
  join_host(stream, acting_host());
  event.mark = mark_stream(stream);
  event.device = stream.device;
}

void event_block(const Event& event, int slot) {
  if (!event.mark) return;
  check_fork();
  std::lock_guard<std::mutex> lock(world().mu);
  auto& stream = stream_at(slot);
  join(stream.clock, event.mark->clock);
  Job job;
  job.awaits = event.mark;
  put(stream, std::move(job));
}

bool event_query(const Event& event) {
  check_error();
  if (!event.mark) return true;
  if (!event.mark->query()) return false;
  std::lock_guard<std::mutex> lock(world().mu);
  learn(acting_host(), event.mark->clock);
  return true;
}

void event_sync(const Event& event, const char* why) { event_sync_for(event, INFINITY, why); }

bool event_sync_for(const Event& event, double seconds, const char* why) {
  auto mark = event.mark;
  if (!mark) return true;
  check_fork();
  note_sync(why);
  bool over = true;
  auto wait = [&] {
    if (std::isinf(seconds))
      mark->wait();
    else
      over = mark->wait_for(seconds);
  };
  host_hooks().unlocked ? host_hooks().unlocked(wait) : wait();
  if (!over) return false;
  {
    std::lock_guard<std::mutex> lock(world().mu);
    learn(acting_host(), mark->clock);
  }
  check_error();
  return true;
}

double event_elapsed_ms(const Event& from, const Event& to) {
  if (!from.mark || !to.mark) throw std::runtime_error("Both events must be recorded before calculating elapsed time.");
  if (!from.timing || !to.timing)
    throw std::runtime_error("Both events must be created with argument 'enable_timing=True'.");
  if (!from.mark->query() || !to.mark->query())
    throw std::runtime_error("Both events must be completed before calculating elapsed time.");
  return (to.mark->at - from.mark->at) * 1e3;
}

}  // namespace dovetail::emu
