/* SPDX-License-Identifier: Apache-2.0 */
// Streams and events: threads that run what was launched, in order, on a clock of the device.
#include <pthread.h>
#include <sys/prctl.h>

#include <chrono>
#include <cmath>
#include <thread>

#include "world.h"

namespace dovetail::emu {

namespace {

constexpr int POOL = 256;           // streams that users get, per device and priority: then the first again, as on CUDA
constexpr double IDLE_SECONDS = 5;  // after which a stream's thread ends, until there is work again

std::atomic<bool> in_child{false};

double uniform(uint64_t seed, uint64_t slot, uint64_t index) {  // splitmix64: the same run has the same jitter
  uint64_t z = seed + 0x9E3779B97F4A7C15ull * (index + 1) + 0xD1B54A32D192ED03ull * (slot + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return double((z ^ (z >> 31)) >> 11) * 0x1.0p-53;
}

void sleep_until(double time) {
  double left = time - now();
  if (left > 0) std::this_thread::sleep_for(std::chrono::duration<double>(left));
}

// Runs one job. `time` is the stream's own clock: it falls behind the real one by no more than a sleep that was too long,
// so that durations do not add up their errors.
void run(Stream& stream, Job& job, double& time) {
  double begin = std::max(time, job.launched);
  if (job.awaits) {
    time = std::max(time, job.awaits->wait());
    stream.stalled += std::max(0.0, time - begin);
    return;
  }
  if (job.reaches) {
    job.reaches->finish(begin, stream.stalled);
    return;
  }
  if (job.since) {
    begin = job.since->wait();
    if (job.since->stream == &stream) begin += stream.stalled - job.since->stalled;
  }
  double end = begin + job.seconds;
  if (!world().closing) {
    try {
      job.body->run();
    } catch (const std::exception& e) {
      std::lock_guard<std::mutex> lock(world().mu);
      world().errors.push_back({job.what, job.site, e.what()});
      world().failed = true;
    }
  }
  job.body.reset();
  double done = now();
  if (job.seconds > 0 && done < end) {
    sleep_until(end);
    time = end;
  } else {
    time = done;
  }
}

void serve(Stream* stream) {
  prctl(PR_SET_TIMERSLACK, 1000UL);  // nanoseconds
  pthread_setname_np(pthread_self(), ("emu stream " + std::to_string(stream->slot)).substr(0, 15).c_str());
  double time = 0;
  std::deque<Job> batch;
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(stream->mu);
      auto patience = std::chrono::duration<double>(IDLE_SECONDS);
      if (!stream->more.wait_for(lock, patience, [&] { return !stream->jobs.empty(); })) {
        stream->running = false;
        return;
      }
      batch.swap(stream->jobs);
    }
    while (!batch.empty()) {
      run(*stream, batch.front(), time);
      batch.pop_front();
      std::lock_guard<std::mutex> lock(stream->mu);
      stream->done++;
      stream->fewer.notify_all();
    }
  }
}

int stream_new_locked(int device) {
  auto* stream = new Stream;
  stream->slot = int(world().streams.size());
  stream->device = device;
  world().streams.push_back(stream);
  return stream->slot;
}

void check_device(int device) {
  if (device < 0 || device >= config().devices)
    throw std::runtime_error("emu:" + std::to_string(device) + " does not exist: there are " +
                             std::to_string(config().devices) + " emulated devices");
}

// Waits without Python's lock, then tells the calling host thread what is over. False: not within `seconds`.
bool drain(Stream& stream, double seconds = INFINITY) {
  VectorClock clock;
  uint64_t target;
  {
    std::lock_guard<std::mutex> lock(world().mu);
    flush_fresh(stream);
    clock = stream.clock;
    std::lock_guard<std::mutex> inner(stream.mu);
    target = stream.put;
  }
  bool over = true;
  auto wait = [&] {
    std::unique_lock<std::mutex> lock(stream.mu);
    auto reached = [&] { return stream.done >= target; };
    if (std::isinf(seconds))
      stream.fewer.wait(lock, reached);
    else
      over = stream.fewer.wait_for(lock, std::chrono::duration<double>(seconds), reached);
  };
  host_hooks().unlocked ? host_hooks().unlocked(wait) : wait();
  if (over) {
    std::lock_guard<std::mutex> lock(world().mu);
    learn(acting_host(), clock);
  }
  return over;
}

struct FromFunction final : Body {
  std::function<void()> function;
  explicit FromFunction(std::function<void()> f) : function(std::move(f)) {}
  void run() override { function(); }
};

}  // namespace

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Config& config() {
  static auto* it = new Config;
  return *it;
}

HostHooks& host_hooks() {
  static auto* it = new HostHooks;
  return *it;
}

World& world() {
  static World* it = [] {
    auto* fresh = new World;
    fresh->defaults.assign(size_t(config().devices), -1);
    pthread_atfork(nullptr, nullptr, [] { in_child = true; });
    return fresh;
  }();
  return *it;
}

bool forked() { return in_child; }

void check_fork() {
  if (in_child)
    throw std::runtime_error(
        "Cannot re-initialize the emulated accelerator in forked subprocess. To use it with multiprocessing, you must "
        "use the 'spawn' start method");
}

Stream& stream_at(int slot) {
  auto& streams = world().streams;
  if (slot < 0 || size_t(slot) >= streams.size()) throw std::runtime_error("emu: no stream " + std::to_string(slot));
  return *streams[size_t(slot)];
}

int stream_new(int device) {
  check_fork();
  check_device(device);
  std::lock_guard<std::mutex> lock(world().mu);
  return stream_new_locked(device);
}

int stream_pooled(int device, bool high_priority) {
  check_fork();
  check_device(device);
  std::lock_guard<std::mutex> lock(world().mu);
  struct Pool {
    std::vector<int> slots;
    size_t next = 0;
  };
  static auto* pools = new std::map<std::pair<int, bool>, Pool>;
  auto& pool = (*pools)[{device, high_priority}];
  if (pool.slots.size() < POOL) {
    pool.slots.push_back(stream_new_locked(device));
    return pool.slots.back();
  }
  return pool.slots[pool.next++ % POOL];
}

int stream_default(int device) {
  check_device(device);
  std::lock_guard<std::mutex> lock(world().mu);
  auto& slot = world().defaults[size_t(device)];
  if (slot < 0) slot = stream_new_locked(device);
  return slot;
}

int stream_device(int slot) {
  std::lock_guard<std::mutex> lock(world().mu);
  return stream_at(slot).device;
}

void put(Stream& stream, Job job) {
  bool idle, start = false;
  {
    std::lock_guard<std::mutex> lock(stream.mu);
    idle = stream.jobs.empty();
    stream.jobs.push_back(std::move(job));
    stream.put++;
    if (!stream.running) start = stream.running = true;
  }
  if (start)
    std::thread(serve, &stream).detach();
  else if (idle)
    stream.more.notify_one();
}

bool stream_query(int slot) {
  check_error();
  std::lock_guard<std::mutex> lock(world().mu);
  auto& stream = stream_at(slot);
  flush_fresh(stream);
  {
    std::lock_guard<std::mutex> inner(stream.mu);
    if (stream.done != stream.put) return false;
  }
  learn(acting_host(), stream.clock);
  return true;
}

void stream_sync(int slot, const char* why) {
  check_fork();
  note_sync(why);
  Stream* stream;
  {
    std::lock_guard<std::mutex> lock(world().mu);
    stream = &stream_at(slot);
  }
  drain(*stream);
  check_error();
}

void device_sync(int device, const char* why) {
  check_fork();
  check_device(device);
  note_sync(why);
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> lock(world().mu);
    for (auto* stream : world().streams)
      if (stream->device == device) all.push_back(stream);
  }
  for (auto* stream : all) drain(*stream);
  check_error();
}

bool drain_all(double seconds) noexcept {
  if (in_child) return true;
  try {
    double end = now() + seconds;
    std::vector<Stream*> all;
    {
      std::lock_guard<std::mutex> lock(world().mu);
      all = world().streams;
    }
    for (auto* stream : all)
      if (!drain(*stream, std::max(0.0, end - now()))) return false;
    return true;
  } catch (...) {
    return false;
  }
}

void enqueue(int slot, Kernel& what, const std::vector<Range>& ranges, std::unique_ptr<Body> body, double seconds) {
  check_fork();
  check_error();
  auto mode = config().detection.load(std::memory_order_relaxed);
  Site site = mode != Detection::off && host_hooks().site ? host_hooks().site() : 0;
  if (seconds < 0) seconds = what.seconds;
  if (seconds < 0) seconds = config().seconds;
  double jitter = config().jitter;
  what.launches.fetch_add(1, std::memory_order_relaxed);
  world().launches.fetch_add(1, std::memory_order_relaxed);

  std::lock_guard<std::mutex> lock(world().mu);
  auto& stream = stream_at(slot);
  HostThread* host = acting_host();
  if (host) {
    if (site)
      host->last = site;
    else
      site = host->last;
  }
  join_host(stream, host);
  if (mode != Detection::off) check_ranges(stream, what, site, ranges);
  claim_fresh(stream, ranges, body);
  uint64_t time = tick(stream);
  if (mode != Detection::off) record_ranges(stream, what, site, time, ranges);
  Job job;
  job.body = std::move(body);
  job.what = &what;
  job.site = site;
  job.seconds = seconds + (jitter > 0 ? jitter * uniform(config().seed, uint64_t(slot), time) : 0);
  job.launched = now();
  put(stream, std::move(job));
}

void enqueue(int slot, const std::string& what, const std::vector<Range>& ranges, std::function<void()> body,
             double seconds) {
  enqueue(slot, kernel(what), ranges, std::make_unique<FromFunction>(std::move(body)), seconds);
}

void occupy(int slot, double seconds, const Event& since) {
  static Kernel& what = kernel("occupy");
  check_fork();
  check_error();
  what.launches.fetch_add(1, std::memory_order_relaxed);
  std::lock_guard<std::mutex> lock(world().mu);
  auto& stream = stream_at(slot);
  join_host(stream, acting_host());
  tick(stream);
  Job job;
  job.body = body_of([] {});
  job.what = &what;
  job.seconds = seconds;
  job.launched = now();
  job.since = since.mark;
  put(stream, std::move(job));
}

void set_error(const std::string& what) {
  std::lock_guard<std::mutex> lock(world().mu);
  world().errors.push_back({nullptr, 0, what});
  world().failed = true;
}

void check_error() {
  if (!world().failed.load(std::memory_order_relaxed)) return;
  Error first;
  std::string race;
  {
    std::lock_guard<std::mutex> lock(world().mu);
    world().failed = false;
    if (!world().late_races.empty()) race = world().late_races.front();
    world().late_races.clear();
    if (race.empty()) {
      if (world().errors.empty()) return;
      first = world().errors.front();
    }
    world().errors.clear();
  }
  if (!race.empty()) throw_race(race);
  std::string what = first.what ? first.what->name + place(first.site) + ", launched earlier, failed: " : "";
  throw std::runtime_error("emulated accelerator: " + what + first.message);
}

}  // namespace dovetail::emu
