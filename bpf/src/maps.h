/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The maps, for the compiler. bpf/map_specs.py lists the same maps with their shapes, by which the
 * loader creates and pins them, so that they outlive the agent; a test compares the two.
 */
#ifndef PODGATE_MAPS_H
#define PODGATE_MAPS_H

#include "node_maps.h"

/* The slot of each gated interface, and its configuration and counters by slot: 3.6 MiB. */
BPF_F_TABLE("hash", __u32, __u32, gate_slots, MAX_GATES, BPF_F_NO_PREALLOC);
BPF_TABLE("array", __u32, struct gate_slot, gates, SLOT_COUNT);
BPF_TABLE("percpu_array", __u32, struct frequent_counts, frequent_counts, SLOT_COUNT);

/* What has no place in struct gate. The value of an address: 1 if it is only claimed. */
BPF_F_TABLE("hash", struct more_rules_key, struct more_rules, more_rules, 2 * MAX_GATES,
	    BPF_F_NO_PREALLOC);
BPF_F_TABLE("hash", struct gate_address, __u32, gate_addresses, MAX_MORE_ADDRESSES,
	    BPF_F_NO_PREALLOC);

BPF_F_TABLE("percpu_hash", __u32, __u64, rule_hits, MAX_RULE_HITS, BPF_F_NO_PREALLOC);
BPF_TABLE("array", __u32, struct buffer_layout, buffer_layout, 1);

BPF_TABLE("array", __u32, struct kubelet_unit, kubelet_unit, 1);

/*
 * Drop sources, the number of them that each cgroup has, and the last one of each CPU. When full
 * they forget the oldest; drop_src_lost counts packets for whose source there was no memory.
 */
BPF_TABLE("lru_hash", struct drop_source_key, struct drop_source, drop_sources, MAX_DROP_SOURCES);
BPF_TABLE("lru_hash", __u64, __u32, source_cgroups, MAX_SOURCE_CGROUPS);
BPF_TABLE("percpu_array", __u32, struct recent_source, recent_source, 1);
BPF_TABLE("percpu_array", __u32, __u64, drop_src_lost, 1);

/* The template of the pods' reply tables, and the tables by ifindex. */
BPF_TABLE("array", __u32, struct reply_set, reply_table, REPLY_SETS);
BPF_TABLE("hash_of_maps$reply_table", __u32, int, replies, MAX_GATES);
BPF_TABLE("array", __u32, struct reply_key, reply_key, 1);

/* When the first fragment of a datagram passed. */
BPF_TABLE("lru_hash", struct fragment, __u64, fragments, MAX_FRAGMENTS);

/* What the kubelet may not connect to, and how often it was rejected. */
BPF_F_TABLE("hash", struct host_probe, __u64, denied_host_probes, MAX_DENIED_HOST_PROBES,
	    BPF_F_NO_PREALLOC);

BPF_SK_STORAGE(socket_histories, struct socket_history);

/* Connections that host processes open now, by the SYN's sequence number in network order. */
BPF_TABLE("lru_hash", __be32, struct host_connect, host_connects, MAX_HOST_CONNECTS);
BPF_TABLE("lru_hash", __u64, struct cgroup_ancestors, connect_cgroups, MAX_CONNECTING_CGROUPS);
BPF_TABLE("array", __u32, struct connect_layout, connect_layout, 1);

/* The raw sockets of the host's processes, by cookie, that are older than the hooks. */
BPF_F_TABLE("hash", __u64, __u32, old_raw_sockets, MAX_OLD_RAW_SOCKETS, BPF_F_NO_PREALLOC);

/*
 * Who may create raw and packet sockets of the host's namespace, and which pods' processes do
 * without: their number, and the sources, of which the oldest are forgotten.
 */
BPF_TABLE("array", __u32, struct raw_socket_policy, raw_socket_policy, 1);
BPF_F_TABLE("hash", __u64, __u32, raw_socket_creators, MAX_RAW_SOCKET_CREATORS, BPF_F_NO_PREALLOC);
BPF_TABLE("array", __u32, __u64, raw_socket_counts, RAW_SOCKET_COUNTS);
BPF_TABLE("lru_hash", struct raw_socket_source_key, struct drop_source, raw_socket_sources,
	  MAX_RAW_SOCKET_SOURCES);

/* The gated interface of each pod address; 0 if several pods have the address. */
BPF_F_TABLE("hash", struct address, __u32, addresses, MAX_ADDRESSES, BPF_F_NO_PREALLOC);

/* The relay's address for a pod's port, and the pod of each of the relay's addresses. */
BPF_F_TABLE("hash", struct relay_target_key, struct address, relay_targets, MAX_RELAY_TARGETS,
	    BPF_F_NO_PREALLOC);
BPF_F_TABLE("hash", struct address, struct relay_pod, relay_pods, MAX_RELAY_TARGETS,
	    BPF_F_NO_PREALLOC);
/* The relay's last heartbeat: CLOCK_MONOTONIC in ns. */
BPF_TABLE("array", __u32, __u64, relay_beat, 1);

/*
 * Sockets (by cookie) that a relay's hook did not redirect, with the address to which they connect.
 * When full it forgets the oldest ones: the gate then admits their retransmitted SYNs as in
 * enforce.
 */
BPF_TABLE("lru_hash", __u64, struct address, relay_bypasses, MAX_RELAY_BYPASSES);

/* The last one of the programs for packets, on each CPU. */
BPF_TABLE("percpu_array", __u32, struct clock_reading, clock_readings, 1);

/* For programs of packets. */
BPF_TABLE("percpu_array", __u32, struct event_budget, packet_budget, 1);

/* Set bit: the host can make packets come in by this interface, so they count as host-sent. */
BPF_F_TABLE("array", __u32, __u64, injectable, INJECTABLE_WORDS, BPF_F_MMAPABLE);

#endif
