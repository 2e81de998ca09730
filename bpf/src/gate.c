/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The gate: tc egress on the host side of a pod's interface, which sees every packet to the pod;
 * and tc ingress on the same interface, which records the pod's flows, so that replies can pass.
 *
 * A packet's verdict, in order: gate_egress, evaluate, evaluate_packet, then evaluate_tcp (tcp.h)
 * or evaluate_other; a new flow ends in evaluate_new_flow (new_flow.h).
 *
 * The gate filters host-sent packets only (origin.h), and stamps those that pass, since the pod may
 * forward them. Forwarded traffic is NetworkPolicy's subject and passes after three loads.
 */

/*
 * A UDP server on the host replies from a UDP socket; a forged reply comes from a raw or packet
 * socket. Echo replies are the kernel's, from a raw socket of its own.
 */
ALWAYS_INLINE bool is_forged(struct __sk_buff *skb, __u8 protocol)
{
	struct bpf_sock *sk = skb->sk;

	if (!sk || (protocol != IPPROTO_UDP && protocol != IPPROTO_UDPLITE))
		return false;
	sk = bpf_sk_fullsock(sk);
	return sk && (sk->type != SOCK_DGRAM || sk->protocol != protocol);
}

/* Not TCP, and with a transport header: UDP, SCTP, ICMP, ESP, ... */
ALWAYS_INLINE __u32 evaluate_datagram(struct __sk_buff *skb, struct gate *gate,
				      struct packet *packet)
{
	struct transport ports = {};

	if (!is_forged(skb, packet->protocol)) {
		if (is_reply(skb, packet))
			return PASS(REASON_REPLY);
		if (gate->grace_until_ns && packet_time_ns(packet) < gate->grace_until_ns)
			return PASS(REASON_GRACE);
	}
	if (has_ports(packet->protocol) && !read_header(skb, packet->transport_offset, &ports))
		return DROP(REASON_UNPARSABLE);
	packet->source_port = bpf_ntohs(ports.source_port);
	packet->destination_port = bpf_ntohs(ports.destination_port);
	return evaluate_new_flow(skb, gate, packet);
}

/* Not TCP: no flag marks a reply, so the pod's reply table decides. */
ALWAYS_INLINE __u32 evaluate_other(struct __sk_buff *skb, struct gate *gate, struct packet *packet)
{
	__u32 verdict_slot;

	if (packet->is_later_fragment) {
		__u64 now_ns = packet_time_ns(packet);

		if (is_recorded_fragment(skb, packet, now_ns))
			return PASS(REASON_REPLY);
		return now_ns < gate->grace_until_ns ? PASS(REASON_GRACE) : DROP(REASON_FRAGMENT);
	}
	verdict_slot = evaluate_datagram(skb, gate, packet);
	if (packet->is_fragment && verdict_slot < DROP(0))
		record_fragment(skb, packet, packet_time_ns(packet));
	return verdict_slot;
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
 * A datagram from another pod that conntrack reassembled and the kernel fragments again on its slow
 * path: ip6_copy_metadata, unlike IPv4's, does not copy skb_iif. Fragments of the host's own
 * datagrams keep their socket (skb_set_owner_w in ip6_fragment), or have a stamp if they came in
 * again. No TCP stack sends fragments.
 */
ALWAYS_INLINE bool is_forwarded_fragment(struct __sk_buff *skb, struct packet *packet)
{
	return packet->is_fragment && !packet->is_ipv4 && packet->protocol != IPPROTO_TCP &&
	       has_no_origin(skb);
}

/* The verdict on a packet that was parsed. */
ALWAYS_INLINE __u32 evaluate_packet(struct __sk_buff *skb, struct gate **gate,
				    struct packet *packet)
{
	struct gate *owner;

	/* In audit the frame passes, so it must not be trimmed. */
	if ((*gate)->mode != MODE_AUDIT && has_false_checksum(skb, packet))
		return DROP(REASON_UNPARSABLE);
	if (is_link_control(skb, packet))
		return PASS(REASON_CONTROL);
	owner = gate_for_address(*gate, packet);
	if (!owner)
		return DROP(REASON_STRAY);
	*gate = owner;
	if (is_forwarded_fragment(skb, packet))
		return PASS(REASON_FORWARDED);
	if (is_icmp_error(skb, packet))
		return PASS(REASON_CONTROL);
	if (is_redirect(skb, packet))
		return drop_reason(skb, packet);
	if (packet->protocol == IPPROTO_TCP)
		return evaluate_tcp(skb, owner, packet);
	return evaluate_other(skb, owner, packet);
}

ALWAYS_INLINE __u32 evaluate(struct __sk_buff *skb, struct gate **gate, struct packet *packet)
{
	enum reason unread;

	if (is_rewritten_later(skb))
		return DROP(REASON_UNPARSABLE);
	unread = read_frame(skb, packet);
	if (unread == REASON_ARP)
		return PASS(REASON_ARP);
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
ALWAYS_INLINE int pass_stamped(struct __sk_buff *skb)
{
	if (!has_no_origin(skb))
		stamp(skb, STAMP);
	return TCX_NEXT;
}

int gate_egress(struct __sk_buff *skb)
{
	struct packet packet = {.gate_ifindex = skb->ifindex};
	struct gate *gate;
	__u32 verdict_slot;
	bool is_drop;

	if (!is_host_sent(skb))
		return TCX_NEXT;
	gate = own_gate(packet.gate_ifindex);
	if (!gate || gate->mode == MODE_OFF)
		return pass_stamped(skb);

	packet.gate_slot = gate->slot;
	verdict_slot = evaluate(skb, &gate, &packet);
	is_drop = verdict_slot >= DROP(0);
	if (is_drop && gate->mode == MODE_AUDIT) {
		verdict_slot += (VERDICT_WOULD_DROP - VERDICT_DROP) * REASON_SLOTS;
		is_drop = false;
	}
	count_verdict(skb, &packet, verdict_slot);
	return is_drop ? TCX_DROP : pass_stamped(skb);
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

	/* So that a CNI's program that returns TCX_PASS does not remove it. */
	if (is_stamped(skb))
		skb->tc_classid = STAMP;
	if (is_tcp_from_pod(skb))
		return TCX_NEXT;
	if (skb->protocol == bpf_htons(ETHERTYPE_IPV4))
		is_read = read_ipv4(skb, &packet);
	else if (skb->protocol == bpf_htons(ETHERTYPE_IPV6))
		is_read = read_ipv6(skb, &packet);
	else
		return TCX_NEXT;
	if (!is_read || packet.protocol == IPPROTO_TCP || packet.is_later_fragment)
		return TCX_NEXT;
	table = replies.lookup(&ifindex);
	if (table && parse_pod_flow(skb, &packet, &flow))
		record_flow(table, &flow);
	return TCX_NEXT;
}
