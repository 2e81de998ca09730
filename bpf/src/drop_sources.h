/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Aggregates drops by source cgroup, pod, protocol and port, in place: a flood costs one map lookup
 * per packet and no work in user space.
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

/*
 * has_task: the running task may be the source. A retransmission is sent in the task that the timer
 * interrupted, so the cgroups are compared.
 */
ALWAYS_INLINE void record_drop_source(struct drop_source_key *key, bool has_task, __u64 now_ns)
{
	struct drop_source *existing = drop_sources.lookup(key);

	if (existing) {
		existing->last_ns = now_ns;
		__sync_fetch_and_add(&existing->count, 1);
		return;
	}

	struct drop_source source = {.first_ns = now_ns, .last_ns = now_ns, .count = 1};

	if (has_task && key->cgroup && bpf_get_current_cgroup_id() == key->cgroup)
		bpf_get_current_comm(&source.process_name, sizeof(source.process_name));
	if (drop_sources.insert(key, &source))
		count_lost_source();
}

#endif
