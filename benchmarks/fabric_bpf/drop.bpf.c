/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* An emulated silent cut, for fabrics that do not run our switch: everything that arrives vanishes. */
#include "config.h"

SEC("xdp.frags")
int drop_all(struct xdp_md *ctx)
{
	return XDP_DROP;
}

char _license[] SEC("license") = "GPL v2";
