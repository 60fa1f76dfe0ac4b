/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* The sender of heartbeats, an object of its own: it shares the maps of the switch program. */
#include "heartbeat.h"

SEC("xdp.frags")
int heartbeat(struct xdp_md *ctx)
{
	return send_heartbeat(ctx);
}

char _license[] SEC("license") = "GPL v2";
