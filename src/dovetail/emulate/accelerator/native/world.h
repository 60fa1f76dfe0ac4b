/* SPDX-License-Identifier: Apache-2.0 */
// What the parts of the driver share: the state of all streams, blocks and clocks, and who guards it.
//
// Locks, in the order in which they may be taken: World::mu, then Stream::mu, then Mark::mu. None is held while a kernel
// runs, while the host waits, or while Python's lock is taken.
#pragma once
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "runtime.h"

namespace dovetail::emu {

struct Block;
struct Stream;

// One recording of an event: a point in a stream's order.
struct Mark {
  std::mutex mu;
  std::condition_variable cv;
  bool done = false;
  double at = 0;      // when the stream reached it, in seconds of the device's clock
  const Stream* stream = nullptr;  // whose order it is in
  double stalled = 0;              // seconds that this stream had waited for others by then
  VectorClock clock;  // what is over once it is reached
  void finish(double time, double stalled_until_then);
  double wait();
  bool wait_for(double seconds);
  bool query();
};

struct Job {
  std::unique_ptr<Body> body;
  Kernel* what = nullptr;        // null: an event or a wait, which takes no time
  Site site = 0;
  double seconds = 0;            // that the stream is busy at least
  double launched = 0;           // seconds of the device's clock
  std::shared_ptr<Mark> reaches, awaits;
  std::shared_ptr<Mark> since;   // from when on `seconds` count, in place of the end of the job before
};

struct Stream {
  int slot = 0, device = 0;
  std::mutex mu;  // jobs, put, done, running
  std::condition_variable more, fewer;
  std::deque<Job> jobs;
  uint64_t put = 0, done = 0;
  bool running = false;  // whether a thread serves it
  double stalled = 0;    // seconds that it has waited for events of other streams; its thread's own

  // Guarded by World::mu.
  VectorClock clock;
  const HostThread* joined = nullptr;  // whose clock, in which version, was joined last
  uint64_t joined_version = 0, joined_unknown = 0;
  std::vector<Block*> fresh;           // allocated, and not yet filled with NaN
  std::vector<Block*> suspects;        // freed while other streams might still use them
};

struct Access {
  uintptr_t lo, hi;
  size_t width, pitch;
  bool write;
  int slot;
  uint64_t time;
  Kernel* what;
  Site site;
};

// A piece of device or pinned memory. It stays where it is for ever, and is reused for requests of its size.
struct Block {
  uintptr_t at = 0;
  size_t size = 0;       // that it can hold
  size_t requested = 0;  // that it holds now
  int device = -1;       // -1: pinned
  int slot = -1;         // the stream it belongs to
  bool live = false, fresh = false, resident = false;
  std::vector<int> uses;        // streams told by record_stream
  std::vector<Access> history;  // unfinished accesses from before the allocation included
};

struct HostThread {
  VectorClock clock;
  uint64_t version = 1;
  Site last = 0;  // of its latest launch: where autograd's threads work for it, the line that called backward()
};

struct Error {
  Kernel* what;
  Site site;
  std::string message;
};

// Never destroyed: streams' threads may outlive main().
struct World {
  std::mutex mu;
  std::vector<Stream*> streams;       // by slot
  std::vector<int> defaults;          // by device
  HostThread unknown;                 // what threads that nobody introduced have seen
  HostThread anybody;                 // what any thread has seen: those threads know it, for all that we know
  std::vector<std::string> races;
  std::map<std::pair<std::string, Site>, uint64_t> syncs;
  std::vector<Error> errors;          // of kernels
  std::vector<std::string> late_races;
  std::atomic<bool> failed{false}, closing{false};
  std::atomic<uint64_t> launches{0};
};
World& world();

double now();  // seconds of the device's clock
Stream& stream_at(int slot);

inline void join(VectorClock& into, const VectorClock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); i++)
    if (into[i] < from[i]) into[i] = from[i];
}

// Below, World::mu is held by the caller.
uint64_t tick(Stream& stream);                          // the time of the stream's next access
void learn(HostThread* host, const VectorClock& clock);  // the host thread has seen that this is over
HostThread* acting_host();
void join_host(Stream& stream, HostThread* host);
bool over(const Access& access, const VectorClock& clock);
void check_ranges(const Stream& stream, Kernel& what, Site site, const std::vector<Range>& ranges);
void record_ranges(Stream& stream, Kernel& what, Site site, uint64_t time, const std::vector<Range>& ranges);
void report(std::string line);  // throws Race where races are raised
[[noreturn]] void throw_race(const std::string& line);
void note_late_race(std::string line);  // found where nothing can be thrown: the next call throws it
void guard_pinned(const Block& block, const Access& access);
void release_guards(const VectorClock& clock);
void release_guards_of(const Block& block);
std::string stream_name(int slot);
std::string place(Site site);
void put(Stream& stream, Job job);
void flush_fresh(Stream& stream);
void claim_fresh(Stream& stream, const std::vector<Range>& ranges, std::unique_ptr<Body>& body);
Block* find_block(uintptr_t address);
std::shared_ptr<Mark> mark_stream(Stream& stream);

}  // namespace dovetail::emu
