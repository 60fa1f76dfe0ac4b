/* SPDX-License-Identifier: Apache-2.0 */
// Memory of the devices, which the host cannot touch, and pinned memory, which both can.
//
// Tensors point into a mapping without access rights; kernels use a second mapping of the same size, the shadow, at a
// fixed distance. A freed block is reused at once by the stream it belongs to; record_stream delays that until the other
// streams are done: CUDA's rules. Sizes are accounted in units of 512 bytes, as CUDA's allocator does.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "arena.h"
#include "world.h"

namespace dovetail::emu {

namespace {

constexpr size_t DEFAULT_LIMIT = size_t(16) << 30;
constexpr int PINNED = -1;

struct Leaving {
  Block* block;
  std::vector<std::shared_ptr<Mark>> marks;
};

struct Pool {
  std::vector<Block*> spare;
  Block* carving = nullptr;  // of a small size: the rest of a segment
  size_t left = 0;
};

struct Memory {
  Arena device{false}, pinned{true};
  std::map<std::pair<int, size_t>, Pool> pools;  // stream (or PINNED) and block size
  std::vector<Leaving> leaving;
  std::vector<MemoryStats> stats;                // by device; pinned memory last
  MemoryStats& of(int device) { return stats[device == PINNED ? stats.size() - 1 : size_t(device)]; }
};

Memory& memory() {
  static Memory* it = [] {
    auto* fresh = new Memory;
    fresh->stats.resize(size_t(config().devices) + 1);
    for (auto& s : fresh->stats) s.limit = DEFAULT_LIMIT;
    fresh->stats.back().limit = ROOM;
    return fresh;
  }();
  return *it;
}

size_t block_size(size_t bytes, bool pinned) {
  if (bytes > LARGEST_SMALL) return rounded(bytes, SEGMENT);
  size_t size = pinned ? PAGE : UNIT;  // the host is kept out of pinned memory page by page
  while (size < bytes) size *= 2;
  return size;
}

void forget_over(Block& block, const VectorClock& clock) {
  std::erase_if(block.history, [&](const Access& a) { return over(a, clock); });
}

void reuse(Block* block) { memory().pools[{block->slot, block->size}].spare.push_back(block); }

void account_free(Block& block) { memory().of(block.device).allocated -= rounded(block.requested, UNIT); }

// Blocks whose other streams are done go back to their pools. Returns a mark that is not reached yet, if any.
std::shared_ptr<Mark> collect_leaving() {
  std::shared_ptr<Mark> missing;
  std::erase_if(memory().leaving, [&](Leaving& l) {
    for (auto& mark : l.marks)
      if (!mark->query()) {
        missing = mark;
        return false;
      }
    // The allocator itself has seen these to be over, so nobody can race with them any more.
    for (auto& mark : l.marks) forget_over(*l.block, mark->clock);
    if (l.block->device == PINNED) release_guards_of(*l.block);
    account_free(*l.block);
    reuse(l.block);
    return true;
  });
  return missing;
}

// Memory of this stream that was freed while another stream might use it could be handed out now. Throws Race.
void check_suspects(Stream& stream, HostThread* host) {
  if (stream.suspects.empty()) return;
  auto suspects = std::move(stream.suspects);
  stream.suspects.clear();
  join_host(stream, host);
  for (auto* block : suspects)
    for (const auto& a : block->history)
      if (!block->live && a.slot != stream.slot && !over(a, stream.clock))
        report("memory of " + stream_name(stream.slot) + " was freed while " + a.what->name + " on " +
               stream_name(a.slot) + place(a.site) + " might still use it, and can be reused from here on: " +
               "record_stream is missing, or a wait before the tensor is freed");
}

Block* take_block(int device, int slot, size_t bytes) {
  auto& m = memory();
  size_t size = block_size(bytes, device == PINNED);
  auto& pool = m.pools[{slot, size}];
  auto& stats = m.of(device);
  Block* block;
  if (!pool.spare.empty()) {
    block = pool.spare.back();
    pool.spare.pop_back();
    stats.reuses++;
  } else {
    auto& arena = device == PINNED ? m.pinned : m.device;
    if (size > LARGEST_SMALL) {
      block = arena.large(size);
    } else {
      if (!pool.left) {
        pool.carving = arena.carve(__builtin_ctzll(size));
        pool.left = SEGMENT / size;
      }
      block = pool.carving++;
      pool.left--;
    }
    block->device = device;
    block->slot = slot;
  }
  if (!block->resident) {
    block->resident = true;
    stats.reserved += block->size;
    stats.reserved_peak = std::max(stats.reserved_peak, stats.reserved);
  }
  block->requested = bytes;
  block->live = true;
  block->uses.clear();
  stats.allocations++;
  stats.allocated += rounded(bytes, UNIT);
  stats.allocated_peak = std::max(stats.allocated_peak, stats.allocated);
  return block;
}

std::string mebibytes(size_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f MiB", double(bytes) / double(1 << 20));
  return text;
}

struct Poison final : Body {
  std::vector<std::pair<void*, size_t>> pieces;
  std::unique_ptr<Body> then;
  void run() override {
    for (auto [at, bytes] : pieces) std::memset(at, 0xff, bytes);  // NaN in every floating type
    if (then) then->run();
  }
};

void release_spare(bool pinned) {
  auto& m = memory();
  for (auto& [key, pool] : m.pools) {
    if ((key.first == PINNED) != pinned) continue;
    std::vector<Block*> kept;
    for (auto* block : pool.spare) {
      auto& stats = m.of(block->device);
      if (block->resident) stats.reserved -= block->size;
      block->resident = false;
      if (block->size >= PAGE) madvise(shadow(reinterpret_cast<void*>(block->at)), block->size, pinned ? MADV_REMOVE : MADV_DONTNEED);
      if (block->size > LARGEST_SMALL && block->history.empty())
        (pinned ? m.pinned : m.device).release(block);
      else
        kept.push_back(block);
    }
    pool.spare = std::move(kept);
  }
}

}  // namespace

Block* find_block(uintptr_t address) {
  auto& m = memory();
  if (m.device.owns(address)) return m.device.find(address);
  return m.pinned.owns(address) ? m.pinned.find(address) : nullptr;
}

void flush_fresh(Stream& stream) {
  if (stream.fresh.empty()) return;
  auto poison = std::make_unique<Poison>();
  for (auto* block : stream.fresh) {
    if (block->fresh && block->live)
      poison->pieces.emplace_back(shadow(reinterpret_cast<void*>(block->at)), block->requested);
    block->fresh = false;
  }
  stream.fresh.clear();
  if (poison->pieces.empty()) return;
  static Kernel& what = kernel("fresh memory");
  Job job;
  job.body = std::move(poison);
  job.what = &what;
  job.launched = now();
  put(stream, std::move(job));
}

// Fresh memory that the kernel touches is filled first, in the same job, unless the kernel overwrites all of it.
void claim_fresh(Stream& stream, const std::vector<Range>& ranges, std::unique_ptr<Body>& body) {
  std::unique_ptr<Poison> poison;
  for (const auto& r : ranges) {
    Block* block = r.lo < r.hi ? find_block(r.lo) : nullptr;
    if (!block || !block->fresh) continue;
    if (block->slot != stream.slot) {
      flush_fresh(stream_at(block->slot));
      continue;
    }
    block->fresh = false;
    std::erase(stream.fresh, block);
    if (r.overwrites && !r.pitch && r.lo == block->at && r.hi >= block->at + block->requested) continue;
    if (!poison) poison = std::make_unique<Poison>();
    poison->pieces.emplace_back(shadow(reinterpret_cast<void*>(block->at)), block->requested);
  }
  if (poison) {
    poison->then = std::move(body);
    body = std::move(poison);
  }
}

void* mem_alloc(size_t bytes, int device, int slot) {
  check_fork();
  if (!bytes) return nullptr;
  bool detecting = config().detection != Detection::off;
  Site site = detecting && host_hooks().site ? host_hooks().site() : 0;
  std::unique_lock<std::mutex> lock(world().mu);
  auto& stream = stream_at(slot);
  auto* host = acting_host();
  auto missing = collect_leaving();
  if (detecting) check_suspects(stream, host);
  auto& stats = memory().of(device);
  while (stats.allocated + rounded(bytes, UNIT) > stats.limit) {
    if (!missing) {
      stats.out_of_memory++;
      throw OutOfMemory("emu out of memory. Tried to allocate " + mebibytes(bytes) + ". Device " +
                        std::to_string(device) + " has a total capacity of " + mebibytes(stats.limit) + " of which " +
                        mebibytes(stats.limit - std::min(stats.limit, stats.allocated)) + " is free.");
    }
    lock.unlock();
    auto wait = [&] { missing->wait(); };
    host_hooks().unlocked ? host_hooks().unlocked(wait) : wait();
    lock.lock();
    missing = collect_leaving();
  }
  Block* block = take_block(device, slot, bytes);
  if (detecting) {
    static Kernel& what = kernel("allocation");
    join_host(stream, host);
    Range all{block->at, block->at + block->size, true};
    check_ranges(stream, what, site, {all});
    record_ranges(stream, what, site, tick(stream), {all});
  }
  if (config().poison) {
    block->fresh = true;
    stream.fresh.push_back(block);
  }
  return reinterpret_cast<void*>(block->at);
}

void mem_free(void* pointer) {
  if (!pointer || forked()) return;
  std::lock_guard<std::mutex> lock(world().mu);
  Block* block = find_block(uintptr_t(pointer));
  if (!block || !block->live) return;
  block->live = false;
  auto* host = acting_host();
  forget_over(*block, (host ? *host : world().anybody).clock);
  if (block->fresh) {  // nobody has touched it
    block->fresh = false;
    std::erase(stream_at(block->slot).fresh, block);
  }
  Leaving leaving{block, {}};
  for (int slot : block->uses)
    if (slot != block->slot) leaving.marks.push_back(mark_stream(stream_at(slot)));
  if (!leaving.marks.empty()) {
    memory().leaving.push_back(std::move(leaving));
    return;
  }
  account_free(*block);
  reuse(block);
  auto& stream = stream_at(block->slot);
  for (const auto& a : block->history)
    if (a.slot != block->slot && !over(a, stream.clock)) {
      stream.suspects.push_back(block);
      break;
    }
}

void mem_record(void* pointer, int slot) {
  if (!pointer) return;
  std::lock_guard<std::mutex> lock(world().mu);
  Block* block = find_block(uintptr_t(pointer));
  if (block && std::find(block->uses.begin(), block->uses.end(), slot) == block->uses.end()) block->uses.push_back(slot);
}

bool mem_owns(const void* pointer) { return memory().device.owns(uintptr_t(pointer)); }

int mem_device(const void* pointer) {
  if (!mem_owns(pointer)) return -1;
  std::lock_guard<std::mutex> lock(world().mu);
  Block* block = find_block(uintptr_t(pointer));
  return block ? block->device : -1;
}

void* shadow(const void* pointer) {
  auto& m = memory();
  auto p = uintptr_t(pointer);
  if (m.device.owns(p)) return reinterpret_cast<void*>(p + m.device.delta);
  if (m.pinned.owns(p)) return reinterpret_cast<void*>(p + m.pinned.delta);
  return const_cast<void*>(pointer);
}

void* pinned_alloc(size_t bytes) {
  check_fork();
  if (!bytes) return nullptr;
  std::lock_guard<std::mutex> lock(world().mu);
  collect_leaving();
  return reinterpret_cast<void*>(take_block(PINNED, PINNED, bytes)->at);
}

void pinned_free(void* pointer) {
  if (!pointer || forked()) return;
  std::lock_guard<std::mutex> lock(world().mu);
  Block* block = find_block(uintptr_t(pointer));
  if (!block || !block->live) return;
  block->live = false;
  // As CUDA's host allocator: copies that may still run keep it from being reused.
  auto* host = acting_host();
  forget_over(*block, (host ? *host : world().anybody).clock);
  Leaving leaving{block, {}};
  for (int slot : block->uses) leaving.marks.push_back(mark_stream(stream_at(slot)));
  memory().leaving.push_back(std::move(leaving));
}

bool pinned_owns(const void* pointer) { return memory().pinned.owns(uintptr_t(pointer)); }

MemoryStats mem_stats(int device) {
  std::lock_guard<std::mutex> lock(world().mu);
  collect_leaving();
  return memory().of(device);
}

void mem_reset_peak(int device) {
  std::lock_guard<std::mutex> lock(world().mu);
  auto& stats = memory().of(device);
  stats.allocated_peak = stats.allocated;
  stats.reserved_peak = stats.reserved;
}

void mem_limit(int device, size_t bytes) {
  std::lock_guard<std::mutex> lock(world().mu);
  memory().of(device).limit = bytes;
}

void mem_empty_cache() {
  // As cudaFree does, this waits for the devices: what is given back must not be in use.
  drain_all(1e9);
  std::lock_guard<std::mutex> lock(world().mu);
  collect_leaving();
  release_spare(false);
}

void pinned_empty_cache() {
  std::lock_guard<std::mutex> lock(world().mu);
  collect_leaving();
  release_spare(true);
}

}  // namespace dovetail::emu
