/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* Is a link up? Asked for every packet, at the moment it wants to leave. The answer is the carrier bit of the device
 * itself, read in place, as a switching chip reads its port's status: nobody has to be told, in neither direction. */
#pragma once
#include "maps.h"

#define IN_PLACE __attribute__((preserve_access_index))
struct net_device {
	unsigned long state;
} IN_PLACE;
struct xdp_rxq_info {
	struct net_device *dev;
} IN_PLACE;
struct xdp_buff {
	struct xdp_rxq_info *rxq;
} IN_PLACE;
extern void *bpf_cast_to_kern_ctx(void *object) __ksym;
extern void *bpf_rdonly_cast(const void *object, __u32 type) __ksym;

/* net_device.state: bit 0 started, bit 1 present, bit 2 no carrier */
#define STATE_MASK 7
#define STATE_UP 3

static __always_inline int link_up(const struct config *config, const struct port *port)
{
	if (port->flags & DRAINED)
		return 0;
	if (port->device) {
		struct net_device *device = bpf_rdonly_cast((void *)(long)port->device,
							    bpf_core_type_id_kernel(struct net_device));
		if ((device->state & STATE_MASK) != STATE_UP)
			return 0;
	}
	if (config->silence && (port->unheard || (__s64)(config->round - port->heard) > (__s64)config->silence))
		return 0;
	return 1;
}

/* The emulated wire's rate: a queue of at most 20 ms, as the hosts' shapers have, that exists only as the time at which
 * it will be empty. */
#define QUEUE_NS 20000000ULL
static __always_inline int wire_takes(struct port *port, __u64 bytes)
{
	if (!port->picoseconds)
		return 1;
	__u64 now = bpf_ktime_get_ns(), until = port->busy_until;
	if (until < now)
		until = now;
	if (until - now > QUEUE_NS)
		return 0;
	port->busy_until = until + bytes * port->picoseconds / 1000;
	return 1;
}
