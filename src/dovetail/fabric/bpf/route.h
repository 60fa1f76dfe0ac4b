/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* Routing one packet that has no usable path yet: at its first switch, and wherever it meets a failed link.
 *
 * A packet carries the failed links it met. A switch that sees such a packet delivered, or told of it by a notice,
 * believes these failures for a while and lets its own packets start with them: so detours end, and classes that
 * cannot be served stop exploring. Belief may be out of date. Therefore it is used first, and if it leaves no path, the
 * packet forgets it once and goes on with what it meets itself: belief costs detours, never a delivery. */
#pragma once
#include "link.h"
#include "search.h"

enum { TO_HERE = -1, NO_PATH = -2 }; /* otherwise: the port's slot */

/* Marks every link of this switch that is down. */
__noinline int mark_own_failures(__u32 self)
{
	struct scratch *s = my_scratch();
	struct config *config = &settings;
	if (!s)
		return -1;
	__u32 side = s->h.generation & 1;
	struct graph *g = bpf_map_lookup_elem(&graphs, &side);
	if (!g)
		return -1;
	s->word = 0;
	while (can_loop) {
		__u32 word = s->word;
		if (word >= WORDS)
			break;
		__u64 set = g->next[BOUND(self, NODES)].w[BOUND(word, WORDS)];
		while (set && can_loop) {
			__u32 next = BOUND(word * 64 + lowest_bit(set), NODES);
			set &= set - 1;
			__u32 slot = slot_towards(self, next);
			struct port *port = bpf_map_lookup_elem(&ports, &slot);
			if (!port || link_up(config, port))
				continue;
			__u32 link = BOUND(port->link, LINKS);
			__u64 known = s->h.failed[BOUND(link >> 6, LINK_WORDS)] >> (link & 63) & 1;
			s->h.failed[BOUND(link >> 6, LINK_WORDS)] |= 1ULL << (link & 63);
			s->h.flags |= FAILURES;
			if (s->h.flags & CERTAIN)
				s->h.life = 255;
			else if (!known || s->h.met == NOTHING_MET)
				s->h.met = link; /* only this one: the hearsay beside it grows no younger */
		}
		s->word = word + 1;
	}
	return 0;
}

static __always_inline void forget(struct fabric_header *h)
{
	_Pragma("unroll") for (int w = 0; w < LINK_WORDS; w++) h->failed[w] = 0;
	h->flags &= ~FAILURES;
	h->life = 0;
	h->met = NOTHING_MET;
}

/* The packet's next port from (self, h.state), its path written; TO_HERE, or NO_PATH. */
__noinline int route(__u32 self)
{
	struct scratch *s = my_scratch();
	struct config *config = &settings;
	if (!s)
		return NO_PATH;
	/* At most: believed failures; own links; all forgotten; own links changed meanwhile. */
	for (int turn = 0; turn < 4; turn++) {
		int hops = search(self);
		if (hops == 0)
			return TO_HERE;
		if (hops > 0) {
			__u32 slot = slot_towards(self, s->h.path[0]);
			struct port *port = bpf_map_lookup_elem(&ports, &slot);
			if (port && link_up(config, port))
				return slot;
			mark_own_failures(self);
			continue;
		}
		if (s->h.flags & CERTAIN)
			return NO_PATH;
		count(self, RETRIED);
		forget(&s->h);
		s->h.flags |= CERTAIN;
		mark_own_failures(self);
	}
	return NO_PATH;
}

/* Ends the beliefs whose time is over, and notes when the next one's will be. */
static __always_inline void fade(struct scratch *s, struct node *node, __u64 now)
{
	s->any = 0;
	s->soonest = 0;
	EACH_LINK(link, node->failed) {
		__u64 until = node->until[link];
		if (until <= now) {
			node->failed[BOUND(link >> 6, LINK_WORDS)] &= ~(1ULL << (link & 63));
			s->any = 1;
		} else if (!s->soonest || until < s->soonest) {
			s->soonest = until;
		}
	}
	node->fades_at = s->soonest;
	if (s->any)
		node->version++;
}

/* What this packet met is believed here for a while. Hearsay is passed on with the life it has left, so that two
 * switches cannot keep a rumour alive, whatever else they tell each other. */
__noinline int learn(__u32 self)
{
	struct scratch *s = my_scratch();
	__u32 me = self;
	struct config *config = &settings;
	struct node *node = bpf_map_lookup_elem(&nodes, &me);
	if (!s || !node)
		return -1;
	__u64 now = bpf_ktime_get_ns(), part = config->life / 255;
	s->any = 0;
	EACH_LINK(link, s->h.failed) {
		__u64 bit = 1ULL << (link & 63), until = now + part * (link == s->h.met ? 255 : s->h.life);
		if (until <= now)
			continue;
		if (!(node->failed[BOUND(link >> 6, LINK_WORDS)] & bit)) {
			node->failed[BOUND(link >> 6, LINK_WORDS)] |= bit;
			node->until[BOUND(link, LINKS)] = until;
			s->any = 1;
		} else if (node->until[BOUND(link, LINKS)] < until) {
			node->until[BOUND(link, LINKS)] = until;
		}
	}
	if (s->any)
		node->version++;
	fade(s, node, now);
	return 0;
}

/* A packet that starts here starts with what is believed here. */
__noinline int believe(__u32 self)
{
	struct scratch *s = my_scratch();
	__u32 me = self;
	struct config *config = &settings;
	struct node *node = bpf_map_lookup_elem(&nodes, &me);
	if (!s || !node)
		return -1;
	forget(&s->h);
	s->h.flags |= CERTAIN;
	if (!node->fades_at)
		return 0;
	__u64 now = bpf_ktime_get_ns();
	if (now >= node->fades_at)
		fade(s, node, now);
	__u64 until = node->fades_at;
	if (until <= now)
		return 0;
	_Pragma("clang loop unroll(disable)") for (int w = 0; w < LINK_WORDS; w++) s->h.failed[w] = node->failed[w];
	s->h.flags = (s->h.flags & ~CERTAIN) | FAILURES;
	__u64 part = config->life / 255;
	s->h.life = part ? (until - now) / (part + 1) : 0; /* of the one that is over first: no other lives longer by it */
	return 0;
}
