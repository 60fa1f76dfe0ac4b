/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* What a switch knows. Tables are held twice, by the lowest bit of their generation: a new set is written beside the
 * old one and comes into force with one store to config.generation; packets on their way keep the old one. */
#pragma once
#include "bits.h"
#include "header.h"

struct config {
	__u32 generation;
	__u32 first_ifindex; /* of slot 0 */
	__u64 life;          /* how long a failure heard of is believed, ns */
	__u64 pause;         /* how long a class that cannot be served is not tried again, ns */
	__u64 silence;       /* a link is down when nothing was heard for so many rounds of heartbeats; 0: carrier only */
	__u32 by_port;       /* bit by side: some class is told apart by its port */
	__u32 use_cache;
	__u64 round;         /* of heartbeats. Rounds and not time: where nobody sends, nobody is missed */
	__u64 changed;       /* when this generation came into force, ns; for whoever writes the next one */
};

struct graph {
	__u32 generation;
	__u32 nodes;
	struct bits next[NODES];
	struct { __u16 a, b; } ends[LINKS];
};

struct policy {
	__u32 generation;
	__u8 states, start, ranks, valid;
	__u16 max_hops, pad;
	__u8 accept[RANKS]; /* sets of states, most preferred first, each containing the one before */
	__u8 into[STATES];  /* into[q]: the states that some switch leads to from q */
	__u8 step[STATES][NODES]; /* next state, 0xff: none */
	struct bits by[STATES][STATES]; /* by[q][r]: the switches that lead from q to r */
};

enum port_kind { UNUSED, TO_SWITCH, TO_HOST };
enum { DRAINED = 1, SILENT = 2 };

struct port {
	__u16 node;   /* the switch it belongs to */
	__u16 peer;   /* the neighbour, or the host */
	__u16 link;
	__u8 kind, flags;
	__u64 device; /* the kernel's struct net_device, found by `adopt` */
	__u64 heard;  /* the round in which the last frame came in; kept only where config.silence asks for it */
	__u64 unheard; /* the neighbour says that it does not hear us */
	__u64 busy_until; /* of the emulated wire, ns */
	__u64 picoseconds; /* per byte on the emulated wire; 0: no limit */
};

struct node {
	__u64 failed[LINK_WORDS]; /* links heard of as failed */
	__u64 until[LINKS]; /* when the belief in each of them ends, ns: news of one keeps no other alive */
	__u64 fades_at; /* when the first of these beliefs ends, ns; 0: there is none */
	__u64 paused_until;
	__u32 version; /* counts changes of what it believes, so that cached paths can be told stale */
};

struct host_key {
	__u8 address[16]; /* IPv4 as ::ffff:a.b.c.d */
	__u32 side;
};
struct host {
	__u8 mac[6];
	__u16 node, slot, group;
};
struct class_key {
	__u16 from, to;
	__be16 port;
	__u16 side;
};
struct pause_key {
	__u16 node, target;
	__u16 policy, generation;
};

enum counter {
	INGRESS, TRANSIT, DELIVERED, SEARCHED, REROUTED, CONTINUED, RETRIED, CACHED, ANSWERED, NOTICED,
	DROP_NO_PATH, DROP_VIOLATION, DROP_DENIED, DROP_PAUSED, DROP_UNKNOWN_HOST, DROP_HOPS, DROP_STALE, DROP_MALFORMED,
	DROP_SILENT, DROP_QUEUE, DROP_TOO_BIG, DROP_SPOOFED, DROP_OTHER, COUNTERS,
};
struct counters {
	__u64 n[COUNTERS];
};

struct scratch {
	struct fabric_header h;
	struct bits level[LEVELS][STATES];
	struct bits seen[STATES];
	struct bits cut[NODES]; /* links left out; all zero between packets */
	struct bits front, reach;
	__u32 depth, state, word, rank; /* loop counters live here: what is loaded is an unknown number to the verifier */
	__u64 any, soonest;
};

/* Paths found lately, so that most packets of a flow need no search. A kept path is as good as a fresh one: what has
 * failed since is met on the way and answered there. */
#define CACHE_SIZE 4096 /* per processor */
#define FLOW_BUCKETS 64 /* flows of one class between two switches share at most so many paths */
struct cached {
	__u64 key; /* 0: empty */
	__u32 version, generation;
	__u16 path[CARRIED];
	__u32 length, pad;
};

#define MAP(name_, type_, key_, value_, size_) \
	struct {                               \
		__uint(type, type_);           \
		__type(key, key_);             \
		__type(value, value_);         \
		__uint(max_entries, size_);    \
	} name_ SEC(".maps")

struct config settings SEC(".data.config"); /* a variable and not an entry: nothing to look up, for every packet */
__u16 slots[NODES * NODES] SEC(".data.slots"); /* [here][there]: the port of one switch towards another */
MAP(graphs, BPF_MAP_TYPE_ARRAY, __u32, struct graph, 2);
MAP(policies, BPF_MAP_TYPE_ARRAY, __u32, struct policy, 2 * POLICIES);
MAP(nodes, BPF_MAP_TYPE_ARRAY, __u32, struct node, NODES);
MAP(ports, BPF_MAP_TYPE_ARRAY, __u32, struct port, SLOTS);
MAP(hosts, BPF_MAP_TYPE_HASH, struct host_key, struct host, 32768);
MAP(classes, BPF_MAP_TYPE_HASH, struct class_key, __u32, 65536);
MAP(pauses, BPF_MAP_TYPE_LRU_HASH, struct pause_key, __u64, 1024);
MAP(scratches, BPF_MAP_TYPE_ARRAY, __u32, struct scratch, 1);   /* by processor; resized by the loader */
MAP(cache, BPF_MAP_TYPE_ARRAY, __u32, struct cached, CACHE_SIZE);
MAP(counts, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, struct counters, NODES);
struct {
	__uint(type, BPF_MAP_TYPE_DEVMAP);
	__uint(key_size, 4);
	__uint(value_size, 4);
	__uint(max_entries, SLOTS);
} wires SEC(".maps");

static __always_inline void count(__u32 self, enum counter what)
{
	struct counters *c = bpf_map_lookup_elem(&counts, &self);
	if (c)
		c->n[what]++;
}

static __always_inline __u32 slot_towards(__u32 here, __u32 there)
{
	return slots[BOUND(here * NODES + BOUND(there, NODES), NODES * NODES)];
}

static __always_inline struct scratch *my_scratch(void)
{
	__u32 cpu = bpf_get_smp_processor_id();
	return bpf_map_lookup_elem(&scratches, &cpu);
}

static __always_inline struct cached *cache_line(__u64 key)
{
	__u32 at = bpf_get_smp_processor_id() * CACHE_SIZE + ((key * 0x9E3779B97F4A7C15ULL) >> 52);
	return bpf_map_lookup_elem(&cache, &at);
}

static __always_inline struct policy *policy_of(const struct fabric_header *h)
{
	__u32 key = (h->generation & 1) * POLICIES + (h->policy & (POLICIES - 1));
	return bpf_map_lookup_elem(&policies, &key);
}
