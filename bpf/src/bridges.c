/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * tc egress on a bridge that pods' interfaces belong to: what the node sends by way of the bridge,
 * still with its socket. A bridge that does not know the pod's port yet floods copies, and copies
 * have no socket: so whom a rule lets in is told apart here, by a mark that the copies keep. Judges
 * nothing and counts nothing; the pod's gate does.
 */
int admit_on_bridge(struct __sk_buff *skb)
{
	struct packet packet = {};
	struct transport ports = {};
	__u32 only = 0;
	struct config *known = config.lookup(&only);
	struct gate *gate;
	__u64 found;

	if (!known || !skb->sk || skb->ingress_ifindex || is_rewritten_later(skb) ||
	    read_frame(skb, &packet) != REASON_COUNT || packet.is_later_fragment)
		return TCX_NEXT;
	gate = enforcing_gate(addresses.lookup(&packet.destination));
	if (!gate)
		return TCX_NEXT;
	if (has_ports(packet.protocol) &&
	    bpf_skb_load_bytes(skb, packet.transport_offset, &ports, sizeof(ports)))
		return TCX_NEXT;
	found = find_rule(skb, false, gate, known, packet.protocol,
			  bpf_ntohs(ports.destination_port), read_clock_ns());
	if (found)
		skb->tc_index = found >> 32 == SENDER_KUBELET + 1 ? ADMITTED_PROBE : ADMITTED_RULE;
	return TCX_NEXT;
}
