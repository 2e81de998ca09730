/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The maps, pinned below PIN_DIR (defined by the compile process) so that they outlive the agent.
 * bpf/abi.py lists the same maps; every opened map is compared with that list, because bcc silently
 * uses a pinned table of another layout.
 */
#ifndef PODGATE_MAPS_H
#define PODGATE_MAPS_H

/* Not preallocated: a gate has 1 KiB, its counters 768 bytes per CPU, and most nodes have few. */
BPF_TABLE_PINNED("hash", __u32, struct gate, gates, MAX_GATES, PIN_DIR "/gates", BPF_F_NO_PREALLOC);
BPF_TABLE_PINNED("percpu_hash", __u32, struct counters, counters, MAX_GATES, PIN_DIR "/counters",
		 BPF_F_NO_PREALLOC);
BPF_TABLE_PINNED("percpu_hash", __u32, __u64, rule_hits, MAX_RULE_HITS, PIN_DIR "/rule_hits",
		 BPF_F_NO_PREALLOC);
BPF_TABLE_PINNED("array", __u32, struct config, config, 1, PIN_DIR "/config");

/* When full it keeps its entries; drop_src_lost counts the packets of other sources. */
BPF_TABLE_PINNED("hash", struct drop_source_key, struct drop_source, drop_sources, MAX_DROP_SOURCES,
		 PIN_DIR "/drop_sources", BPF_F_NO_PREALLOC);
BPF_TABLE_PINNED("percpu_array", __u32, __u64, drop_src_lost, 1, PIN_DIR "/drop_src_lost");

/* The template of the pods' reply tables, and the tables by ifindex. */
BPF_TABLE_PINNED("array", __u32, struct reply_set, reply_table, REPLY_SETS, PIN_DIR "/reply_table");
BPF_TABLE_PINNED("hash_of_maps$reply_table", __u32, int, replies, MAX_GATES, PIN_DIR "/replies");
BPF_TABLE_PINNED("array", __u32, struct reply_key, reply_key, 1, PIN_DIR "/reply_key");

/* The gated interface of each pod address; 0 if several pods have the address. */
BPF_TABLE_PINNED("hash", struct address, __u32, addresses, MAX_ADDRESSES, PIN_DIR "/addresses",
		 BPF_F_NO_PREALLOC);

/* The relay's address for a pod's port, and the pod of each of the relay's addresses. */
BPF_TABLE_PINNED("hash", struct relay_target_key, struct address, relay_targets, MAX_RELAY_TARGETS,
		 PIN_DIR "/relay_targets", BPF_F_NO_PREALLOC);
BPF_TABLE_PINNED("hash", struct address, struct relay_pod, relay_pods, MAX_RELAY_TARGETS,
		 PIN_DIR "/relay_pods", BPF_F_NO_PREALLOC);
/* The relay's last heartbeat: CLOCK_MONOTONIC in ns. */
BPF_TABLE_PINNED("array", __u32, __u64, relay_beat, 1, PIN_DIR "/relay_beat");

/*
 * Sockets (by cookie) that a relay's hook did not redirect, with the address to which they connect.
 * When full it forgets the oldest ones: the gate then admits their retransmitted SYNs as in
 * enforce.
 */
BPF_TABLE_PINNED("lru_hash", __u64, struct address, relay_bypasses, MAX_RELAY_BYPASSES,
		 PIN_DIR "/relay_bypasses");

/* bcc has no macro for a pinned ring; its members are those of BPF_RINGBUF_OUTPUT. */
struct event_ring {
	int key;
	__u32 leaf;
	void *(*ringbuf_reserve)(__u64 bytes);
	void (*ringbuf_submit)(void *record, __u64 flags);
	__u32 max_entries;
};
__attribute__((section("maps/ringbuf:" PIN_DIR "/drop_events"))) struct event_ring drop_events = {
	.max_entries = EVENT_RING_BYTES,
};
BPF_TABLE_PINNED("percpu_array", __u32, struct event_budget, event_budget, 1,
		 PIN_DIR "/event_budget");

/* Set bit: the host can make packets come in by this interface, so they count as host-sent. */
BPF_TABLE_PINNED("array", __u32, __u64, injectable, INJECTABLE_WORDS, PIN_DIR "/injectable");

#endif
