/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * tc egress on a bridge with pod interfaces: a host process sends to a pod through the bridge, and
 * the packet still has its socket. A bridge that has not learnt the pod's port floods copies, and
 * copies have no socket: their source is unknown. So packets that the pod's gate would drop are
 * dropped here, and admitted ones get a mark that the copies keep. The gate counts what passes.
 */
int bridge_gate(struct __sk_buff *skb)
{
	struct packet packet = {};
	struct gate *gate;
	bool is_rewritten;
	__u32 verdict_slot;
	__u32 *ifindex;
	__u64 now_ns;

	if (!skb->sk || skb->ingress_ifindex)
		return TCX_NEXT;
	is_rewritten = is_rewritten_later(skb);
	if (read_frame(skb, &packet) != REASON_COUNT)
		return is_rewritten ? TCX_DROP : TCX_NEXT;
	ifindex = addresses.lookup(&packet.destination);
	if (!ifindex)
		return TCX_NEXT;
	gate = enforcing_gate(ifindex);
	if (!gate)
		return TCX_NEXT;
	packet.gate_ifindex = *ifindex;
	now_ns = read_clock_ns();
	verdict_slot = is_rewritten ? DROP(REASON_UNPARSABLE)
				    : evaluate_packet(skb, &gate, &packet, now_ns);
	if (verdict_slot >= DROP(0)) {
		count_verdict(skb, &packet, verdict_slot, now_ns);
		return TCX_DROP;
	}
	if (verdict_slot == PASS(REASON_RULE))
		skb->tc_index = ADMITTED_RULE;
	if (verdict_slot == PASS(REASON_PROBE))
		skb->tc_index = ADMITTED_PROBE;
	return TCX_NEXT;
}
