/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* From a host's packet to its class: who sends to whom, on which port, and which flow it is. */
#pragma once
#include "neighbour.h"
#include <linux/in.h>
#include <linux/ip.h>

struct traffic {
	struct host *from, *to;
	__u32 flow;
	__be16 port;
};

static __always_inline __u32 mix(__u32 x)
{
	x ^= x >> 16;
	x *= 0x7feb352dU;
	x ^= x >> 15;
	x *= 0x846ca68bU;
	return x ^ (x >> 16);
}

static __always_inline int parse(void *l3, void *end, __be16 protocol, __u32 side, struct traffic *out)
{
	struct host_key from, to;
	void *l4;
	__u32 kind, flow;
	int whole;
	if (protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = l3;
		if ((void *)(ip + 1) > end)
			return 0;
		key_v4(&from, &ip->saddr, side);
		key_v4(&to, &ip->daddr, side);
		flow = ip->saddr * 0x9E3779B1u ^ mix(ip->daddr);
		kind = ip->protocol;
		whole = ip->ihl == 5 && !(ip->frag_off & bpf_htons(0x3fff)); /* all pieces of a packet take one path */
		l4 = ip + 1;
	} else if (protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = l3;
		if ((void *)(ip + 1) > end)
			return 0;
		key_v6(&from, &ip->saddr, side);
		key_v6(&to, &ip->daddr, side);
		flow = 0;
		_Pragma("unroll") for (int i = 0; i < 4; i++)
			flow = mix(flow ^ ip->saddr.in6_u.u6_addr32[i]) ^ ip->daddr.in6_u.u6_addr32[i] * 0x9E3779B1u;
		kind = ip->nexthdr;
		whole = 1;
		l4 = ip + 1;
	} else {
		return 0;
	}
	out->port = 0;
	if (whole && (kind == IPPROTO_TCP || kind == IPPROTO_UDP)) {
		__be16 *both = l4;
		if ((void *)(both + 2) <= end) {
			flow ^= mix(both[0] << 16 | both[1]);
			out->port = both[1];
		}
	}
	out->flow = mix(flow ^ kind);
	out->from = bpf_map_lookup_elem(&hosts, &from);
	out->to = bpf_map_lookup_elem(&hosts, &to);
	return 1;
}

/* The policy for this traffic, or -1 where it is denied. The port's own class stands before the pair's. */
static __always_inline int policy_for(const struct config *config, const struct traffic *t, __u32 side)
{
	struct class_key key = { t->from->group, t->to->group, t->port, side };
	__u32 *found = 0;
	if ((config->by_port >> side & 1) && t->port)
		found = bpf_map_lookup_elem(&classes, &key);
	if (!found) {
		key.port = 0;
		found = bpf_map_lookup_elem(&classes, &key);
	}
	return found ? (int)*found : -1;
}
