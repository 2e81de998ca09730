/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The maps that programs share which are loaded at different times (host_egress.c is, with the
 * first HostEgressPolicy), as maps.h has the others.
 */
#ifndef PODGATE_NODE_MAPS_H
#define PODGATE_NODE_MAPS_H

BPF_TABLE("array", __u32, struct counters, counters, SLOT_COUNT);
BPF_TABLE("array", __u32, struct config, config, 1);
BPF_TABLE("array", __u32, struct kubelet_remade, kubelet_remade, 1);

/* The addresses that the node has itself, without those of services. */
BPF_F_TABLE("lpm_trie", struct node_address, __u32, node_addresses, MAX_NODE_ADDRESSES,
	    BPF_F_NO_PREALLOC);

/* BPF_RINGBUF_OUTPUT counts in pages, whose size is the kernel's; the members are the same. */
struct event_ring {
	int key;
	__u32 leaf;
	void *(*ringbuf_reserve)(__u64 bytes);
	void (*ringbuf_submit)(void *record, __u64 flags);
	__u32 max_entries;
};
__attribute__((section("maps/ringbuf"))) struct event_ring drop_events = {
	.max_entries = EVENT_RING_BYTES,
};

/* For programs of cgroups. */
BPF_TABLE("percpu_array", __u32, struct event_budget, event_budget, 1);

#endif
