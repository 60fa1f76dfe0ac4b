/* SPDX-License-Identifier: MIT OR GPL-2.0 */
#include "heartbeat.h"

SEC("xdp.frags")
int heartbeat(struct xdp_md *ctx)
{
	return send_heartbeat(ctx);
}

char _license[] SEC("license") = "Dual MIT/GPL";
