/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* Links that fail in silence, their carrier still on, are found by their silence: every switch sends a frame on every
 * link every few milliseconds. One call of the kernel's test runner with live frames sends a round: each run of this
 * program takes the next port, writes whether that port's neighbour is heard, and sends. */
#pragma once
#include "maps.h"
#include <linux/if_ether.h>

struct turn {
	__u32 next, slots;
};
MAP(turns, BPF_MAP_TYPE_ARRAY, __u32, struct turn, 1);

static __always_inline int send_heartbeat(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;
	struct fabric_header *h = (void *)(eth + 1);
	__u32 zero = 0;
	struct turn *turn = bpf_map_lookup_elem(&turns, &zero);
	struct config *config = &settings;
	if (!turn || (void *)(h + 1) > end)
		return XDP_DROP;
	__u32 slot = turn->next++;
	if (!slot)
		config->round++;
	if (turn->next >= turn->slots)
		turn->next = 0;
	struct port *port = bpf_map_lookup_elem(&ports, &slot);
	if (!port || port->kind != TO_SWITCH)
		return XDP_DROP;
	eth->h_proto = bpf_htons(ETH_FABRIC);
	h->kind = HEARTBEAT;
	h->flags = (__s64)(config->round - port->heard) <= (__s64)config->silence ? HEARD : 0;
	return bpf_redirect_map(&wires, slot, XDP_DROP);
}
