/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* The search: breadth first on topology x automaton, backward from (target, accepting), whole sets of switches at a
 * time; then down the levels along one of the shortest walks, chosen by the flow's hash.
 *
 * The functions are global and not inlined: the verifier proves each one alone, so its work adds up instead of
 * multiplying. They speak through the processor's scratch. */
#pragma once
#include "maps.h"

/* The switches of level d that are entered out of the automaton's state q. Small sets: straight code over all states.
 * Large ones: a loop over the states that occur, because straight code would want more stack than there is. */
#if WORDS <= 2
#define ENTERED(out, d, q)                                                                        \
	do {                                                                                      \
		__u32 d_ = BOUND(d, LEVELS), q_ = BOUND(q, STATES);                               \
		__u32 into_ = p->into[q_];                                                        \
		EACH_WORD(w) out.w[w] = 0;                                                        \
		_Pragma("unroll") for (int r = 0; r < STATES; r++) if (into_ & (1 << r))          \
			EACH_WORD(w) out.w[w] |= s->level[d_][r].w[w] & p->by[q_][r].w[w];        \
	} while (0)
#else
#define ENTERED(out, d, q)                                                                                 \
	do {                                                                                               \
		__u32 d_ = BOUND(d, LEVELS), q_ = BOUND(q, STATES);                                        \
		__u64 into_ = p->into[q_];                                                                 \
		EACH_WORD(w) out.w[w] = 0;                                                                 \
		while (into_ && can_loop) {                                                                \
			__u32 r = BOUND(lowest_bit(into_), STATES);                                        \
			into_ &= into_ - 1;                                                                \
			EACH_WORD(w) out.w[w] |= s->level[BOUND(d_, LEVELS)][r].w[w] & p->by[BOUND(q_, STATES)][r].w[w]; \
		}                                                                                          \
	} while (0)
#endif

/* Runs through the links of a map of failures, inside a function that has the processor's scratch as `s`. */
#define EACH_LINK(link, map)                                                                                     \
	for (s->word = 0; s->word < LINK_WORDS && can_loop; s->word++)                                           \
		for (__u64 set_ = (map)[BOUND(s->word, LINK_WORDS)], link;                                       \
		     set_ && can_loop && (link = BOUND(s->word * 64 + lowest_bit(set_), LINKS), set_ &= set_ - 1, 1);)

/* Leaves the failed links of the packet out of the graph, or puts them back. */
__noinline int apply_failures(__u32 side, __u32 leave_out)
{
	struct scratch *s = my_scratch();
	__u32 key = side & 1;
	struct graph *g = bpf_map_lookup_elem(&graphs, &key);
	if (!s || !g)
		return -1;
	if (!(s->h.flags & FAILURES))
		return 0;
	EACH_LINK(link, s->h.failed) {
		__u32 a = BOUND(g->ends[link].a, NODES), b = BOUND(g->ends[link].b, NODES);
		if (leave_out) {
			put(&s->cut[a], b);
			put(&s->cut[b], a);
		} else {
			EACH_WORD(w) { s->cut[a].w[w] = 0; s->cut[b].w[w] = 0; }
		}
	}
	return 0;
}

static __always_inline void begin(struct scratch *s, __u32 states, __u32 accepting, __u32 target)
{
	s->state = 0;
	while (can_loop) {
		__u32 q = s->state;
		if (q >= states)
			break;
		q = BOUND(q, STATES);
		EACH_WORD(w) s->level[0][q].w[w] = 0;
		if ((accepting >> q) & 1)
			put(&s->level[0][q], target);
		EACH_WORD(w) s->seen[q].w[w] = s->level[0][q].w[w];
		s->state = q + 1;
	}
	s->depth = 0;
	s->state = 0;
	s->any = 0;
}

/* Hops of the shortest walk of the best rank from (self, state) to the target, or -1. */
__noinline int distance(__u32 self, __u32 from)
{
	struct scratch *s = my_scratch();
	if (!s)
		return -1;
	__u32 side = s->h.generation & 1;
	struct graph *g = bpf_map_lookup_elem(&graphs, &side);
	struct policy *p = policy_of(&s->h);
	if (!g || !p)
		return -1;
	__u32 states = p->states, target = s->h.target, limit = s->h.hops_left;
#if WORDS <= 2
	struct bits reach = {};
#else
#define reach s->reach /* more than registers can hold */
	EACH_WORD(w) reach.w[w] = 0;
#endif
	from &= STATES - 1;
	s->rank = 0;
	begin(s, states, p->accept[0], target);
	if (has(&s->level[0][from], self))
		return 0;
	ENTERED(s->front, 0, 0);
	s->word = 0;
	while (can_loop) {
#if WORDS == 1
		__u64 set = s->front.w[0];
#else
		__u32 word = s->word;
		__u64 set = s->front.w[BOUND(word, WORDS)];
#endif
		while (set && can_loop) {
#if WORDS == 1
			__u32 node = BOUND(lowest_bit(set), NODES);
#else
			__u32 node = BOUND(word * 64 + lowest_bit(set), NODES);
#endif
			set &= set - 1;
			EACH_WORD(w) reach.w[w] |= g->next[node].w[w] & ~s->cut[node].w[w];
		}
#if WORDS > 1
		if (word + 1 < WORDS) {
			s->word = word + 1;
			continue;
		}
		s->word = 0;
#endif
		/* one state of this level is done: what is new in it? */
		__u32 q = s->state, d = s->depth;
		__u64 any = s->any;
		EACH_WORD(w) {
			__u64 fresh = reach.w[w] & ~s->seen[BOUND(q, STATES)].w[w];
			s->seen[BOUND(q, STATES)].w[w] |= fresh;
			s->level[BOUND(d + 1, LEVELS)][BOUND(q, STATES)].w[w] = fresh;
			any |= fresh;
			reach.w[w] = 0;
		}
		s->any = any;
		s->state = q + 1;
		if (q + 1 >= states) {
			s->state = 0;
			s->any = 0;
			s->depth = d + 1;
			if (d + 1 <= limit && has(&s->level[BOUND(d + 1, LEVELS)][from], self))
				return d + 1;
			if (!any || d + 1 >= limit || d >= LEVELS - 2) {
				__u32 rank = s->rank + 1;
				if (rank >= p->ranks)
					return -1;
				s->rank = rank;
				begin(s, states, p->accept[BOUND(rank, RANKS)], target);
				if (has(&s->level[0][from], self))
					return 0;
			}
		}
		ENTERED(s->front, s->depth, s->state);
	}
	return -1;
#undef reach
}

/* The next switch from (node, state), one level nearer; equal ones by hash. */
__noinline int step_down(__u32 node, __u32 state, __u32 nearer, __u32 hash)
{
	struct scratch *s = my_scratch();
	if (!s)
		return -1;
	__u32 side = s->h.generation & 1, total = 0, base = 0;
	struct graph *g = bpf_map_lookup_elem(&graphs, &side);
	struct policy *p = policy_of(&s->h);
	if (!g || !p)
		return -1;
#define choice s->front /* off the stack, which is 512 bytes deep for all callers together */
	ENTERED(choice, nearer, state);
	EACH_WORD(w) {
		choice.w[w] &= g->next[BOUND(node, NODES)].w[w] & ~s->cut[BOUND(node, NODES)].w[w];
		total += count_bits(choice.w[w]);
	}
	if (!total)
		return -1;
	__u32 pick = ((__u64)hash * total) >> 32;
	__u64 set = choice.w[0];
#if WORDS > 1
	int found = 0;
	EACH_WORD(w) {
		__u32 here = count_bits(choice.w[w]);
		if (!found) {
			if (pick < here) {
				found = 1;
				set = choice.w[w];
				base = w * 64;
			} else {
				pick -= here;
			}
		}
	}
#endif
	while (pick && can_loop) {
		set &= set - 1;
		pick--;
	}
	return (base + lowest_bit(set)) & (NODES - 1);
#undef choice
}

/* Writes the walk from (self, state) into the packet's path. Returns its length in hops, or -1. */
__noinline int search(__u32 self)
{
	struct scratch *s = my_scratch();
	if (!s)
		return -1;
	struct policy *p = policy_of(&s->h);
	if (!p)
		return -1;
	__u32 side = s->h.generation & 1, from = s->h.state;
	s->h.hop = 0;
	s->h.length = 0;
	s->h.computed++;
	apply_failures(side, 1);
	int hops = distance(self, from);
	if (hops > 0) {
		__u32 node = self, state = from, hash = (s->h.flow + 1) * 0x85EBCA6Bu, left = hops;
		s->word = 0;
		while (left && can_loop) {
			__u32 i = s->word;
			if (i >= CARRIED)
				break;
			left--;
			hash = hash * 0x9E3779B1u + 0x7F4A7C15u;
			int next = step_down(node, state, left, hash);
			if (next < 0) {
				hops = -1;
				break;
			}
			node = BOUND(next, NODES);
			s->h.path[BOUND(i, CARRIED)] = node;
			state = p->step[BOUND(state, STATES)][node];
			s->word = i + 1;
		}
		s->h.length = s->word;
	}
	apply_failures(side, 0);
	return hops;
}
