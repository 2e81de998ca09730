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

ALWAYS_INLINE void note_caller(struct __sk_buff *skb, __u8 protocol, __u16 port, __u64 now_ns)
{
	struct caller_key key = {
		.cgroup = skb->sk ? bpf_skb_cgroup_id(skb) : 0,
		.ifindex = skb->ifindex,
		.port = port,
		.protocol = protocol,
	};
	struct caller *known = callers.lookup(&key);
	struct caller caller = {.first_ns = now_ns, .last_ns = now_ns, .count = 1};

	if (known) {
		known->last_ns = now_ns;
		__sync_fetch_and_add(&known->count, 1);
		return;
	}
#ifdef CURRENT_TASK
	/* A retransmission leaves in whatever task the timer interrupted. */
	if (key.cgroup && bpf_get_current_cgroup_id() == key.cgroup)
		bpf_get_current_comm(&caller.name, sizeof(caller.name));
#endif
	if (callers.insert(&key, &caller))
		count_lost_caller();
}

#endif
