/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Learning who would need a rule: one entry for each sender, pod, protocol and port, counted in
 * place. A flood costs one lookup a packet and no reader's time.
 */
#ifndef PODGATE_CALLERS_H
#define PODGATE_CALLERS_H

ALWAYS_INLINE void count_lost_caller(void)
{
	__u32 only = 0;
	__u64 *lost = callers_lost.lookup(&only);

	if (lost)
		(*lost)++;
}

/*
 * has_task: the running task is the sender, or may be (a retransmission leaves in whatever task the
 * timer interrupted), so that its cgroup tells.
 */
ALWAYS_INLINE void note_caller(struct caller_key *key, bool has_task, __u64 now_ns)
{
	struct caller *known = callers.lookup(key);

	if (known) {
		known->last_ns = now_ns;
		__sync_fetch_and_add(&known->count, 1);
		return;
	}

	struct caller caller = {.first_ns = now_ns, .last_ns = now_ns, .count = 1};

	if (has_task && key->cgroup && bpf_get_current_cgroup_id() == key->cgroup)
		bpf_get_current_comm(&caller.name, sizeof(caller.name));
	if (callers.insert(key, &caller))
		count_lost_caller();
}

#endif
