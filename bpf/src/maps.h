/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The maps, pinned below PIN_DIR (defined by the compile process) so that they outlive the agent.
 * bpf/abi.py lists the same maps; every opened one is compared with that list, because bcc takes a
 * pinned table of another layout without a word.
 */
#ifndef PODGATE_MAPS_H
#define PODGATE_MAPS_H

BPF_TABLE_PINNED("hash", __u32, struct gate, gates, MAX_GATES, PIN_DIR "/gates");
BPF_TABLE_PINNED("percpu_hash", __u32, struct counters, counters, MAX_GATES, PIN_DIR "/counters");

/* Set bit: the node can make packets come in by this interface, so they count as node-sent. */
BPF_TABLE_PINNED("array", __u32, __u64, origin, ORIGIN_WORDS, PIN_DIR "/origin");

#endif
