/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* A frame at a port, for the rest of the switch: its first bytes, its length, our header on and off, the way out.
 *
 * The switch sits at one of two hooks of the kernel. At XDP, in the driver, a frame is a buffer, as it was on the wire;
 * physical ports have this. At tc, on a veth port, it is an sk_buff, and one that TCP made may hold 64 KiB that no wire
 * has to carry in one piece: it crosses every switch whole. (A veth port with an XDP program would take segmentation
 * away from its neighbour.) The bytes that travel between switches are the same. */
#pragma once
#include "maps.h"
#include <linux/if_ether.h>

#define INNER_AT (sizeof(struct ethhdr) + sizeof(struct fabric_header)) /* where the host's packet begins */

/* Reads a field of the context by its own offset: compilers like to keep a pointer to a field that is read often, and
 * the verifier refuses such pointers. */
#define FIELD(ctx, name)                                                                                       \
	({                                                                                                     \
		long field_;                                                                                   \
		asm volatile("%0 = *(u32 *)(%1 + %2)" : "=r"(field_) : "r"(ctx), "i"(__builtin_offsetof(frame, name))); \
		field_;                                                                                        \
	})
#define START(ctx) ((void *)FIELD(ctx, data))
#define END(ctx) ((void *)FIELD(ctx, data_end))

#ifdef TC
#include <linux/if_packet.h>
#include <linux/pkt_cls.h>

typedef struct __sk_buff frame;
#define FRAME_PROGRAM SEC("tc")
enum { FRAME_PASS = TC_ACT_OK, FRAME_DROP = TC_ACT_SHOT };
#define ROOM_FLAGS (BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_NO_CSUM_RESET) /* segments are cut by the host's MTU */

#define SHIFTED 1024
struct shifted {
	__u8 bytes[SHIFTED];
};
MAP(shifts, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, struct shifted, 1);

/* Makes so many bytes readable in place, where there are so many: the rest of an sk_buff may lie in other pages. */
static __always_inline void reach(frame *ctx, __u32 bytes)
{
	__u64 here = END(ctx) - START(ctx);
	if (here < bytes && here < FIELD(ctx, len))
		bpf_skb_pull_data(ctx, FIELD(ctx, len) < bytes ? FIELD(ctx, len) : bytes);
}

/* What it takes on a wire: a segment would travel as frames of the MTU, each with headers of its own (TCP's with the
 * time stamp that Linux sends). */
static __always_inline __u64 wire_bytes(frame *ctx, __u32 inner_at)
{
	__u32 size = FIELD(ctx, gso_size), length = FIELD(ctx, len);
	__u32 heads = inner_at + (FIELD(ctx, protocol) == bpf_htons(ETH_P_IPV6) ? 40 : 20) + 32;
	if (!size || length <= heads)
		return length;
	return length + (__u64)((length - heads - 1) / size) * heads;
}

/* The kernel keeps a VLAN's tag beside the bytes: a tagged frame would pass for one without. */
static __always_inline int is_tagged(frame *ctx)
{
	return FIELD(ctx, vlan_present);
}

static __always_inline int is_ip(frame *ctx)
{
	return FIELD(ctx, protocol) == bpf_htons(ETH_P_IP) || FIELD(ctx, protocol) == bpf_htons(ETH_P_IPV6);
}

/* Makes room for the header; 0: done. The kernel does so only for IP packets. What else comes, probes, grows in front
 * of its Ethernet header, which is then moved. */
static __always_inline int grow(frame *ctx)
{
	__u8 addresses[12];
	if (is_ip(ctx))
		return bpf_skb_adjust_room(ctx, sizeof(struct fabric_header), BPF_ADJ_ROOM_MAC, ROOM_FLAGS);
	if (bpf_skb_load_bytes(ctx, 0, addresses, 12) || bpf_skb_change_head(ctx, sizeof(struct fabric_header), 0))
		return -1;
	return bpf_skb_store_bytes(ctx, 0, addresses, 12, 0);
}

/* Takes the header off. By hand where the frame did not come as IP: the body is short, and moved. */
static __always_inline int shrink(frame *ctx)
{
	__u32 zero = 0, length = FIELD(ctx, len) - INNER_AT;
	struct shifted *body;
	if (is_ip(ctx))
		return bpf_skb_adjust_room(ctx, -(int)sizeof(struct fabric_header), BPF_ADJ_ROOM_MAC, ROOM_FLAGS);
	body = bpf_map_lookup_elem(&shifts, &zero);
	if (!body || length - 1 >= SHIFTED)
		return -1;
	length = 1 + BOUND(length - 1, SHIFTED);
	if (bpf_skb_load_bytes(ctx, INNER_AT, body->bytes, length) ||
	    bpf_skb_store_bytes(ctx, sizeof(struct ethhdr), body->bytes, length, 0))
		return -1;
	return bpf_skb_change_tail(ctx, sizeof(struct ethhdr) + length, 0);
}

/* Leaves nothing but the header. Where a checksum was left to the device, the kernel keeps what comes before its place:
 * those bytes stay, as zeros. */
static __always_inline int cut_body(frame *ctx)
{
	__u8 zeros[80] = {}; /* the longest IPv4 header, and TCP's up to its checksum */
	if (!bpf_skb_change_tail(ctx, INNER_AT, 0))
		return 0;
	if (bpf_skb_change_tail(ctx, INNER_AT + sizeof(zeros), 0))
		return -1;
	return bpf_skb_store_bytes(ctx, INNER_AT, zeros, sizeof(zeros), 0);
}

/* To the far end of the port's link, where the next switch takes it up at once: no queue in between. */
static __always_inline int send_out(frame *ctx, __u32 slot)
{
	if (FIELD(ctx, pkt_type) != PACKET_HOST) /* its address is not the first switch's; where it ends it is meant */
		bpf_skb_change_type(ctx, PACKET_HOST);
	return bpf_redirect_peer(settings.first_ifindex + slot, 0);
}

#else /* XDP */

typedef struct xdp_md frame;
#define FRAME_PROGRAM SEC("xdp.frags") /* frags: lifts the limit of one page on a frame's size */
enum { FRAME_PASS = XDP_PASS, FRAME_DROP = XDP_DROP };

static __always_inline void reach(frame *ctx, __u32 bytes)
{
}

static __always_inline __u64 wire_bytes(frame *ctx, __u32 inner_at)
{
	return bpf_xdp_get_buff_len(ctx);
}

static __always_inline int is_tagged(frame *ctx)
{
	return 0; /* then the ethertype says so */
}

/* Moves the head by the size of our header, and the Ethernet addresses with it; 0: done. */
static __always_inline int move_head(frame *ctx, int by)
{
	void *data = START(ctx), *end = END(ctx);
	if (data + 12 > end)
		return -1;
	__u64 first = *(__u64 *)data;
	__u32 last = *(__u32 *)(data + 8);
	if (bpf_xdp_adjust_head(ctx, by))
		return -1;
	data = START(ctx);
	end = END(ctx);
	if (data + 12 > end)
		return -1;
	*(__u64 *)data = first;
	*(__u32 *)(data + 8) = last;
	return 0;
}

static __always_inline int grow(frame *ctx)
{
	return move_head(ctx, -(int)sizeof(struct fabric_header));
}

static __always_inline int shrink(frame *ctx)
{
	return move_head(ctx, sizeof(struct fabric_header));
}

static __always_inline int cut_body(frame *ctx)
{
	__u32 length = bpf_xdp_get_buff_len(ctx);
	return length > INNER_AT ? bpf_xdp_adjust_tail(ctx, (int)INNER_AT - (int)length) : 0;
}

static __always_inline int send_out(frame *ctx, __u32 slot)
{
	return bpf_redirect_map(&wires, slot, XDP_DROP);
}
#endif
