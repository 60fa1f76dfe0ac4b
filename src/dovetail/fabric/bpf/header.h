/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* What travels between switches: a header after Ethernet, and the record of a probe. */
#pragma once
#include "config.h"

#define ETH_FABRIC 0x88B5 /* IEEE 802 local experimental ethertypes */
#define ETH_PROBE 0x88B6

enum kind { DATA, NOTICE, HEARTBEAT };

enum {
	RECORD = 1,  /* a probe: every switch signs */
	CERTAIN = 2, /* every bit of `failed` is a link that this packet met as failed; otherwise some are hearsay */
	FAILURES = 4, /* `failed` is not empty */
	HEARD = 8,   /* heartbeat: "I hear you" */
};

struct fabric_header {
	__u8 kind;
	__u8 flags;
	__u8 generation;  /* of the tables that this packet is judged by, everywhere on its way */
	__u8 policy;
	__u8 state;       /* of the policy's automaton, after the last switch visited */
	__u8 hop, length; /* of `path` */
	__u8 life;        /* how much longer `failed` may be believed, in 1/255 of config.life; `met`: for all of it */
	__be16 inner;     /* the host's ethertype */
	__u16 hops_left;
	__u16 source, target; /* switches */
	__u16 port;       /* of the host at the target; in a notice: the policy that could not be met */
	__u16 computed;   /* searches made for this packet */
	__u16 flow;
	__u16 met;        /* the link that it met as failed last, while the rest of `failed` is hearsay */
	__u16 path[CARRIED];
	__u64 failed[LINK_WORDS]; /* a bit map and not a list: it cannot overflow */
};

#define NOTHING_MET 0xffff
#define SIGNED 124
struct record {
	__u16 count;
	__be16 inner;
	__u16 tag[2]; /* the prober's own */
	__u16 walk[SIGNED];
};
