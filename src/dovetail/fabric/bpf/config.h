/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* Sizes. One knob, WORDS: how many 64-bit words a set of switches takes. Nothing here depends on one topology. */
#pragma once
#include <linux/bpf.h>
#include <linux/types.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#ifndef WORDS
#define WORDS 1
#endif
#define NODES (64 * WORDS)                                      /* switches */
#define LINKS (WORDS == 1 ? 128 : WORDS == 2 ? 512 : 1024) /* bits in a packet's failure map; XDP leaves room for 216 bytes */
#define LINK_WORDS (LINKS / 64)
#define STATES 8       /* of a policy's automaton */
#define RANKS 4        /* preferences */
#define POLICIES 64    /* the last one is NOTICE_POLICY */
#define NOTICE_POLICY (POLICIES - 1)
#define LEVELS 512     /* how deep the search goes, in hops */
#define CARRIED 16     /* hops of a path that a packet carries; its last switch continues a longer one */
#define SLOTS 16384    /* ports of all switches that share these maps */
#define UNBOUNDED 0xffff

/* may_goto (Linux 6.9), as bytes because older compilers do not know it: the verifier looks for a fixed point of the
 * loop instead of walking through every turn of it. */
#define can_loop                                                                                          \
	({                                                                                                \
		__label__ stop, go;                                                                       \
		_Bool more = 1;                                                                           \
		asm volatile goto("1:.byte 0xe5; .byte 0; .long ((%l[stop] - 1b - 8) / 8) & 0xffff; .short 0" \
				  :::: stop);                                                             \
		goto go;                                                                                  \
	stop:                                                                                             \
		more = 0;                                                                                 \
	go:;                                                                                              \
		more;                                                                                     \
	})

/* A mask that the compiler cannot move away from where the verifier needs to see it. */
#define BOUND(value, size)                                                   \
	({                                                                   \
		__u32 bound_ = (value);                                      \
		asm volatile("%0 &= %1" : "+r"(bound_) : "i"((size) - 1));   \
		bound_;                                                      \
	})
