/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Who of the node is let in: the rules of this gate against the sending socket's cgroup.
 */
#ifndef PODGATE_RULES_H
#define PODGATE_RULES_H

/*
 * Without a heartbeat nobody follows the kubelet into a new cgroup, and a healthy pod must not
 * restart for that: then every process that is not a pod's may reach what pods declare.
 */
ALWAYS_INLINE bool may_be_kubelet(struct __sk_buff *skb, struct config *known, __u64 cgroup,
				  __u64 now_ns)
{
	if (!cgroup)
		return false;
	if (cgroup == known->kubelet_cgroup)
		return true;
	if (!known->heartbeat_ns || !known->stale_after_ns ||
	    now_ns - known->heartbeat_ns < known->stale_after_ns)
		return false;
	return !known->pods_cgroup ||
	       bpf_skb_ancestor_cgroup_id(skb, known->pods_cgroup_level) != known->pods_cgroup;
}

/* 1 for 0, else 0; without a branch, since the verifier walks both ways of each one. */
ALWAYS_INLINE __u64 is_zero(__u64 value)
{
	return ~(value | -value) >> 63;
}

/*
 * The first rule that matches, as its sender plus 1 in the upper half and its id in the lower; 0
 * if there is none. port: of the pod, host byte order; 0 for protocols without.
 *
 * Arithmetic instead of branches keeps the verifier's work linear in the number of rules.
 */
ALWAYS_INLINE __u64 find_rule(struct __sk_buff *skb, struct gate *gate, struct config *known,
			      __u8 protocol, __u16 port, __u64 now_ns)
{
	__u64 cgroup = skb->sk ? bpf_skb_cgroup_id(skb) : 0;
	__u64 senders = 1 << SENDER_ANY;
	__u64 found = 0;

	if (may_be_kubelet(skb, known, cgroup, now_ns))
		senders |= 1 << SENDER_KUBELET;
	if (!skb->sk && !skb->ingress_ifindex)
		senders |= 1 << SENDER_KERNEL;

#pragma clang loop unroll(disable)
	for (int i = 0; i < GATE_RULES; i++) {
		struct rule *rule = &gate->rules[i];
		__u64 ancestor, matching, is_match, candidate;

		if (i >= gate->rule_count)
			break;
		/* Without a socket it is 0, which is no cgroup's id. */
		ancestor = bpf_skb_ancestor_cgroup_id(skb, rule->level);
		matching = senders | is_zero(rule->cgroup ^ cgroup) << SENDER_CGROUP |
			   is_zero(rule->cgroup ^ ancestor) << SENDER_ANCESTOR;
		is_match = matching >> (rule->sender & 7) & 1;
		is_match &= is_zero(rule->protocol) | is_zero(rule->protocol ^ protocol);
		/* The sign of either difference tells that the port is outside. */
		is_match &= is_zero(((__u64)port - rule->first_port) >> 63);
		is_match &= is_zero(((__u64)rule->last_port - port) >> 63);
		candidate = (__u64)(rule->sender + 1) << 32 | rule->id;
		found |= candidate & -(is_match & is_zero(found));
	}
	return found;
}

ALWAYS_INLINE void count_hit(__u64 found)
{
	__u32 id = found;
	__u64 *hits;

	if (!id)
		return;
	hits = rule_hits.lookup(&id);
	if (hits)
		(*hits)++;
}

/* Whether the agent has been away for so long that nobody can be meant to be held out. */
ALWAYS_INLINE bool is_abandoned(struct config *known, __u64 now_ns)
{
	return known->heartbeat_ns && known->dead_after_ns &&
	       now_ns - known->heartbeat_ns > known->dead_after_ns;
}

#endif
