/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* Sets of switches, one bit each. */
#pragma once
#include "config.h"

struct bits {
	__u64 w[WORDS];
};

#define EACH_WORD(w) _Pragma("unroll") for (int w = 0; w < WORDS; w++)

/* The machine has no instruction for it that BPF can use: multiply by a de Bruijn sequence and look up. */
static const __u8 lowest_bit_table[64] = {
	0,  1,  48, 2,  57, 49, 28, 3,  61, 58, 50, 42, 38, 29, 17, 4,  62, 55, 59, 36, 53, 51,
	43, 22, 45, 39, 33, 30, 24, 18, 12, 5,  63, 47, 56, 27, 60, 41, 37, 16, 54, 35, 52, 21,
	44, 32, 23, 11, 46, 26, 40, 15, 34, 20, 31, 10, 25, 14, 19, 9,  13, 8,  7,  6,
};

static __always_inline __u32 lowest_bit(__u64 x)
{
	return lowest_bit_table[((x & -x) * 0x03f79d71b4cb0a89ULL) >> 58];
}

static __always_inline __u32 count_bits(__u64 x)
{
	x -= (x >> 1) & 0x5555555555555555ULL;
	x = (x & 0x3333333333333333ULL) + ((x >> 2) & 0x3333333333333333ULL);
	x = (x + (x >> 4)) & 0x0f0f0f0f0f0f0f0fULL;
	return (x * 0x0101010101010101ULL) >> 56;
}

static __always_inline __u32 word_of(__u32 i)
{
	return WORDS == 1 ? 0 : BOUND(i >> 6, WORDS);
}

static __always_inline int has(const struct bits *set, __u32 i)
{
	return (set->w[word_of(i)] >> (i & 63)) & 1;
}

static __always_inline void put(struct bits *set, __u32 i)
{
	set->w[word_of(i)] |= 1ULL << (i & 63);
}
