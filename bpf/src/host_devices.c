/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Each of these stamps what the host made (origin.h): tc egress on devices of the host by which its
 * packets can come in again, or can reach a pod by another way than its gate's interface; and tc
 * ingress on tuns.
 */

/* Stamps what the host made; whether it comes from a socket, which can be evaluated here. */
ALWAYS_INLINE bool has_host_socket(struct __sk_buff *skb, struct packet *packet)
{
	if (!is_host_sent(skb))
		return false;
	load_socket(skb, packet);
	if (!packet->has_socket)
		restore_stamp(skb);
	if (!is_stamped(skb) && !has_no_origin(skb))
		stamp_origin(skb, packet);
	return packet->has_socket && !skb->ingress_ifindex;
}

/*
 * A process writes a packet in the name of an enforced pod, which it counts as dropped: the host
 * itself would answer it to the pod, with an error about a closed port or an exceeded time, which
 * quotes bytes of the process and ends connections of the pod.
 */
ALWAYS_INLINE bool is_in_name_of_pod(struct __sk_buff *skb, struct packet *packet)
{
	struct gate *gate;

	if (!is_hand_made(skb, packet))
		return false;
	gate = enforcing_gate(addresses.lookup(&packet->source));
	if (!gate)
		return false;
	packet->gate_ifindex = gate->ifindex;
	packet->gate_slot = gate->slot;
	count_drop(skb, packet, DROP(REASON_NODE));
	return true;
}

/*
 * A packet to a pod still has its socket here, and loses it further on: what comes in again by a
 * pair has none, nor have copies of a bridge that has not learnt the pod's port. So packets that
 * the pod's gate would drop are dropped here, and admitted ones get another stamp. The gate counts
 * what passes. It also drops path tests, which are to show that packets reach it.
 */
ALWAYS_INLINE int evaluate_on_device(struct __sk_buff *skb, struct packet *packet,
				     bool is_rewritten)
{
	struct gate *gate;
	__u64 verdict_slot;
	__u32 *ifindex;

	if (is_in_name_of_pod(skb, packet))
		return TCX_DROP;
	ifindex = addresses.lookup(&packet->destination);
	if (!ifindex)
		return TCX_NEXT;
	gate = enforcing_gate(ifindex);
	if (!gate)
		return TCX_NEXT;
	packet->gate_ifindex = gate->ifindex;
	packet->gate_slot = gate->slot;
	verdict_slot = is_rewritten ? DROP(REASON_UNPARSABLE) : evaluate_packet(skb, &gate, packet);
	if (verdict_slot == DROP(REASON_PATH_TEST))
		return TCX_NEXT;
	if (verdict_slot >= DROP(0)) {
		count_drop(skb, packet, verdict_slot);
		return TCX_DROP;
	}
	/* An uplink's packets have no stamp. */
	if (verdict_slot == PASS(REASON_RULE) && is_stamped(skb))
		stamp(skb, ADMITTED_RULE);
	if (verdict_slot == PASS(REASON_PROBE) && is_stamped(skb))
		stamp(skb, ADMITTED_PROBE);
	if ((verdict_slot == PASS(REASON_UNIDENTIFIED) || verdict_slot == PASS(REASON_STALE)) &&
	    is_stamped(skb))
		stamp(skb, ADMITTED_UNIDENTIFIED);
	return TCX_NEXT;
}

ALWAYS_INLINE bool is_any_pod_enforced(void)
{
	__u32 only = 0;
	struct config *node = config.lookup(&only);

	return node && node->has_enforced;
}

/* What no gate counts. */
ALWAYS_INLINE int drop_for_node(struct __sk_buff *skb, struct packet *packet, enum reason reason)
{
	__u32 only = 0;
	struct config *node = config.lookup(&only);

	if (!node || is_dead_man_expired(node, packet_time_ns(packet)))
		return TCX_NEXT;
	count_host_drop(reason);
	emit_drop_event(skb, packet, DROP(reason));
	return TCX_DROP;
}

/*
 * On bridges of pods that are enforced. The bridge itself separates VLANs, so the tag of a VLAN
 * interface on it is no reason to leave a frame unread. What a packet socket sends and no gate
 * could read is dropped: where a port removes tags, copies would arrive without them.
 */
int bridge_gate(struct __sk_buff *skb)
{
	struct packet packet = {};
	bool is_packet_socket, is_rewritten;
	enum reason unread;

	if (!has_host_socket(skb, &packet))
		return TCX_NEXT;
	is_packet_socket = is_from_packet_socket(&packet);
	is_rewritten = is_packet_socket && is_checksum_pending(skb);
	unread = read_frame(skb, &packet);
	if (unread == REASON_COUNT)
		return evaluate_on_device(skb, &packet, is_rewritten);
	if (unread == REASON_UNPARSABLE ? is_packet_socket : is_rewritten)
		return drop_for_node(skb, &packet, REASON_UNPARSABLE);
	return TCX_NEXT;
}

/*
 * What the pod's gate would drop as unparsable is dropped here, too: it may come in again without
 * its tags, or without a stamp. has_ethernet, may_leave: constants; the latter: another machine may
 * send the packet back. What a process writes to the node itself is dropped then, while a pod is
 * enforced: the node might translate it to a pod's address when it comes in, or unwrap it. Not what
 * a virtual machine writes to a macvtap, which talks to its host that way.
 */
ALWAYS_INLINE int evaluate_frame(struct __sk_buff *skb, struct packet *packet, bool has_ethernet,
				 bool may_leave)
{
	bool is_rewritten = is_from_packet_socket(packet) && is_checksum_pending(skb);
	enum reason unread = has_ethernet ? read_frame(skb, packet) : read_bare_packet(skb, packet);

	if (unread == REASON_ARP)
		return TCX_NEXT;
	if (unread == REASON_UNPARSABLE) {
		if (has_ethernet)
			read_tagged_addresses(skb, packet);
		is_rewritten = true;
	}
	if (may_leave && packet->socket_family == AF_PACKET &&
	    is_listed_as_own(&packet->destination) && is_any_pod_enforced())
		return drop_for_node(skb, packet, REASON_NODE);
	return evaluate_on_device(skb, packet, is_rewritten);
}

/*
 * On the loopback, and on interfaces of pods without a gate, which may forward. What a process
 * has written header by header comes in again as if forwarded, or has the pod write an error about
 * it: a fragment may be put together with another pod's, by connection tracking.
 */
int hand_made_gate(struct __sk_buff *skb)
{
	struct packet packet = {};

	if (has_host_socket(skb, &packet) && is_hand_made(skb, &packet))
		return evaluate_frame(skb, &packet, true, false);
	return TCX_NEXT;
}

/* has_ethernet: a constant. */
ALWAYS_INLINE int guard_device(struct __sk_buff *skb, bool has_ethernet)
{
	struct packet packet = {};
	int action = TCX_NEXT;

	if (has_host_socket(skb, &packet))
		action = evaluate_frame(skb, &packet, has_ethernet, true);
	keep_stamp(skb);
	return action;
}

/* On other bridges, veth pairs within the host, macvlan, switches, tunnels and the like. */
int device_gate(struct __sk_buff *skb)
{
	return guard_device(skb, true);
}

/*
 * On devices without Ethernet: WireGuard, PPP, IP tunnels, tuns by which the node reaches others.
 * The other end may send a packet back, as one of another host.
 */
int bare_device_gate(struct __sk_buff *skb)
{
	return guard_device(skb, false);
}

/*
 * On uplinks: a router may send a packet back as one of another host. No stamp leaves by them: if
 * the node is a container, the next one has the same kernel, and its gates would take the packet
 * as their own host's.
 */
int uplink_gate(struct __sk_buff *skb)
{
	struct packet packet = {};

	if (is_stamped(skb))
		stamp(skb, 0);
	if ((stamp_in_priority(skb) & STAMP_MASK) == STAMP_HAND_MADE && has_ovs())
		clear_stamp_in_priority(skb);
	if (skb->ingress_ifindex)
		return TCX_NEXT;
	load_socket(skb, &packet);
	return packet.has_socket ? evaluate_frame(skb, &packet, true, true) : TCX_NEXT;
}

/* Whether the node sends packets to this packet's source by the interface it came in by. */
ALWAYS_INLINE bool is_source_behind(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex;
	struct bpf_fib_lookup route = {.ifindex = ifindex};
	long unread, found;

	if (skb->protocol == bpf_htons(ETHERTYPE_IPV4)) {
		route.family = AF_INET;
		unread = bpf_skb_load_bytes_relative(skb, IPV4_SOURCE_OFFSET, &route.ipv4_dst,
						     sizeof(route.ipv4_dst), BPF_HDR_START_NET);
	} else {
		route.family = AF_INET6;
		unread = bpf_skb_load_bytes_relative(skb, IPV6_SOURCE_OFFSET, route.ipv6_dst,
						     sizeof(route.ipv6_dst), BPF_HDR_START_NET);
	}
	if (unread)
		return false;
	found = bpf_fib_lookup(skb, &route, sizeof(route), 0);
	return (found == BPF_FIB_LKUP_RET_SUCCESS || found == BPF_FIB_LKUP_RET_NO_NEIGH ||
		found == BPF_FIB_LKUP_RET_FRAG_NEEDED) &&
	       route.ifindex == ifindex;
}

/*
 * tc ingress on tuns whose packets count as the host's. A process writes them, and may do so in the
 * name of hosts that the node reaches by the tun, such as a VPN's other end. What has another
 * source counts as written header by header. A frame with a VLAN tag comes in by another interface,
 * which has no program.
 */
int stamp_spoofed(struct __sk_buff *skb)
{
	bool is_ip = skb->protocol == bpf_htons(ETHERTYPE_IPV4) ||
		     skb->protocol == bpf_htons(ETHERTYPE_IPV6);

	if (is_ip && !skb->vlan_present && !is_source_behind(skb))
		stamp(skb, STAMP_HAND_MADE);
	return TCX_NEXT;
}
