/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The gate: tc egress on the host side of a pod's interface, which sees every packet to the pod;
 * and tc ingress on the same interface, which records the pod's flows, so that replies can pass.
 *
 * A packet's verdict, in order: gate_egress, evaluate, evaluate_packet, then evaluate_tcp (tcp.h)
 * or evaluate_other; a new flow ends in evaluate_new_flow (new_flow.h).
 *
 * The gate filters host-sent packets only (origin.h), and stamps those that pass, since the pod may
 * forward them. Forwarded traffic is NetworkPolicy's subject and passes after a few loads, but for
 * SYNs that this host has sent and another machine sends back (hairpins.h).
 */

/*
 * A UDP server on the host replies from a UDP socket; a forged reply comes from a raw or packet
 * socket, or in another host's name. Echo replies are the kernel's, from a raw socket of its own.
 * DHCP servers write their offers header by header, since the pod has no address yet; and servers
 * of protocols for which there are only raw sockets (OSPF, GRE) reply in the node's own name.
 */
ALWAYS_INLINE bool is_forged(struct __sk_buff *skb, struct packet *packet)
{
	if (is_dhcp_answer(packet))
		return false;
	if (is_hand_made(skb, packet)) {
		if (!packet->has_full_socket || is_from_packet_socket(packet) ||
		    has_ports(packet->protocol) || is_icmp(packet))
			return true;
	} else if (!packet->has_full_socket) {
		return false;
	} else if ((packet->protocol == IPPROTO_UDP || packet->protocol == IPPROTO_UDPLITE) &&
		   (packet->socket_type != SOCK_DGRAM ||
		    packet->socket_protocol != packet->protocol)) {
		return true;
	}
	return !may_speak(skb, packet, is_hand_made(skb, packet));
}

ALWAYS_INLINE bool is_in_grace(struct gate *gate, struct packet *packet)
{
	return gate->grace_until_ns && !packet->is_elsewhere &&
	       packet_time_ns(packet) < gate->grace_until_ns;
}

/*
 * A datagram from another pod that conntrack reassembled and the kernel fragments again on its slow
 * path: ip6_copy_metadata, unlike IPv4's, does not copy skb_iif. Fragments of the host's own
 * datagrams keep their socket (skb_set_owner_w in ip6_fragment), or have a stamp if they came in
 * again. No TCP stack sends fragments.
 */
ALWAYS_INLINE bool is_forwarded_fragment(struct __sk_buff *skb, struct packet *packet)
{
	return packet->is_fragment && !packet->is_ipv4 && has_no_origin(skb);
}

/*
 * Not TCP: no flag marks a reply, so the pod's reply table decides. type: as of icmp_type.
 */
ALWAYS_INLINE __u64 evaluate_other(struct __sk_buff *skb, struct gate *gate, struct packet *packet,
				   int type)
{
	if (is_forwarded_fragment(skb, packet))
		return PASS(REASON_FORWARDED);
	if (type >= 0) {
		if (is_icmp_error(packet, type) && !is_hand_made(skb, packet))
			return PASS(REASON_CONTROL);
		if (is_redirect(packet, type))
			return drop_reason(skb, packet);
	}
	if (packet->is_later_fragment) {
		if (is_recorded_fragment(skb, packet, packet_time_ns(packet)))
			return PASS(REASON_REPLY);
		return is_in_grace(gate, packet) && !is_hand_made(skb, packet)
			       ? PASS(REASON_GRACE)
			       : DROP(REASON_FRAGMENT);
	}
	if (!is_forged(skb, packet)) {
		if (is_reply(skb, packet))
			return PASS(REASON_REPLY);
		if (is_in_grace(gate, packet))
			return PASS(REASON_GRACE);
	}
	return NEW_FLOW;
}

/* The gate of an interface found in `addresses`, if it drops anything; otherwise NULL. */
ALWAYS_INLINE struct gate *enforcing_gate(__u32 *ifindex)
{
	struct gate *gate;

	if (!ifindex)
		return 0;
	gate = find_gate(*ifindex);
	return gate && gate->mode >= MODE_ENFORCE ? gate : 0;
}

/*
 * The gate that decides on a packet to this address; NULL: none, and the packet is a stray.
 *
 * A packet to an address that is not this pod's is a bridge's flooded copy. Or this pod, in audit,
 * forwards, and the host sends to another pod through it: then that pod's gate decides here, since
 * the packet counts as forwarded when it leaves this pod. Replies to the other pod's connections
 * may take this path.
 */
ALWAYS_INLINE struct gate *gate_for_address(struct gate *gate, struct packet *packet)
{
	bool has_any_address = gate->flags & GATE_ANY_ADDRESS;
	struct gate *owner = 0;

	if (is_listed(gate, &packet->destination))
		return gate;
	if (gate->mode < MODE_ENFORCE)
		owner = enforcing_gate(addresses.lookup(&packet->destination));
	if (!owner && has_any_address)
		return gate;
	packet->is_stray = true;
	return owner;
}

/*
 * A pod may route for clients behind it, whose flows to the host are recorded as its own. So the
 * host's answers to them pass, but no new flow: an address that is no pod's, and a socket, which a
 * bridge's flooded copies lack, and the kernel's RST over IPv6. Or the pod has no address yet, and
 * DHCP offers one.
 */
ALWAYS_INLINE bool may_be_behind_pod(struct packet *packet)
{
	if (is_dhcp_answer(packet))
		return true;
	return (packet->has_socket || packet->protocol == IPPROTO_TCP) &&
	       !addresses.lookup(&packet->destination);
}

/* The verdict on a packet that was parsed. */
ALWAYS_INLINE __u64 evaluate_packet(struct __sk_buff *skb, struct gate **gate,
				    struct packet *packet)
{
	bool is_tcp = packet->protocol == IPPROTO_TCP;
	struct gate *owner = *gate;
	bool is_control = false;
	__u64 verdict_slot;
	int type = -1;

	forget_differences(packet, skb->len);
	if (has_false_checksum(skb, packet, (*gate)->mode == MODE_AUDIT))
		return DROP(REASON_UNPARSABLE);
	if (is_tcp) {
		/* Its ports are read with its flags. */
	} else if (has_ports(packet->protocol)) {
		if (!load_ports(skb, packet))
			return DROP(REASON_UNPARSABLE);
	} else {
		type = icmp_type(skb, packet);
		is_control = packet->is_arp || is_link_control(packet, type);
		if (is_control && !is_hand_made(skb, packet))
			return PASS(REASON_CONTROL);
	}
	type = forget(type, skb->len);
	if (!is_control) {
		owner = gate_for_address(*gate, packet);
		if (!owner && may_be_behind_pod(packet)) {
			packet->is_elsewhere = true;
			owner = *gate;
		}
		if (!owner)
			return DROP(REASON_STRAY);
		*gate = owner;
	}
	verdict_slot =
		is_tcp ? evaluate_tcp(skb, packet) : evaluate_other(skb, owner, packet, type);
	if (verdict_slot == NEW_FLOW)
		verdict_slot = evaluate_new_flow(skb, owner, packet);
	if (packet->is_fragment && !packet->is_later_fragment && verdict_slot < DROP(0) &&
	    verdict_slot != PASS(REASON_FORWARDED))
		record_fragment(skb, packet, packet_time_ns(packet));
	return verdict_slot;
}

ALWAYS_INLINE __u64 evaluate(struct __sk_buff *skb, struct gate **gate, struct packet *packet)
{
	enum reason unread;

	if (is_rewritten_later(skb, packet))
		return DROP(REASON_UNPARSABLE);
	unread = read_frame(skb, packet);
	if (unread == REASON_ARP) {
		if (!is_hand_made(skb, packet) || !is_request_or_reply(skb))
			return PASS(REASON_ARP);
		packet->is_arp = true;
	}
	if (unread == REASON_UNPARSABLE)
		return DROP(REASON_UNPARSABLE);
	return evaluate_packet(skb, gate, packet);
}

/*
 * The gate of this interface, or the fallback: an attached gate without a configuration is one for
 * which a map was full.
 */
ALWAYS_INLINE struct gate *own_gate(__u32 ifindex)
{
	struct gate *gate = find_gate(ifindex);

	return gate ? gate : gate_in_slot(FALLBACK_SLOT);
}

/* The pod may forward the packet. What a program on a host device decided was about this pod. */
ALWAYS_INLINE int pass_stamped(struct __sk_buff *skb, struct packet *packet)
{
	if (!has_no_origin(skb))
		stamp_origin(skb, packet);
	return TCX_NEXT;
}

int gate_egress(struct __sk_buff *skb)
{
	struct packet packet = {.gate_ifindex = skb->ifindex};
	struct host_connect *hairpin = 0;
	struct gate *gate;
	__u64 verdict_slot;
	bool is_audit;

	if (is_host_sent(skb)) {
		load_socket(skb, &packet);
		if (!packet.has_socket)
			restore_stamp(skb);
	} else {
		hairpin = find_hairpin(skb, &packet);
		if (!hairpin)
			return TCX_NEXT;
	}
	gate = own_gate(packet.gate_ifindex);
	if (!gate || gate->mode == MODE_OFF)
		return pass_stamped(skb, &packet);

	packet.gate_slot = gate->slot;
	verdict_slot = hairpin ? evaluate_hairpin(skb, gate, &packet, hairpin)
			       : evaluate(skb, &gate, &packet);
	if (verdict_slot < DROP(0)) {
		count_frequent(packet.gate_slot, verdict_slot);
		return pass_stamped(skb, &packet);
	}
	is_audit = gate->mode == MODE_AUDIT;
	if (is_audit)
		verdict_slot += (VERDICT_WOULD_DROP - VERDICT_DROP) * REASON_SLOTS;
	count_drop(skb, &packet, verdict_slot);
	return is_audit ? pass_stamped(skb, &packet) : TCX_DROP;
}

/*
 * A packet of the host that the pod forwards keeps its stamp, also if a CNI's program returns
 * TCX_PASS. But a pod with CAP_NET_ADMIN gives its packets any stamp by a class id of tc, which
 * the kernel copies to tc_index. So from here on a stamp shows only what a pod gains nothing by:
 * that the host has sent the packet, from an unknown socket.
 */
ALWAYS_INLINE void renew_stamp_of_pod(struct __sk_buff *skb)
{
	if (!is_stamped(skb))
		return;
	stamp(skb, (stamp_of(skb) & STAMP_KIND_MASK) == STAMP_HAND_MADE ? STAMP_HAND_MADE
									: STAMP_UNPROVEN);
	keep_stamp(skb);
}

/* By one byte of the header, since most packets are. Others have more headers before TCP's. */
ALWAYS_INLINE bool is_tcp_from_pod(struct __sk_buff *skb)
{
	bool is_ipv4 = skb->protocol == bpf_htons(ETHERTYPE_IPV4);
	__u8 *protocol =
		(void *)(long)skb->data + (is_ipv4 ? IPV4_PROTOCOL_OFFSET : IPV6_PROTOCOL_OFFSET);

	if ((void *)(protocol + 1) > (void *)(long)skb->data_end)
		return false;
	return *protocol == IPPROTO_TCP;
}

/*
 * tc ingress on the same interface, which sees every packet from the pod: records the pod's flows.
 * A pod that forges its own addresses or ports affects only replies to itself.
 */
int gate_ingress(struct __sk_buff *skb)
{
	struct packet packet = {};
	__u32 ifindex = skb->ifindex;
	struct flow flow = {};
	void *table;
	bool is_read;

	renew_stamp_of_pod(skb);
	if (is_tcp_from_pod(skb))
		return TCX_NEXT;
	if (skb->protocol == bpf_htons(ETHERTYPE_IPV4)) {
		struct ipv4_header *header = header_at(skb, ETHERNET_LENGTH, struct ipv4_header);

		is_read = header && read_ipv4(header, ETHERNET_LENGTH, &packet);
	} else if (skb->protocol == bpf_htons(ETHERTYPE_IPV6)) {
		is_read = read_ipv6(skb, ETHERNET_LENGTH, &packet);
	} else {
		return TCX_NEXT;
	}
	if (!is_read || packet.protocol == IPPROTO_TCP || packet.is_later_fragment)
		return TCX_NEXT;
	table = replies.lookup(&ifindex);
	if (table && parse_pod_flow(skb, &packet, &flow))
		record_flow(table, &flow);
	return TCX_NEXT;
}
