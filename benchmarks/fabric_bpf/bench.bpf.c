/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/* The switch, made repeatable for the kernel's test runner, which does not put the packet back between runs. */
#include "programs.h"

struct kept {
	struct fabric_header h;
};
MAP(kept, BPF_MAP_TYPE_ARRAY, __u32, struct kept, 1);

static __always_inline int put_back(struct xdp_md *ctx)
{
	__u32 zero = 0;
	struct kept *kept_header = bpf_map_lookup_elem(&kept, &zero);
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct fabric_header *h = data + sizeof(struct ethhdr);
	if (!kept_header || (void *)(h + 1) > end)
		return 0;
	*h = kept_header->h;
	return 1;
}

SEC("xdp.frags") int bench_nothing(struct xdp_md *ctx)
{
	return put_back(ctx) ? XDP_PASS : XDP_ABORTED;
}

SEC("xdp.frags") int bench_transit(struct xdp_md *ctx)
{
	return put_back(ctx) ? handle(ctx) : XDP_ABORTED;
}

/* A plain redirect with the same header work: take the next hop from the packet, advance it, count, send. */
SEC("xdp.frags") int bench_plain(struct xdp_md *ctx)
{
	if (!put_back(ctx))
		return XDP_ABORTED;
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;
	struct fabric_header *h = (void *)(eth + 1);
	if ((void *)(h + 1) > end || eth->h_proto != bpf_htons(ETH_FABRIC))
		return XDP_DROP;
	__u32 hop = h->hop;
	if (hop >= h->length || hop >= CARRIED || !h->hops_left)
		return XDP_DROP;
	__u16 *entry = &h->path[hop];
	if ((void *)(entry + 1) > end)
		return XDP_DROP;
	h->hop = hop + 1;
	h->hops_left--;
	count(0, TRANSIT);
	return bpf_redirect_map(&wires, *entry, XDP_DROP);
}

/* From a host: header on, path found; the header is taken off again. */
SEC("xdp.frags") int bench_ingress(struct xdp_md *ctx)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	if (data + sizeof(struct ethhdr) > end)
		return XDP_ABORTED;
	__be16 protocol = ((struct ethhdr *)data)->h_proto;
	int verdict = handle(ctx);
	if (verdict != XDP_REDIRECT || bpf_xdp_adjust_head(ctx, sizeof(struct fabric_header)))
		return verdict;
	data = (void *)(long)ctx->data;
	end = (void *)(long)ctx->data_end;
	if (data + sizeof(struct ethhdr) > end)
		return XDP_ABORTED;
	((struct ethhdr *)data)->h_proto = protocol;
	return verdict;
}

char _license[] SEC("license") = "GPL v2";
