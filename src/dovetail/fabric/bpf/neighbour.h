/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* Hosts see one flat network. Their switch answers ARP and neighbour solicitations for every host of the fabric. */
#pragma once
#include "maps.h"
#include <linux/if_ether.h>
#include <linux/in6.h>
#include <linux/ipv6.h>

struct arp {
	__be16 hardware, protocol;
	__u8 hardware_length, protocol_length;
	__be16 operation;
	__u8 sender_mac[6], sender[4], target_mac[6], target[4];
} __attribute__((packed));

struct solicitation { /* and the advertisement that answers it */
	__u8 type, code;
	__sum16 checksum;
	__be32 flags;
	__u8 target[16];
	__u8 option, option_length, mac[6];
} __attribute__((packed));

#define ND_SOLICITATION 135
#define ND_ADVERTISEMENT 136
#define ND_SOLICITED_OVERRIDE 0x60000000

static __always_inline void key_v4(struct host_key *key, const void *address, __u32 side)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->address[10] = 0xff;
	key->address[11] = 0xff;
	__builtin_memcpy(key->address + 12, address, 4);
	key->side = side;
}

static __always_inline void key_v6(struct host_key *key, const void *address, __u32 side)
{
	__builtin_memcpy(key->address, address, 16);
	key->side = side;
}

/* 1: the frame has become the answer, send it back; 0: nothing to answer. */
static __always_inline int answer_arp(void *data, void *end, __u32 side)
{
	struct ethhdr *eth = data;
	struct arp *arp = (void *)(eth + 1);
	struct host_key key;
	if ((void *)(arp + 1) > end || arp->operation != bpf_htons(1))
		return 0;
	key_v4(&key, arp->target, side);
	struct host *host = bpf_map_lookup_elem(&hosts, &key);
	if (!host)
		return 0;
	__u8 asked[4];
	__builtin_memcpy(asked, arp->target, 4);
	arp->operation = bpf_htons(2);
	__builtin_memcpy(arp->target_mac, arp->sender_mac, 6);
	__builtin_memcpy(arp->target, arp->sender, 4);
	__builtin_memcpy(arp->sender_mac, host->mac, 6);
	__builtin_memcpy(arp->sender, asked, 4);
	__builtin_memcpy(eth->h_dest, eth->h_source, 6);
	__builtin_memcpy(eth->h_source, host->mac, 6);
	return 1;
}

static __always_inline int answer_solicitation(void *data, void *end, __u32 side)
{
	struct ethhdr *eth = data;
	struct ipv6hdr *ip = (void *)(eth + 1);
	struct solicitation *nd = (void *)(ip + 1);
	struct host_key key;
	if ((void *)(nd + 1) > end || nd->type != ND_SOLICITATION || bpf_ntohs(ip->payload_len) != sizeof(*nd))
		return 0;
	/* From the unspecified address it is a duplicate check: silence means that the address is free. */
	if (!(ip->saddr.in6_u.u6_addr32[0] | ip->saddr.in6_u.u6_addr32[1] | ip->saddr.in6_u.u6_addr32[2] |
	      ip->saddr.in6_u.u6_addr32[3]))
		return 0;
	key_v6(&key, nd->target, side);
	struct host *host = bpf_map_lookup_elem(&hosts, &key);
	if (!host)
		return 0;
	ip->daddr = ip->saddr;
	__builtin_memcpy(&ip->saddr, nd->target, 16);
	nd->type = ND_ADVERTISEMENT;
	nd->flags = bpf_htonl(ND_SOLICITED_OVERRIDE);
	nd->option = 2; /* target link-layer address */
	__builtin_memcpy(nd->mac, host->mac, 6);
	__builtin_memcpy(eth->h_dest, eth->h_source, 6);
	__builtin_memcpy(eth->h_source, host->mac, 6);
	/* RFC 8200: the checksum covers a pseudo header of both addresses, the length and the protocol. */
	nd->checksum = 0;
	__be32 tail[2] = { bpf_htonl(sizeof(*nd)), bpf_htonl(IPPROTO_ICMPV6) };
	__s64 sum = bpf_csum_diff(0, 0, (__be32 *)&ip->saddr, 32, 0);
	sum = bpf_csum_diff(0, 0, tail, sizeof(tail), sum);
	sum = bpf_csum_diff(0, 0, (__be32 *)nd, sizeof(*nd), sum);
	__u32 folded = (sum & 0xffff) + ((__u32)sum >> 16);
	folded = (folded & 0xffff) + (folded >> 16);
	nd->checksum = ~folded;
	return 1;
}
