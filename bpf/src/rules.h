/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Matches a gate's rules with the source's cgroup. A gate uses the cgroup of the packet's socket, a
 * hook (skb is NULL; is_hook is a constant for the compiler) that of the running task, since hooks
 * have no helper for a socket's cgroup.
 */
#ifndef PODGATE_RULES_H
#define PODGATE_RULES_H

#include "node_state.h"

ALWAYS_INLINE __u64 source_cgroup(struct __sk_buff *skb, bool is_hook)
{
	if (is_hook)
		return bpf_get_current_cgroup_id();
	return skb->sk ? bpf_skb_cgroup_id(skb) : 0;
}

/* 0 without a socket, which is no cgroup's id. */
ALWAYS_INLINE __u64 source_ancestor(struct __sk_buff *skb, bool is_hook, __u32 level)
{
	return is_hook ? bpf_get_current_ancestor_cgroup_id(level)
		       : bpf_skb_ancestor_cgroup_id(skb, level);
}

/* 0 as well where no level was recorded. */
ALWAYS_INLINE __u64 recorded_ancestor(struct cgroup_ancestors *ancestors, __u32 level)
{
	return level < CONNECT_LEVELS ? ancestors->ids[level & (CONNECT_LEVELS - 1)] : 0;
}

/* Whether there is a cgroup for the kubelet. */
ALWAYS_INLINE bool is_kubelet_identified(struct config *node)
{
	return node->kubelet_cgroup || remade_cgroup(node);
}

/*
 * A healthy pod must not restart because the kubelet is not identified. So while there is no cgroup
 * for it, all processes outside pods may reach the ports that pods declare; with the first one that
 * the agent finds or kubelet.c records, no others may. The same while the agent is missing, if the
 * kernel lacks what kubelet.c needs to follow the kubelet's restarts.
 */
ALWAYS_INLINE bool may_be_kubelet(struct __sk_buff *skb, bool is_hook, struct config *node,
				  __u64 cgroup, __u64 now_ns)
{
	__u64 remade;

	if (!cgroup)
		return false;
	remade = remade_cgroup(node);
	if (cgroup == node->kubelet_cgroup || cgroup == remade)
		return true;
	if ((node->kubelet_cgroup || remade) && (node->kubelet_unit || !is_stale(node, now_ns)))
		return false;
	return !node->pods_cgroup ||
	       source_ancestor(skb, is_hook, node->pods_cgroup_level) != node->pods_cgroup;
}

/*
 * The same for a gate. A relay connects from inside the pod, past what the pod itself rejects from
 * outside (relay.c), so its pair admits the identified kubelet alone.
 */
ALWAYS_INLINE bool may_be_kubelet_at(struct gate *gate, struct __sk_buff *skb, bool is_hook,
				     struct config *node, __u64 cgroup, __u64 now_ns)
{
	if (gate->flags & GATE_IDENTIFIED_KUBELET)
		return is_kubelet_cgroup(node, cgroup);
	return may_be_kubelet(skb, is_hook, node, cgroup, now_ns);
}

/* What rules are compared with. */
struct new_flow {
	__u64 cgroup;
	__u64 source_kinds; /* one bit for each kind that applies, whatever the rule */
	__u16 port;
	__u8 protocol;
};

/*
 * The first of these rules that matches, as find_rule returns it. room: a constant.
 *
 * Arithmetic instead of branches keeps the verifier's work linear in the number of rules. The
 * barrier keeps the comparison with the constant: newer compilers end the loop where an offset
 * equals that of the last rule, and the verifier does not know that it ever does.
 */
ALWAYS_INLINE __u64 match_rules(struct __sk_buff *skb, bool is_hook,
				struct cgroup_ancestors *ancestors, struct new_flow *flow,
				struct rule *rules, __u32 count, int room)
{
	__u64 found = 0;

#pragma clang loop unroll(disable)
	for (__u32 i = 0; i < room; i++) {
		struct rule *rule;
		__u64 ancestor, matching, is_match, candidate;

		asm volatile("" : "+r"(i));
		if (i >= count)
			break;
		rule = &rules[i];
		ancestor = ancestors ? recorded_ancestor(ancestors, rule->level)
				     : source_ancestor(skb, is_hook, rule->level);
		matching = flow->source_kinds |
			   is_zero(rule->cgroup ^ flow->cgroup) << SOURCE_CGROUP |
			   is_zero(rule->cgroup ^ ancestor) << SOURCE_ANCESTOR;
		is_match = matching >> (rule->source_kind & 7) & 1;
		is_match &= is_zero(rule->protocol) | is_zero(rule->protocol ^ flow->protocol);
		/* A difference is negative if the port is outside. */
		is_match &= is_zero(((__u64)flow->port - rule->first_port) >> 63);
		is_match &= is_zero(((__u64)rule->last_port - flow->port) >> 63);
		candidate = (__u64)(rule->source_kind + 1) << 32 | rule->id;
		found |= candidate & -(is_match & is_zero(found));
	}
	return found;
}

/*
 * The first rule that matches: its source kind plus 1 in the upper half and its id in the lower; 0
 * if none matches. ancestors: a hairpin's; a constant NULL for all else; cgroup: the source's;
 * is_kubelet: whether rules for the kubelet match; port: the pod's, host byte order; 0 for
 * protocols without ports.
 */
ALWAYS_INLINE __u64 find_rule(struct __sk_buff *skb, bool is_hook,
			      struct cgroup_ancestors *ancestors, struct gate *gate, __u64 cgroup,
			      bool is_kubelet, __u8 protocol, __u16 port)
{
	struct more_rules_key key;
	struct new_flow flow = {.cgroup = cgroup, .port = port, .protocol = protocol};
	__u64 source_kinds = 1 << SOURCE_ANY;
	struct more_rules *more;
	__u64 found;

	if (!gate->rule_count)
		return 0;
	if (is_kubelet)
		source_kinds |= 1 << SOURCE_KUBELET;
	if (!is_hook && has_no_origin(skb))
		source_kinds |= 1 << SOURCE_KERNEL;

	/* The verifier follows the rules once, and not once for each set of kinds. */
	flow.source_kinds = forget(source_kinds, gate->version);
	found = match_rules(skb, is_hook, ancestors, &flow, gate->rules, gate->rule_count,
			    GATE_FIRST_RULES);
	if (found || gate->rule_count <= GATE_FIRST_RULES)
		return found;
	key.ifindex = gate->ifindex;
	key.version = gate->version;
	more = more_rules.lookup(&key);
	return more ? match_rules(skb, is_hook, ancestors, &flow, more->rules,
				  gate->rule_count - GATE_FIRST_RULES, GATE_MORE_RULES)
		    : 0;
}

ALWAYS_INLINE void count_rule_hit(__u64 found)
{
	__u32 id = found;
	__u64 *hits;

	if (!id)
		return;
	hits = rule_hits.lookup(&id);
	if (hits)
		__sync_fetch_and_add(hits, 1);
}

#endif
