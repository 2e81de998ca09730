/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Aggregates drops by source cgroup, pod, protocol, port and mode, in place: a flood costs no work
 * in user space, and a few nanoseconds per packet while its packets are from one source.
 */
#ifndef PODGATE_DROP_SOURCES_H
#define PODGATE_DROP_SOURCES_H

ALWAYS_INLINE void count_lost_source(void)
{
	__u32 only = 0;
	__u64 *lost = drop_src_lost.lookup(&only);

	if (lost)
		__sync_fetch_and_add(lost, 1);
}

/* Adds packets to a source; false if it has no entry. */
ALWAYS_INLINE bool add_to_source(struct drop_source_key *key, __u64 packets, __u64 last_ns)
{
	struct drop_source *source = drop_sources.lookup(key);

	if (!source)
		return false;
	source->last_ns = last_ns;
	__sync_fetch_and_add(&source->count, packets);
	return true;
}

/* Takes one entry of a cgroup's share; false if the share is used up. */
ALWAYS_INLINE bool take_share(__u64 cgroup)
{
	__u32 *entries = source_cgroups.lookup(&cgroup);
	__u32 first = 1;

	if (!entries) {
		source_cgroups.insert(&cgroup, &first);
		return true;
	}
	if (*entries >= CGROUP_SOURCES)
		return false;
	__sync_fetch_and_add(entries, 1);
	return true;
}

/*
 * Counts one packet, or rejected call, of a source. Once its cgroup's share is used up the source
 * is the cgroup with MANY_PORTS, also in *key.
 *
 * has_task: the running task may be the source. A retransmission is sent in the task that the timer
 * interrupted, so the cgroups are compared.
 */
ALWAYS_INLINE void record_drop_source(struct drop_source_key *key, bool has_task, __u64 now_ns)
{
	struct drop_source source = {.first_ns = now_ns, .last_ns = now_ns, .count = 1};

	if (add_to_source(key, 1, now_ns))
		return;
	if (!take_share(key->cgroup) && key->port != MANY_PORTS) {
		key->port = MANY_PORTS;
		if (add_to_source(key, 1, now_ns))
			return;
	}
	if (has_task && key->cgroup && bpf_get_current_cgroup_id() == key->cgroup)
		bpf_get_current_comm(&source.process_name, sizeof(source.process_name));
	/* Another CPU may have been faster. */
	if (drop_sources.insert(key, &source) && !add_to_source(key, 1, now_ns))
		count_lost_source();
}

ALWAYS_INLINE bool is_same_source(struct drop_source_key *left, struct drop_source_key *right)
{
	__u64 *a = (__u64 *)left, *b = (__u64 *)right;

	return a[0] == b[0] && a[1] == b[1];
}

/*
 * The same for a packet of a tc program. No other tc program runs on this CPU at the same time, so
 * the CPU's recent source needs no atomic operations.
 */
ALWAYS_INLINE void record_packet_source(struct drop_source_key *key, __u64 now_ns)
{
	__u32 only = 0;
	struct recent_source *recent = recent_source.lookup(&only);

	if (!recent)
		return;
	if (is_same_source(&recent->key, key) &&
	    age_ns(now_ns, recent->since_ns) < RECENT_SOURCE_NS) {
		recent->last_ns = now_ns;
		recent->packets++;
		return;
	}
	/* Without an entry user space has deleted it, with the pod. */
	if (recent->packets)
		add_to_source(&recent->key, recent->packets, recent->last_ns);
	record_drop_source(key, HAS_CURRENT_TASK, now_ns);
	recent->key = *key;
	recent->since_ns = now_ns;
	recent->packets = 0;
}

#endif
