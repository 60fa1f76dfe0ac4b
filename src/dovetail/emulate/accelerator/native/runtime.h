/* SPDX-License-Identifier: Apache-2.0 */
// The driver of the emulated accelerator: streams, events, memory, race detector. It knows nothing of torch or Python.
//
// A stream is a thread that runs kernels in the order of their launches; a slot is a stream's number in this process.
// Functions that launch or wait may throw: `Race` (at the launch that races), `OutOfMemory`, and std::runtime_error with
// what an earlier kernel threw. Unless a comment says otherwise, every function may be called from any thread.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace dovetail::emu {

// --- Settings ---------------------------------------------------------------------------------------------------------

enum class Detection { off, raise, collect };

struct Config {
  int devices = 2;                                       // fixed once the first stream exists
  std::atomic<bool> poison{true};                        // fresh device memory holds NaN
  std::atomic<Detection> detection{Detection::raise};
  std::atomic<double> seconds{0};                        // a kernel without a duration of its own takes this long
  std::atomic<double> jitter{0};                         // and up to this many seconds more
  std::atomic<uint64_t> seed{0};                         // of the jitter
};
Config& config();

// --- Names and places ---------------------------------------------------------------------------------------------------

// What is launched, by name: made once, never destroyed, so that a launch stores a pointer and builds no string.
struct Kernel {
  std::string name;
  std::atomic<double> seconds{-1};       // its own duration; negative: that of `config()`
  std::atomic<uint64_t> launches{0};
  std::atomic<uint64_t> synchronous{0};  // launches that the host had to wait for, to know the results' shapes
};
Kernel& kernel(const std::string& name);
std::vector<Kernel*> all_kernels();
// Durations by name in seconds; a name without an overload ("aten::add") stands for all of them. Replaces earlier ones.
void set_kernel_seconds(const std::map<std::string, double>& by_name);
std::map<std::string, double> kernel_seconds();

using Site = uint32_t;  // a line of Python; 0: unknown

struct HostThread;

// Set by the torch side. `site` is called without any lock of the driver held.
struct HostHooks {
  HostThread* (*acting_for)() = nullptr;                          // whose work the calling thread does; may be null
  Site (*site)() = nullptr;                                       // the line that runs in this thread
  std::string (*describe)(Site) = nullptr;                        // "train.py:12 in step"
  void (*unlocked)(const std::function<void()>&) = nullptr;       // runs a function without Python's lock
  void (*race)(const std::string&) = nullptr;                     // throws a race as an error of the host's language
};
HostHooks& host_hooks();

// What is thrown where no hook says otherwise.
class Race : public std::runtime_error {
  using std::runtime_error::runtime_error;
};
class OutOfMemory : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// --- Host threads -------------------------------------------------------------------------------------------------------

// How much of every stream is known to be over, by slot.
using VectorClock = std::vector<uint64_t>;

// A host thread with a clock of its own. Threads that nobody has introduced share one (see detector.cpp).
std::shared_ptr<HostThread> host_thread_new();

// Carries what one host thread knows to another: a lock, a queue, the start of a thread.
struct Handover {
  VectorClock clock;
};
std::shared_ptr<Handover> handover_new();
void handover_release(Handover& handover);  // the calling thread puts in what it knows
void handover_acquire(Handover& handover);  // the calling thread learns what was put in

struct Mark;  // one recording of an event

struct Event {
  std::shared_ptr<Mark> mark;  // none: never recorded, so nobody waits for it
  bool timing = true;
  int device = 0;
};

// --- Streams ------------------------------------------------------------------------------------------------------------

int stream_new(int device);         // a stream of its own, for ever: for internal streams
int stream_pooled(int device, bool high_priority);  // the next of the device's pool, as CUDA gives them to users
int stream_default(int device);
int stream_device(int slot);
bool stream_query(int slot);        // whether all that was launched is over
void stream_sync(int slot, const char* why);
void device_sync(int device, const char* why);
// Synchronises every stream, for at most `seconds`; false where that was not enough. Throws nothing, counts nothing.
bool drain_all(double seconds) noexcept;

// Bytes that a kernel touches. `pitch` > 0: only `width` bytes of every `pitch`, beginning at `lo`.
// `overwrites`: it writes all of them without reading any.
struct Range {
  uintptr_t lo, hi;
  bool write;
  bool overwrites = false;
  size_t width = 0, pitch = 0;
};

// What runs on a stream's thread. Whatever run() throws is reported at a later call, as an asynchronous error.
struct Body {
  virtual ~Body() = default;
  virtual void run() = 0;
};
template <typename F>
std::unique_ptr<Body> body_of(F function) {
  struct Holder final : Body {
    F function;
    explicit Holder(F f) : function(std::move(f)) {}
    void run() override { function(); }
  };
  return std::make_unique<Holder>(std::move(function));
}

constexpr double BY_KERNEL = -1;  // the duration that the kernel or the configuration says

// Checks `ranges` for races, then runs `body` on the stream's thread after all that was launched there before.
// The stream is busy for `seconds` (or for as long as the body takes, if that is more).
void enqueue(int slot, Kernel& what, const std::vector<Range>& ranges, std::unique_ptr<Body> body,
             double seconds = BY_KERNEL);
void enqueue(int slot, const std::string& what, const std::vector<Range>& ranges, std::function<void()> body,
             double seconds = BY_KERNEL);

// Keeps the stream busy until `seconds` after it reached `since` (never recorded: after what was launched before). Time
// in which the stream itself has waited for others since then does not count.
void occupy(int slot, double seconds, const Event& since);

// Throws what a kernel threw since the last call.
void check_error();
// Stores an error as if a kernel had thrown it.
void set_error(const std::string& what);
// Throws where this process was forked after the accelerator was loaded: streams do not survive a fork.
void check_fork();
bool forked();

// --- Events -------------------------------------------------------------------------------------------------------------

void event_record(Event& event, int slot);
void event_block(const Event& event, int slot);  // the stream waits, the host does not
bool event_query(const Event& event);
void event_sync(const Event& event, const char* why);
// As event_sync, for at most `seconds`; false where that was not enough.
bool event_sync_for(const Event& event, double seconds, const char* why);
double event_elapsed_ms(const Event& from, const Event& to);

// --- Memory -------------------------------------------------------------------------------------------------------------

// Device memory: the host faults on it. It belongs to the stream `slot`, which may reuse it as soon as it is freed.
void* mem_alloc(size_t bytes, int device, int slot);
void mem_free(void* pointer);                   // never throws
void mem_record(void* pointer, int slot);       // record_stream: no reuse before what is on `slot` now is over
bool mem_owns(const void* pointer);             // of any device
int mem_device(const void* pointer);            // -1: not ours
void* shadow(const void* pointer);              // where kernels see device or pinned memory

// Pinned memory: the host may touch it, copies from and to it are asynchronous.
void* pinned_alloc(size_t bytes);
void pinned_free(void* pointer);
bool pinned_owns(const void* pointer);
// A fault of the host in memory of a device is explained, one in pinned memory that a copy uses is noted as a race.
void install_fault_handler();

struct MemoryStats {
  size_t allocated = 0, allocated_peak = 0, reserved = 0, reserved_peak = 0, limit = 0;
  uint64_t allocations = 0, reuses = 0, out_of_memory = 0;
};
MemoryStats mem_stats(int device);  // device -1: pinned memory
void mem_reset_peak(int device);
void mem_limit(int device, size_t bytes);
void mem_empty_cache();
void pinned_empty_cache();

// --- What was seen ------------------------------------------------------------------------------------------------------

// Counts a wait of the host for the device. The functions above do it themselves.
void note_sync(const char* why);

struct SyncRecord {
  std::string what, where;
  uint64_t count;
};
std::vector<SyncRecord> host_syncs(bool clear);
std::vector<std::string> races(bool clear);
uint64_t kernels_launched();

}  // namespace dovetail::emu
