/* SPDX-License-Identifier: Apache-2.0 */
// Addresses of device or pinned memory, and whose they are.
//
// Blocks are powers of two up to 1 MiB, then multiples of 2 MiB, so that the block of any address is found in constant
// time. Kernels see the same memory in a second mapping, the shadow, at a fixed distance.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include "world.h"

namespace dovetail::emu {

constexpr size_t UNIT = 512, PAGE = 4096;
constexpr int SEGMENT_SHIFT = 21;
constexpr size_t SEGMENT = size_t(1) << SEGMENT_SHIFT;
constexpr size_t LARGEST_SMALL = SEGMENT / 2;
constexpr size_t ROOM = size_t(64) << 30;  // bytes of addresses; memory is taken when it is touched

inline size_t rounded(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// Addresses in segments of 2 MiB: each holds blocks of one size, or is a part of one large block.
struct Arena {
  struct Segment {
    Block* blocks = nullptr;
    int shift = SEGMENT_SHIFT;
  };
  uintptr_t base = 0, delta = 0;
  size_t next = 0;                                // index of the first segment that was never used
  std::vector<Segment> segments;
  std::multimap<size_t, size_t> returned;         // runs of segments given back: length, first

  explicit Arena(bool shared) : segments(ROOM >> SEGMENT_SHIFT) {
    int file = shared ? memfd_create("emu pinned", MFD_CLOEXEC) : -1;
    if (shared && (file < 0 || ftruncate(file, off_t(ROOM)) != 0)) throw std::runtime_error("emu: no memfd");
    int flags = (shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS) | MAP_NORESERVE;
    int rights = shared ? PROT_READ | PROT_WRITE : PROT_NONE;
    void* seen = mmap(nullptr, ROOM + SEGMENT, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (seen == MAP_FAILED) throw std::runtime_error("emu: no address space for the emulated accelerator's memory");
    base = rounded(uintptr_t(seen), SEGMENT);
    if (shared && mmap(reinterpret_cast<void*>(base), ROOM, rights, flags | MAP_FIXED, file, 0) == MAP_FAILED)
      throw std::runtime_error("emu: pinned memory cannot be mapped");
    void* shadow = mmap(nullptr, ROOM, PROT_READ | PROT_WRITE, flags, file, 0);
    if (shadow == MAP_FAILED) throw std::runtime_error("emu: the accelerator's memory cannot be mapped");
    delta = uintptr_t(shadow) - base;
    madvise(shadow, ROOM, MADV_DONTDUMP);
    if (file >= 0) close(file);
  }

  bool owns(uintptr_t p) const { return p >= base && p < base + ROOM; }

  Block* find(uintptr_t p) const {
    const auto& segment = segments[(p - base) >> SEGMENT_SHIFT];
    return segment.blocks ? &segment.blocks[((p - base) & (SEGMENT - 1)) >> segment.shift] : nullptr;
  }

  size_t take(size_t count) {  // index of the first of `count` segments in a row
    auto it = returned.lower_bound(count);
    if (it != returned.end()) {
      auto [length, first] = *it;
      returned.erase(it);
      if (length > count) returned.emplace(length - count, first + count);
      return first;
    }
    if (next + count > segments.size()) throw OutOfMemory("emu: all addresses of the emulated accelerator are used");
    next += count;
    return next - count;
  }

  // A segment of new blocks of 2^shift bytes; `blocks` is theirs for ever.
  Block* carve(int shift) {
    size_t index = take(1), count = SEGMENT >> shift;
    auto* blocks = new Block[count];
    for (size_t i = 0; i < count; i++) {
      blocks[i].at = base + (index << SEGMENT_SHIFT) + (i << shift);
      blocks[i].size = size_t(1) << shift;
    }
    segments[index] = {blocks, shift};
    return blocks;
  }

  Block* large(size_t size) {
    size_t count = size >> SEGMENT_SHIFT, first = take(count);
    auto* block = new Block;
    block->at = base + (first << SEGMENT_SHIFT);
    block->size = size;
    for (size_t i = 0; i < count; i++) segments[first + i] = {block, SEGMENT_SHIFT};
    return block;
  }

  void release(Block* block) {  // a large one, for good
    size_t count = block->size >> SEGMENT_SHIFT, first = (block->at - base) >> SEGMENT_SHIFT;
    for (size_t i = 0; i < count; i++) segments[first + i] = {};
    returned.emplace(count, first);
    delete block;
  }
};

}  // namespace dovetail::emu
