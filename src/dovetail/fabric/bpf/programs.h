/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* The programs of the switch: the one on its ports, and `adopt`. */
#pragma once
#include "forward.h"

FRAME_PROGRAM int fabric_switch(frame *ctx)
{
	return handle(ctx);
}

/* Run once for every port, through the kernel's test runner with the port as ingress: remembers the port's device. */
SEC("xdp.frags")
int adopt(struct xdp_md *ctx)
{
	__u32 slot = ctx->ingress_ifindex - settings.first_ifindex;
	struct port *port = bpf_map_lookup_elem(&ports, &slot);
	if (!port)
		return XDP_ABORTED;
	struct xdp_buff *buffer = bpf_cast_to_kern_ctx(ctx);
	port->device = (__u64)(long)buffer->rxq->dev;
	return XDP_PASS;
}
