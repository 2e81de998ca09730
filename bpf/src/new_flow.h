/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The verdict on a new flow from the host to a pod: admitted by a rule, or as a probe of the
 * kubelet, otherwise dropped.
 */
#ifndef PODGATE_NEW_FLOW_H
#define PODGATE_NEW_FLOW_H

ALWAYS_INLINE __u64 drop_reason(struct __sk_buff *skb, struct packet *packet)
{
	if (packet->is_stray)
		return DROP(REASON_STRAY);
	return has_no_origin(skb) ? DROP(REASON_KERNEL) : DROP(REASON_NODE);
}

/* In strict only the relay connects to the pod for the kubelet, from inside the pod's namespace. */
ALWAYS_INLINE bool is_rejected_kubelet(struct __sk_buff *skb, struct gate *gate,
				       struct packet *packet)
{
	if (gate->mode != MODE_STRICT)
		return false;
	return gate->flags & GATE_NO_FALLBACK || bypasses_relay(skb, packet);
}

/* Of a flow that passes as one that may be the kubelet's. */
ALWAYS_INLINE __u64 pass_unidentified(struct config *node)
{
	return is_kubelet_identified(node) ? PASS(REASON_STALE) : PASS(REASON_UNIDENTIFIED);
}

ALWAYS_INLINE __u64 evaluate_new_flow(struct __sk_buff *skb, struct gate *gate,
				      struct packet *packet)
{
	struct drop_source_key source = {
		.ifindex = packet->gate_ifindex,
		.port = packet->destination_port,
		.mode = gate->mode,
	};
	__u32 only = 0;
	struct config *node = config.lookup(&only);
	bool is_kubelet, is_rejected;
	__u64 now_ns, found;

	if (!node || packet->is_elsewhere)
		return drop_reason(skb, packet);
	/* The program on a host device admitted it, and counted the hit. */
	if (skb->tc_index == ADMITTED_RULE)
		return PASS(REASON_RULE);
	if (skb->tc_index == ADMITTED_PROBE)
		return PASS(REASON_PROBE);
	if (skb->tc_index == ADMITTED_UNIDENTIFIED)
		return pass_unidentified(node);
	now_ns = packet_time_ns(packet);
	/* From here on, the verifier follows all protocols, sources and kinds of address as one. */
	packet->protocol = forget(packet->protocol, now_ns);
	packet->is_stray = forget(packet->is_stray, now_ns) & 1;
	source.protocol = packet->protocol;
	source.cgroup = forget(source_cgroup(skb, false), now_ns);
	is_kubelet = may_be_kubelet_at(gate, skb, false, node, source.cgroup, now_ns);
	/* Only the identified kubelet is redirected to the relay. */
	is_rejected = forget(is_kubelet && is_kubelet_cgroup(node, source.cgroup) &&
				     is_rejected_kubelet(skb, gate, packet),
			     now_ns);
	found = find_rule(skb, false, 0, gate, source.cgroup, is_kubelet && !is_rejected,
			  packet->protocol, packet->destination_port);
	if (found) {
		count_rule_hit(found);
		if (found >> 32 != SOURCE_KUBELET + 1)
			return PASS(REASON_RULE);
		return is_kubelet_cgroup(node, source.cgroup) ? PASS(REASON_PROBE)
							      : pass_unidentified(node);
	}
	if (is_dead_man_expired(node, now_ns))
		return PASS(REASON_DEAD_MAN);
	/*
	 * A forwarded packet that misses Open vSwitch's flow table goes up to ovs-vswitchd, which
	 * sends it again: it then looks like the host's own, but has no stamp in its priority.
	 */
	if (node->has_ovs && has_no_origin(skb) && !packet->is_stray)
		return PASS(REASON_SWITCH);
	if (!packet->is_stray)
		record_packet_source(&source, now_ns);
	return is_rejected ? DROP(REASON_STRICT) : drop_reason(skb, packet);
}

/*
 * The same of a hairpin, whose headers are plain. Rules admit no process whose cgroup was displaced
 * by others. A probe may name a load balancer as its host, or another node; in strict the kubelet's
 * own connection is not what begins in the pod's namespace.
 */
ALWAYS_INLINE __u64 evaluate_hairpin(struct __sk_buff *skb, struct gate *gate,
				     struct packet *packet, struct host_connect *hairpin)
{
	struct drop_source_key source = {
		.cgroup = hairpin->cgroup,
		.ifindex = packet->gate_ifindex,
		.port = packet->destination_port,
		.protocol = IPPROTO_TCP,
		.mode = gate->mode,
	};
	__u32 only = 0;
	struct config *node = config.lookup(&only);
	__u64 now_ns = packet_time_ns(packet);
	struct cgroup_ancestors *ancestors;
	bool is_kubelet;
	__u64 found;

	packet->is_stray =
		!is_listed(gate, &packet->destination) && !(gate->flags & GATE_ANY_ADDRESS);
	if (!node || packet->is_stray)
		return DROP(packet->is_stray ? REASON_STRAY : REASON_HAIRPIN);
	is_kubelet = gate->mode != MODE_STRICT && is_kubelet_cgroup(node, source.cgroup);
	ancestors = connect_cgroups.lookup(&source.cgroup);
	found = ancestors ? find_rule(skb, false, ancestors, gate, source.cgroup, is_kubelet,
				      IPPROTO_TCP, source.port)
			  : 0;
	if (found) {
		count_rule_hit(found);
		return found >> 32 == SOURCE_KUBELET + 1 ? PASS(REASON_PROBE) : PASS(REASON_RULE);
	}
	if (is_dead_man_expired(node, now_ns))
		return PASS(REASON_DEAD_MAN);
	record_packet_source(&source, now_ns);
	return DROP(REASON_HAIRPIN);
}

#endif
