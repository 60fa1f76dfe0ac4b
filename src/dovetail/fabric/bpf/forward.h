/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* What a switch does with a frame: take it from a host, pass it on, hand it to a host. */
#pragma once
#include "classify.h"
#include "frame.h"
#include "route.h"

#define DROP(why)                  \
	do {                       \
		count(self, why);  \
		return FRAME_DROP; \
	} while (0)

#define MOST_READ (sizeof(struct ipv6hdr) + 4) /* of a host's packet: addresses and ports */

static __always_inline int leave(frame *ctx, __u32 self, __u32 slot, struct port *port, __u32 inner_at)
{
	if (port && port->picoseconds && !wire_takes(port, wire_bytes(ctx, inner_at)))
		DROP(DROP_QUEUE);
	return send_out(ctx, slot);
}

/* A probe is signed by every switch it visits. */
static __always_inline int sign(frame *ctx, __u32 self)
{
	void *data = START(ctx), *end = END(ctx);
	struct record *record = data + sizeof(struct ethhdr) + sizeof(struct fabric_header);
	if ((void *)(record + 1) > end)
		return 0;
	__u32 n = record->count;
	if (n < SIGNED) {
		__u16 *line = &record->walk[n];
		if ((void *)(line + 1) > end)
			return 0;
		*line = self;
		record->count = n + 1;
	}
	return 1;
}

static __always_inline int deliver(frame *ctx, __u32 self)
{
	void *data = START(ctx), *end = END(ctx);
	struct fabric_header *h = data + sizeof(struct ethhdr);
	if ((void *)(h + 1) > end)
		DROP(DROP_MALFORMED);
	if (h->flags & FAILURES) {
		struct scratch *s = my_scratch();
		if (s) {
			s->h = *h;
			learn(self);
		}
	}
	__u32 slot = h->port;
	__be16 inner = h->inner;
	if (shrink(ctx))
		DROP(DROP_MALFORMED);
	data = START(ctx);
	end = END(ctx);
	if (data + sizeof(struct ethhdr) > end)
		DROP(DROP_MALFORMED);
	((struct ethhdr *)data)->h_proto = inner;
	count(self, DELIVERED);
	return leave(ctx, self, slot, bpf_map_lookup_elem(&ports, &slot), sizeof(struct ethhdr));
}

/* No path from here. The packet's body is dropped; its header goes back to its first switch, to tell it. */
static __always_inline int give_notice(frame *ctx, __u32 self, struct scratch *s)
{
	count(self, DROP_NO_PATH);
	struct fabric_header *h = &s->h;
	if (h->kind != DATA || h->source == self)
		return FRAME_DROP;
	__u32 slot, target = h->target;
	if (cut_body(ctx))
		return FRAME_DROP;
	h->kind = NOTICE;
	h->flags = CERTAIN | (h->flags & FAILURES);
	h->port = h->policy;
	h->policy = NOTICE_POLICY;
	h->state = 0;
	h->hops_left = UNBOUNDED;
	h->target = h->source;
	h->source = target;
	int went = route(self);
	if (went < 0)
		return FRAME_DROP;
	slot = went;
	void *data = START(ctx), *end = END(ctx);
	struct fabric_header *out = data + sizeof(struct ethhdr);
	if ((void *)(out + 1) > end)
		return FRAME_DROP;
	h->hop = 1;
	h->hops_left--;
	*out = *h;
	count(self, NOTICED);
	return send_out(ctx, slot);
}

/* A notice has come home: believe it; if nothing is left to try, let the class rest for a while. */
static __always_inline int take_notice(const struct config *config, __u32 self, struct scratch *s)
{
	struct node *node = bpf_map_lookup_elem(&nodes, &self);
	if (!node)
		return FRAME_DROP;
	learn(self);
	s->h.policy = s->h.port & (POLICIES - 1);
	s->h.target = s->h.source;
	struct policy *p = policy_of(&s->h);
	if (!p)
		return FRAME_DROP;
	__u32 state = p->step[BOUND(p->start, STATES)][BOUND(self, NODES)];
	if (state >= STATES)
		return FRAME_DROP;
	s->h.state = state;
	s->h.hops_left = p->max_hops;
	s->h.flags |= CERTAIN;
	struct pause_key key = { self, s->h.target, s->h.policy, s->h.generation };
	if (route(self) == NO_PATH) {
		__u64 until = bpf_ktime_get_ns() + config->pause;
		node->paused_until = until;
		bpf_map_update_elem(&pauses, &key, &until, BPF_ANY);
	}
	return FRAME_DROP;
}

/* The packet's header is in the scratch and in need of a path. */
static __always_inline int find_way(frame *ctx, __u32 self, struct scratch *s, struct cached *keep, __u64 key)
{
	__u32 slot;
	count(self, SEARCHED);
	int went = route(self);
	if (went == NO_PATH)
		return give_notice(ctx, self, s);
	void *data = START(ctx), *end = END(ctx);
	struct fabric_header *out = data + sizeof(struct ethhdr);
	if ((void *)(out + 1) > end)
		DROP(DROP_MALFORMED);
	if (went == TO_HERE) {
		*out = s->h;
		return deliver(ctx, self);
	}
	if (keep && s->h.computed == 1) { /* found at once: no link of this switch was in the way */
		__u32 me = self;
		struct node *node = bpf_map_lookup_elem(&nodes, &me);
		if (node) {
			keep->key = key;
			keep->version = node->version;
			keep->generation = s->h.generation;
			keep->length = s->h.length;
			__builtin_memcpy(keep->path, s->h.path, sizeof(keep->path));
		}
	}
	s->h.hop = 1;
	s->h.hops_left--;
	*out = s->h;
	slot = went;
	return leave(ctx, self, slot, bpf_map_lookup_elem(&ports, &slot), INNER_AT);
}

static __always_inline int from_switch(frame *ctx, struct config *config, struct port *in)
{
	void *data = START(ctx), *end = END(ctx);
	struct ethhdr *eth = data;
	struct fabric_header *h = (void *)(eth + 1);
	__u32 self = in->node;
	if ((void *)(h + 1) > end || eth->h_proto != bpf_htons(ETH_FABRIC))
		DROP(DROP_MALFORMED);
	if (in->flags & SILENT)
		DROP(DROP_SILENT);
	if (config->silence) {
		in->heard = config->round;
		if (h->kind == HEARTBEAT)
			in->unheard = !(h->flags & HEARD);
	}
	if (h->kind == HEARTBEAT)
		return FRAME_DROP;
	struct policy *p = policy_of(h);
	if (!p || (__u8)p->generation != h->generation)
		DROP(DROP_STALE);
	__u32 state = p->step[h->state & (STATES - 1)][BOUND(self, NODES)];
	if (state >= STATES)
		DROP(DROP_VIOLATION);
	h->state = state;
	if ((h->flags & RECORD) && !sign(ctx, self))
		DROP(DROP_MALFORMED);
	__u32 hop = h->hop;
	if (hop < h->length && hop < CARRIED) {
		__u16 *entry = &h->path[hop]; /* the verifier wants its bounds seen once more */
		if ((void *)(entry + 1) > end)
			return FRAME_DROP;
		if (!h->hops_left)
			DROP(DROP_HOPS);
		__u32 slot = slot_towards(self, *entry);
		struct port *out = bpf_map_lookup_elem(&ports, &slot);
		if (out && link_up(config, out)) { /* the fast path */
			h->hop = hop + 1;
			h->hops_left--;
			count(self, TRANSIT);
			return leave(ctx, self, slot, out, INNER_AT);
		}
	}
	struct scratch *s = my_scratch();
	if (!s)
		return FRAME_DROP;
	if (hop >= h->length) {
		if (h->target == self) {
			if (h->kind == NOTICE) {
				s->h = *h;
				return take_notice(config, self, s);
			}
			if ((p->accept[BOUND(p->ranks - 1, RANKS)] >> state) & 1)
				return deliver(ctx, self);
		}
		s->h = *h;
		count(self, CONTINUED); /* the carried part of a long path ends here */
		return find_way(ctx, self, s, 0, 0);
	}
	s->h = *h;
	mark_own_failures(self);
	count(self, REROUTED);
	return find_way(ctx, self, s, 0, 0);
}

static __always_inline int from_host(frame *ctx, struct config *config, struct port *in, __u32 in_slot)
{
	void *data = START(ctx), *end = END(ctx);
	struct ethhdr *eth = data;
	/* Read once: tables that come into force meanwhile are for the next packet. */
	__u32 self = in->node, generation = *(volatile __u32 *)&config->generation, side = generation & 1;
	void *l3 = eth + 1;
	if (l3 > end)
		return FRAME_DROP;
	__be16 protocol = eth->h_proto;
	__u8 flags = 0;
	if (is_tagged(ctx))
		DROP(DROP_OTHER);
	if (protocol == bpf_htons(ETH_P_ARP)) {
		if (!answer_arp(data, end, side))
			DROP(DROP_UNKNOWN_HOST);
		count(self, ANSWERED);
		return send_out(ctx, in_slot);
	}
	if (protocol == bpf_htons(ETH_PROBE)) {
		reach(ctx, sizeof(struct ethhdr) + sizeof(struct record) + MOST_READ);
		data = START(ctx);
		end = END(ctx);
		eth = data;
		l3 = eth + 1;
		struct record *record = l3;
		if ((void *)(record + 1) > end)
			DROP(DROP_MALFORMED);
		protocol = record->inner;
		l3 = record + 1;
		flags = RECORD;
	} else if (protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = l3;
		if ((void *)(ip + 1) <= end && ip->daddr.in6_u.u6_addr8[0] == 0xff) { /* multicast: only solicitations */
			if (ip->nexthdr != IPPROTO_ICMPV6 || !answer_solicitation(data, end, side))
				DROP(DROP_OTHER);
			count(self, ANSWERED);
			return send_out(ctx, in_slot);
		}
	}
	struct traffic t;
	if (!parse(l3, end, protocol, side, &t))
		DROP(DROP_OTHER);
	if (!t.to && protocol == bpf_htons(ETH_P_IPV6)) { /* a solicitation may be sent to the host itself */
		if (answer_solicitation(data, end, side)) {
			count(self, ANSWERED);
			return send_out(ctx, in_slot);
		}
	}
	if (!t.from || !t.to)
		DROP(DROP_UNKNOWN_HOST);
	if (t.from->slot != in_slot) /* isolation would be worth nothing if a host could speak in another's name */
		DROP(DROP_SPOOFED);
	int policy = policy_for(config, &t, side);
	if (policy < 0)
		DROP(DROP_DENIED);
	struct scratch *s = my_scratch();
	__u32 me = self;
	struct node *node = bpf_map_lookup_elem(&nodes, &me);
	if (!s || !node)
		return FRAME_DROP;
	struct fabric_header *h = &s->h;
	h->kind = DATA;
	h->flags = flags;
	h->generation = generation;
	h->policy = policy;
	h->inner = eth->h_proto;
	h->source = self;
	h->target = t.to->node;
	h->port = t.to->slot;
	h->computed = 0;
	h->flow = t.flow & (FLOW_BUCKETS - 1);
	struct policy *p = policy_of(h);
	if (!p || !p->valid || (__u8)p->generation != h->generation)
		DROP(DROP_STALE);
	__u32 state = p->step[BOUND(p->start, STATES)][BOUND(self, NODES)];
	if (state >= STATES)
		DROP(DROP_VIOLATION);
	h->state = state;
	h->hops_left = p->max_hops;
	if (node->paused_until) {
		struct pause_key key = { self, h->target, h->policy, h->generation };
		__u64 *until = bpf_map_lookup_elem(&pauses, &key);
		if (until && bpf_ktime_get_ns() < *until)
			DROP(DROP_PAUSED);
	}
	believe(self);
	if (grow(ctx))
		DROP(DROP_TOO_BIG);
	data = START(ctx);
	end = END(ctx);
	if (data + sizeof(struct ethhdr) + sizeof(struct fabric_header) > end)
		DROP(DROP_MALFORMED);
	((struct ethhdr *)data)->h_proto = bpf_htons(ETH_FABRIC);
	if (flags && !sign(ctx, self))
		DROP(DROP_MALFORMED);
	count(self, INGRESS);
	if (!config->use_cache)
		return find_way(ctx, self, s, 0, 0);
	__u64 key = 1 | (__u64)h->flow << 1 | (__u64)h->policy << 8 | (__u64)h->target << 16 | (__u64)self << 32;
	struct cached *line = cache_line(key);
	if (line && line->key == key && line->version == node->version && line->generation == h->generation) {
		__u32 slot = slot_towards(self, line->path[0]);
		struct port *port = bpf_map_lookup_elem(&ports, &slot);
		if (port && link_up(config, port)) {
			struct fabric_header *out = data + sizeof(struct ethhdr);
			h->hop = 1;
			h->length = line->length;
			h->hops_left--;
			__builtin_memcpy(h->path, line->path, sizeof(h->path));
			*out = *h;
			count(self, CACHED);
			return leave(ctx, self, slot, port, INNER_AT);
		}
	}
	return find_way(ctx, self, s, line, key);
}

static __always_inline int handle(frame *ctx)
{
	reach(ctx, sizeof(struct ethhdr) + MOST_READ);
	void *data = START(ctx), *end = END(ctx);
	struct config *config = &settings;
	if (data + sizeof(struct ethhdr) > end)
		return FRAME_DROP;
	__u32 slot = FIELD(ctx, ingress_ifindex) - config->first_ifindex;
	struct port *in = bpf_map_lookup_elem(&ports, &slot);
	if (!in)
		return FRAME_DROP;
	if (in->kind == TO_SWITCH)
		return from_switch(ctx, config, in);
	if (in->kind == TO_HOST)
		return from_host(ctx, config, in, slot);
	return FRAME_PASS;
}
