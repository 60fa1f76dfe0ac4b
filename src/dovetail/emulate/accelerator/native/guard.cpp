/* SPDX-License-Identifier: Apache-2.0 */
// Memory that the host must not touch: a device's, ever; pinned memory, while a copy may still run.
//
// The pages of pinned memory that a copy writes are taken from the host, and those that it reads are made read-only, until
// some thread of the host has seen the copy to be over (by synchronising, or by asking an event). A thread that touches
// them earlier gets a fault, which is noted as a race and lets it go on; the race is raised at the next call. Only whole
// pages can be guarded: a copy of a part of a tensor leaves the pages at its borders open. System calls that are given
// guarded memory fail with EFAULT.
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "arena.h"

namespace dovetail::emu {

namespace {

struct PageGuard {
  uintptr_t lo, hi;  // whole pages
  Access access;
};

std::vector<PageGuard>& guards() {  // World::mu
  static auto* it = new std::vector<PageGuard>;
  return *it;
}

struct sigaction previous;

void protect(uintptr_t lo, uintptr_t hi, int rights) { mprotect(reinterpret_cast<void*>(lo), hi - lo, rights); }

// What the remaining guards say of these pages.
void renew(uintptr_t lo, uintptr_t hi) {
  protect(lo, hi, PROT_READ | PROT_WRITE);
  for (bool write : {false, true})  // the stronger ones last
    for (const auto& g : guards())
      if (g.access.write == write && g.lo < hi && lo < g.hi)
        protect(std::max(lo, g.lo), std::min(hi, g.hi), write ? PROT_NONE : PROT_READ);
}

template <typename Condition>
void drop_guards(Condition condition) {
  std::vector<PageGuard> dropped;
  std::erase_if(guards(), [&](const PageGuard& g) {
    if (!condition(g)) return false;
    dropped.push_back(g);
    return true;
  });
  for (const auto& g : dropped) renew(g.lo, g.hi);
}

const char* verb(void* context) {
#if defined(__x86_64__)
  auto* machine = &static_cast<ucontext_t*>(context)->uc_mcontext;
  return machine->gregs[REG_ERR] & 2 ? "writes" : "reads";
#else
  (void)context;
  return "touches";
#endif
}

// The faulting thread was reading or writing plain memory, so this may lock and allocate as any function may.
bool excuse(uintptr_t address, void* context) {
  Site site = host_hooks().site ? host_hooks().site() : 0;
  std::lock_guard<std::mutex> lock(world().mu);
  const PageGuard* found = nullptr;
  for (const auto& g : guards())
    if (g.lo <= address && address < g.hi) found = &g;
  if (!found) {
    Block* block = find_block(address);  // another thread may have been faster
    return block && block->live;
  }
  const auto& a = found->access;
  std::string line = std::string("the host ") + verb(context) + " pinned memory" + place(site) + " that " + a.what->name +
                     " on " + stream_name(a.slot) + place(a.site) + (a.write ? " writes" : " reads") +
                     ", without having waited for it";
  note_late_race(line);
  drop_guards([&](const PageGuard& g) { return g.lo <= address && address < g.hi; });
  return true;
}

void on_fault(int signal, siginfo_t* info, void* context) {
  auto address = uintptr_t(info->si_addr);
  if (info->si_code > 0 && !forked()) {
    if (pinned_owns(info->si_addr) && excuse(address, context)) return;
    if (mem_owns(info->si_addr)) {
      static const char line[] =
          "dovetail: the host touched memory of an emulated device: only kernels can, copy it with .cpu() first\n";
      [[maybe_unused]] auto written = write(STDERR_FILENO, line, sizeof line - 1);
    }
  }
  if (previous.sa_flags & SA_SIGINFO) {
    previous.sa_sigaction(signal, info, context);
  } else if (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN) {
    sigaction(signal, &previous, nullptr);  // the instruction faults again, and ends the process
  } else {
    previous.sa_handler(signal);
  }
}

}  // namespace

void install_fault_handler() {
  struct sigaction ours;
  std::memset(&ours, 0, sizeof ours);
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGSEGV, &ours, &previous);
}

void guard_pinned(const Block& block, const Access& access) {
  bool whole_end = access.hi >= block.at + block.requested;
  uintptr_t lo = rounded(access.lo, PAGE);
  uintptr_t hi = whole_end ? rounded(block.at + block.requested, PAGE) : access.hi / PAGE * PAGE;
  if (lo >= hi || access.pitch) return;
  guards().push_back({lo, hi, access});
  renew(lo, hi);
}

void release_guards(const VectorClock& clock) {
  if (guards().empty()) return;
  drop_guards([&](const PageGuard& g) { return over(g.access, clock); });
}

void release_guards_of(const Block& block) {
  if (guards().empty()) return;
  drop_guards([&](const PageGuard& g) { return block.at <= g.lo && g.lo < block.at + block.size; });
}

}  // namespace dovetail::emu
