/* SPDX-License-Identifier: Apache-2.0 */
// The race detector: which accesses to memory nothing orders.
//
// Every stream has a vector clock: how much of each stream is over before what it runs next. A launch moves the stream's
// own entry on; a wait for an event joins the clock that the event was recorded with. Every block of memory keeps the
// accesses that a later one might race with: stream, time on it, bytes. An access races with an earlier one where both
// touch the same bytes, one of them writes, and the earlier one's time is beyond what the later one's stream knows.
//
// Host threads have clocks too: what they have seen to be over, by synchronising or by asking an event. A launch hands
// that to the stream. What one thread has seen another one knows only by a handover between them (a lock, a queue, the
// start or the end of a thread). Threads that nobody introduced (started by native code, or before the detector was on)
// know what any thread has seen, and every thread knows what they have seen: that misses races, and invents none.
#include <algorithm>
#include <set>

#include "world.h"

namespace dovetail::emu {

namespace {

constexpr size_t MOST_RACES = 1000;  // lines that are kept

// Whether the rows of two ranges with the same pitch meet: `width` bytes of every `pitch`.
bool rows_meet(uintptr_t a, size_t a_width, uintptr_t b, size_t b_width, size_t pitch) {
  size_t ahead = size_t((b % pitch + pitch - a % pitch) % pitch);  // where b's row begins, seen from a's
  return ahead < a_width || ahead + b_width > pitch;
}

bool overlap(const Access& a, const Range& r) {
  if (a.hi <= r.lo || r.hi <= a.lo) return false;
  if (!a.pitch && !r.pitch) return true;
  size_t pitch = a.pitch ? a.pitch : r.pitch;
  if (a.pitch && r.pitch && a.pitch != r.pitch) return true;  // rare: believed to meet
  // A whole range inside one row's gap meets nothing; one that is longer than the gap meets a row.
  size_t a_width = a.pitch ? a.width : std::min<size_t>(a.hi - a.lo, pitch);
  size_t r_width = r.pitch ? r.width : std::min<size_t>(r.hi - r.lo, pitch);
  return rows_meet(a.lo, a_width, r.lo, r_width, pitch);
}

bool covers(const Range& r, const Access& a) {
  if (a.lo < r.lo || a.hi > r.hi) return false;
  return !r.pitch || (r.lo == a.lo && r.hi == a.hi && r.pitch == a.pitch && r.width >= a.width);
}

const char* does(bool write) { return write ? "writes" : "reads"; }

std::string memory_name(const Block& block) {
  return block.device < 0 ? "pinned memory" : "memory of emu:" + std::to_string(block.device);
}

std::string described(const Access& a) { return a.what->name + " on " + stream_name(a.slot) + place(a.site); }

std::string conflict(const Stream& stream, Kernel& what, Site site, const Range& r, const Access& a, const Block& b) {
  return what.name + " on " + stream_name(stream.slot) + place(site) + " " + does(r.write) + " " + memory_name(b) +
         " that " + described(a) + " " + does(a.write) + ", and nothing orders the two";
}

}  // namespace

bool over(const Access& access, const VectorClock& clock) {
  return size_t(access.slot) < clock.size() && clock[size_t(access.slot)] >= access.time;
}

uint64_t tick(Stream& stream) {
  if (stream.clock.size() <= size_t(stream.slot)) stream.clock.resize(size_t(stream.slot) + 1);
  return ++stream.clock[size_t(stream.slot)];
}

std::string stream_name(int slot) {
  auto& stream = stream_at(slot);
  auto device = " of emu:" + std::to_string(stream.device);
  if (world().defaults[size_t(stream.device)] == slot) return "the default stream" + device;
  return "stream " + std::to_string(slot + 1) + device;  // as torch.Stream shows it
}

std::string place(Site site) {
  return site && host_hooks().describe ? " (" + host_hooks().describe(site) + ")" : "";
}

static void note(const std::string& line) {
  auto& races = world().races;
  bool news = std::find(races.begin(), races.end(), line) == races.end();
  if (news && races.size() < MOST_RACES) races.push_back(line);
}

void throw_race(const std::string& line) {
  if (host_hooks().race) host_hooks().race(line);
  throw Race(line);
}

void report(std::string line) {
  note(line);
  if (config().detection == Detection::raise) throw_race(line);
}

void note_late_race(std::string line) {
  note(line);
  if (config().detection != Detection::raise) return;
  world().late_races.push_back(std::move(line));
  world().failed = true;
}

void check_ranges(const Stream& stream, Kernel& what, Site site, const std::vector<Range>& ranges) {
  for (const auto& r : ranges) {
    if (r.lo >= r.hi) continue;
    const Block* block = find_block(r.lo);
    if (!block) continue;
    const Access* racing = nullptr;
    for (const auto& a : block->history)
      if ((a.write || r.write) && a.slot != stream.slot && !over(a, stream.clock) && overlap(a, r)) racing = &a;
    if (racing) report(conflict(stream, what, site, r, *racing, *block));
  }
}

void record_ranges(Stream& stream, Kernel& what, Site site, uint64_t time, const std::vector<Range>& ranges) {
  for (const auto& r : ranges) {
    if (r.lo >= r.hi) continue;
    Block* block = find_block(r.lo);
    if (!block) continue;
    auto& history = block->history;
    size_t kept = 0;
    for (size_t i = 0; i < history.size(); i++) {
      const auto& a = history[i];
      bool superseded = (r.write || !a.write) && covers(r, a) && (a.slot == stream.slot || over(a, stream.clock));
      if (superseded) continue;
      if (kept != i) history[kept] = a;
      kept++;
    }
    history.resize(kept);
    history.push_back({r.lo, r.hi, r.width, r.pitch, r.write, stream.slot, time, &what, site});
    if (block->device < 0) guard_pinned(*block, history.back());
  }
}

// --- Host threads -------------------------------------------------------------------------------------------------------

std::shared_ptr<HostThread> host_thread_new() { return std::make_shared<HostThread>(); }

HostThread* acting_host() { return host_hooks().acting_for ? host_hooks().acting_for() : nullptr; }

void learn(HostThread* host, const VectorClock& clock) {
  auto& w = world();
  join(w.anybody.clock, clock);
  w.anybody.version++;
  auto& mine = host ? *host : w.unknown;
  join(mine.clock, clock);
  mine.version++;
  release_guards(clock);
}

void join_host(Stream& stream, HostThread* host) {
  auto& w = world();
  const auto& mine = host ? *host : w.anybody;
  if (stream.joined == host && stream.joined_version == mine.version && stream.joined_unknown == w.unknown.version)
    return;
  join(stream.clock, mine.clock);
  join(stream.clock, w.unknown.clock);
  stream.joined = host;
  stream.joined_version = mine.version;
  stream.joined_unknown = w.unknown.version;
}

std::shared_ptr<Handover> handover_new() { return std::make_shared<Handover>(); }

void handover_release(Handover& handover) {
  std::lock_guard<std::mutex> lock(world().mu);
  auto* host = acting_host();
  join(handover.clock, host ? host->clock : world().anybody.clock);
}

void handover_acquire(Handover& handover) {
  std::lock_guard<std::mutex> lock(world().mu);
  auto* host = acting_host();
  if (!host || handover.clock.empty()) return;
  join(host->clock, handover.clock);
  host->version++;
}

// --- What was seen ------------------------------------------------------------------------------------------------------

void note_sync(const char* why) {
  Site site = host_hooks().site ? host_hooks().site() : 0;
  std::lock_guard<std::mutex> lock(world().mu);
  if (!site)
    if (auto* host = acting_host()) site = host->last;
  world().syncs[{why, site}]++;
}

std::vector<SyncRecord> host_syncs(bool clear) {
  std::lock_guard<std::mutex> lock(world().mu);
  std::vector<SyncRecord> out;
  for (const auto& [key, count] : world().syncs)
    out.push_back({key.first, key.second && host_hooks().describe ? host_hooks().describe(key.second) : "", count});
  if (clear) world().syncs.clear();
  return out;
}

std::vector<std::string> races(bool clear) {
  std::lock_guard<std::mutex> lock(world().mu);
  auto out = world().races;
  if (clear) world().races.clear();
  return out;
}

uint64_t kernels_launched() { return world().launches; }

}  // namespace dovetail::emu
