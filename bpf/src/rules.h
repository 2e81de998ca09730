/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Who of the node is let in: the rules of a gate against the sender's cgroup. A gate asks for that
 * of the packet's socket, a hook (skb is NULL, and is_hook true for the compiler to choose by) for
 * that of the running task, since there is no helper for a socket's.
 */
#ifndef PODGATE_RULES_H
#define PODGATE_RULES_H

ALWAYS_INLINE __u64 source_cgroup(struct __sk_buff *skb, bool is_hook)
{
	if (is_hook)
		return bpf_get_current_cgroup_id();
	return skb->sk ? bpf_skb_cgroup_id(skb) : 0;
}

/* Without a socket it is 0, which is no cgroup's id. */
ALWAYS_INLINE __u64 source_ancestor(struct __sk_buff *skb, bool is_hook, __u32 level)
{
	return is_hook ? bpf_get_current_ancestor_cgroup_id(level)
		       : bpf_skb_ancestor_cgroup_id(skb, level);
}

/*
 * Without a heartbeat nobody follows the kubelet into a new cgroup, and a healthy pod must not
 * restart for that: then every process that is not a pod's may reach what pods declare.
 */
ALWAYS_INLINE bool may_be_kubelet(struct __sk_buff *skb, bool is_hook, struct config *node,
				  __u64 cgroup, __u64 now_ns)
{
	if (!cgroup)
		return false;
	if (cgroup == node->kubelet_cgroup)
		return true;
	if (!node->heartbeat_ns || !node->stale_after_ns ||
	    age_ns(now_ns, node->heartbeat_ns) < node->stale_after_ns)
		return false;
	return !node->pods_cgroup ||
	       source_ancestor(skb, is_hook, node->pods_cgroup_level) != node->pods_cgroup;
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
ALWAYS_INLINE __u64 find_rule(struct __sk_buff *skb, bool is_hook, struct gate *gate,
			      struct config *node, __u8 protocol, __u16 port, __u64 now_ns)
{
	__u64 cgroup = source_cgroup(skb, is_hook);
	__u64 source_kinds = 1 << SOURCE_ANY;
	__u64 found = 0;

	if (may_be_kubelet(skb, is_hook, node, cgroup, now_ns))
		source_kinds |= 1 << SOURCE_KUBELET;
	if (!is_hook && !skb->sk && !skb->ingress_ifindex)
		source_kinds |= 1 << SOURCE_KERNEL;

#pragma clang loop unroll(disable)
	for (int i = 0; i < GATE_RULES; i++) {
		struct rule *rule = &gate->rules[i];
		__u64 ancestor, matching, is_match, candidate;

		if (i >= gate->rule_count)
			break;
		ancestor = source_ancestor(skb, is_hook, rule->level);
		matching = source_kinds | is_zero(rule->cgroup ^ cgroup) << SOURCE_CGROUP |
			   is_zero(rule->cgroup ^ ancestor) << SOURCE_ANCESTOR;
		is_match = matching >> (rule->source_kind & 7) & 1;
		is_match &= is_zero(rule->protocol) | is_zero(rule->protocol ^ protocol);
		/* The sign of either difference tells that the port is outside. */
		is_match &= is_zero(((__u64)port - rule->first_port) >> 63);
		is_match &= is_zero(((__u64)rule->last_port - port) >> 63);
		candidate = (__u64)(rule->source_kind + 1) << 32 | rule->id;
		found |= candidate & -(is_match & is_zero(found));
	}
	return found;
}

ALWAYS_INLINE void count_rule_hit(__u64 found)
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
ALWAYS_INLINE bool is_dead_man_expired(struct config *node, __u64 now_ns)
{
	return node->heartbeat_ns && node->dead_man_ns &&
	       age_ns(now_ns, node->heartbeat_ns) > node->dead_man_ns;
}

#endif
