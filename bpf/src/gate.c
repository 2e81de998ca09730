/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The gate: tc egress on the node's side of a pod's interface, so every packet towards the pod;
 * and tc ingress on the same interface, which only remembers what the pod asks.
 *
 * Only what the node sent is judged. Whatever was forwarded belongs to NetworkPolicy and leaves
 * after two loads and a compare. A pass is TCX_NEXT, which clsact reads as TC_ACT_UNSPEC: programs
 * of the CNI that come after still have their say.
 */
#define TCX_NEXT (-1)
#define TCX_DROP 2

/*
 * In skb->tc_index, which copies keep: the bridge's program found the sender admitted. No socket
 * option sets that field, and a tc program's class id needs CAP_NET_ADMIN.
 */
#define ADMITTED_RULE  0x7067
#define ADMITTED_PROBE 0x7068

#define TCP_FLAGS_OFFSET 13
#define TCP_MINIMUM	 20
#define TCP_FIN		 0x01
#define TCP_SYN		 0x02
#define TCP_RST		 0x04
#define TCP_ACK		 0x10

/* Verdict and reason in one number, which is also the place in struct counters. */
#define PASS(reason) (VERDICT_PASS * REASON_SLOTS + (reason))
#define DROP(reason) (VERDICT_DROP * REASON_SLOTS + (reason))

/*
 * ingress_ifindex survives routing, bridging and conntrack. It is 0 for what a process or the
 * kernel of the node made, and the loopback for what a packet socket put there. By interfaces in
 * the origin map the node can make its packets come in again (a veth pair within the node, tun,
 * macvlan), so those do not prove that somebody else sent it.
 */
ALWAYS_INLINE bool is_node_sent(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ingress_ifindex;
	__u32 index = ifindex / 64;
	__u64 *word;

	if (ifindex <= LOOPBACK_IFINDEX)
		return true;
	word = origin.lookup(&index);
	return word && (*word >> (ifindex % 64) & 1);
}

ALWAYS_INLINE bool is_for_this_pod(struct gate *gate, struct address *destination)
{
	__u64 is_found = gate->flags & GATE_ANY_ADDRESS;

#pragma clang loop unroll(disable)
	for (int i = 0; i < GATE_ADDRESSES; i++) {
		__u32 *own = gate->addresses[i].word, *to = destination->word;

		if (i >= gate->address_count)
			break;
		is_found |= is_zero((own[0] ^ to[0]) | (own[1] ^ to[1]) | (own[2] ^ to[2]) |
				    (own[3] ^ to[3]));
	}
	return is_found;
}

/* Without a socket and not put into an interface again: the kernel made it by itself. */
ALWAYS_INLINE __u32 refuse(struct __sk_buff *skb, struct packet *packet)
{
	if (packet->is_stray)
		return DROP(REASON_STRAY);
	return skb->sk || skb->ingress_ifindex ? DROP(REASON_NODE) : DROP(REASON_KERNEL);
}

/* The node starts something: a rule may let it, the kubelet may probe, the rest is refused. */
ALWAYS_INLINE __u32 judge_opening(struct __sk_buff *skb, struct gate *gate, struct packet *packet,
				  __u64 now_ns)
{
	struct caller_key caller = {
		.ifindex = packet->gate_ifindex,
		.port = packet->destination_port,
		.protocol = packet->protocol,
	};
	__u32 only = 0;
	struct config *known = config.lookup(&only);
	__u64 found;

	if (!known)
		return refuse(skb, packet);
	/* The bridge's program let it in, and counted the hit. */
	if (skb->tc_index == ADMITTED_RULE)
		return PASS(REASON_RULE);
	if (skb->tc_index == ADMITTED_PROBE)
		return PASS(REASON_PROBE);
	found = find_rule(skb, false, gate, known, packet->protocol, packet->destination_port,
			  now_ns);
	if (found) {
		count_hit(found);
		return found >> 32 == SENDER_KUBELET + 1 ? PASS(REASON_PROBE) : PASS(REASON_RULE);
	}
	if (is_abandoned(known, now_ns))
		return PASS(REASON_DEAD_MAN);
	/* What misses its flow table goes up to ovs-vswitchd, and comes back as the node's own. */
	if (known->has_switch && !skb->sk && !skb->ingress_ifindex && !packet->is_stray)
		return PASS(REASON_SWITCH);
	if (!packet->is_stray) {
		caller.cgroup = sender_cgroup(skb, false);
		note_caller(&caller, HAS_CURRENT_TASK, now_ns);
	}
	return refuse(skb, packet);
}

/*
 * TCP that opens nothing is let through when a TCP socket sent it: the answer of a server on the
 * node to a pod's connection. Without a socket it may be a flooded copy of such an answer, or the
 * kernel's own RST. A raw or packet socket could put data into a connection between two pods, so
 * from there only what carries none: the kernel answers for closed ports and TIME-WAIT through a
 * raw socket of its own (tcp_v4_send_reset, tcp_v4_send_ack). What came in by the loopback was put
 * there by a packet socket: the kernel routes nothing of its own that way.
 */
ALWAYS_INLINE __u32 judge_tcp(struct __sk_buff *skb, struct gate *gate, struct packet *packet,
			      __u64 now_ns)
{
	struct bpf_sock *sk = skb->sk;
	__u8 header[TCP_FLAGS_OFFSET + 1];
	__u32 header_length;
	bool is_empty;
	__u8 flags;

	if (packet->is_fragment)
		return DROP(REASON_FRAGMENT);
	if (bpf_skb_load_bytes(skb, packet->transport_offset, header, sizeof(header)))
		return DROP(REASON_UNPARSABLE);
	flags = header[TCP_FLAGS_OFFSET];
	header_length = (header[TCP_FLAGS_OFFSET - 1] >> 4) * 4;
	if (header_length < TCP_MINIMUM)
		return DROP(REASON_UNPARSABLE);

	packet->source_port = header[0] << 8 | header[1];
	packet->destination_port = header[2] << 8 | header[3];
	/* By mask: a SYN opens a connection whatever else it carries (PSH, URG, ECN bits). */
	if ((flags & (TCP_SYN | TCP_ACK)) == TCP_SYN) {
		/* Nobody can listen there (bind(2) takes it for "any"), so nobody is let in. */
		if (!packet->destination_port && !packet->is_stray)
			return DROP(REASON_SELF_TEST);
		return judge_opening(skb, gate, packet, now_ns);
	}
	if (sk) {
		sk = bpf_sk_fullsock(sk);
		/* Request and TIME-WAIT sockets are no full ones, and only TCP has them. */
		if (!sk || (sk->type == SOCK_STREAM && sk->protocol == IPPROTO_TCP))
			return PASS(REASON_ESTABLISHED);
	} else if (skb->ingress_ifindex != LOOPBACK_IFINDEX) {
		return PASS(REASON_ESTABLISHED);
	}
	is_empty = packet->transport_length == header_length;
	if (flags & TCP_RST || (is_empty && (flags & (TCP_SYN | TCP_FIN | TCP_ACK)) == TCP_ACK))
		return PASS(REASON_ESTABLISHED);
	return DROP(REASON_NODE);
}

/*
 * A UDP socket of the node answers with a UDP socket; who forges an answer writes it by a raw or
 * packet socket. Echo replies are the kernel's, from a raw socket of its own.
 */
ALWAYS_INLINE bool is_forged(struct __sk_buff *skb, __u8 protocol)
{
	struct bpf_sock *sk = skb->sk;

	if (!sk || (protocol != IPPROTO_UDP && protocol != IPPROTO_UDPLITE))
		return false;
	sk = bpf_sk_fullsock(sk);
	return sk && (sk->type != SOCK_DGRAM || sk->protocol != protocol);
}

/* UDP, SCTP, ICMP, ESP, ...: without flags to tell an answer by, so the pod's questions tell. */
ALWAYS_INLINE __u32 judge_other(struct __sk_buff *skb, struct gate *gate, struct packet *packet,
				__u64 now_ns)
{
	struct transport ports = {};

	/* Nothing without its first fragment, and that one was judged. */
	if (packet->is_later_fragment)
		return PASS(REASON_REPLY);
	if (!is_forged(skb, packet->protocol)) {
		if (is_reply(skb, packet, now_ns))
			return PASS(REASON_REPLY);
		if (now_ns < gate->grace_until_ns)
			return PASS(REASON_GRACE);
	}
	if (has_ports(packet->protocol) &&
	    bpf_skb_load_bytes(skb, packet->transport_offset, &ports, sizeof(ports)))
		return DROP(REASON_UNPARSABLE);
	packet->source_port = bpf_ntohs(ports.source_port);
	packet->destination_port = bpf_ntohs(ports.destination_port);
	return judge_opening(skb, gate, packet, now_ns);
}

/* The gate of an interface found in `addresses`, if it refuses anything; else NULL. */
ALWAYS_INLINE struct gate *enforcing_gate(__u32 *ifindex)
{
	struct gate *gate;

	if (!ifindex)
		return 0;
	gate = gates.lookup(ifindex);
	return gate && gate->mode >= MODE_ENFORCE ? gate : 0;
}

/*
 * To an address that is not this pod's: a copy that a bridge flooded. Or a pod in audit forwards,
 * and the node means another pod, by way of this one: then that pod's gate says, since what comes
 * out of this pod counts as forwarded. Answers to what that pod began may well come this way.
 */
ALWAYS_INLINE struct gate *gate_behind(struct gate *gate, struct packet *packet)
{
	packet->is_stray = true;
	return gate->mode >= MODE_ENFORCE ? 0
					  : enforcing_gate(addresses.lookup(&packet->destination));
}

/*
 * A datagram from another pod that conntrack has put together, and that is taken apart again in the
 * slow way: ip6_copy_metadata copies no skb_iif, as IPv4's does. Fragments of the node's own keep
 * their socket (skb_set_owner_w in ip6_fragment), and on bridges they were judged before.
 */
ALWAYS_INLINE bool is_forwarded_fragment(struct __sk_buff *skb, struct packet *packet)
{
	return packet->is_fragment && !packet->is_ipv4 && !skb->sk && !skb->ingress_ifindex;
}

/* What has been read. */
ALWAYS_INLINE __u32 judge_packet(struct __sk_buff *skb, struct gate **gate, struct packet *packet,
				 __u64 now_ns)
{
	if (has_false_checksum(skb, packet))
		return DROP(REASON_UNPARSABLE);
	if (is_link_control(skb, packet))
		return PASS(REASON_CONTROL);
	if (!is_for_this_pod(*gate, &packet->destination)) {
		struct gate *behind = gate_behind(*gate, packet);

		if (!behind)
			return DROP(REASON_STRAY);
		*gate = behind;
	}
	if (is_forwarded_fragment(skb, packet))
		return PASS(REASON_FORWARDED);
	if (is_icmp_error(skb, packet))
		return PASS(REASON_CONTROL);
	if (is_redirect(skb, packet))
		return refuse(skb, packet);
	if (packet->protocol == IPPROTO_TCP)
		return judge_tcp(skb, *gate, packet, now_ns);
	return judge_other(skb, *gate, packet, now_ns);
}

ALWAYS_INLINE __u32 judge(struct __sk_buff *skb, struct gate **gate, struct packet *packet,
			  __u64 now_ns)
{
	enum reason unread;

	if (is_rewritten_later(skb))
		return DROP(REASON_UNPARSABLE);
	unread = read_frame(skb, packet);
	if (unread == REASON_ARP)
		return PASS(REASON_ARP);
	if (unread == REASON_UNPARSABLE)
		return DROP(REASON_UNPARSABLE);
	return judge_packet(skb, gate, packet, now_ns);
}

ALWAYS_INLINE void tell_refusal(struct __sk_buff *skb, struct packet *packet, __u32 judgement,
				__u64 now_ns)
{
	struct event *event;

	if (!may_tell(now_ns))
		return;
	event = events.ringbuf_reserve(sizeof(*event));
	if (!event) {
		count_untold();
		return;
	}
	__builtin_memset(event, 0, sizeof(*event));
	event->at_ns = now_ns;
	event->cgroup = sender_cgroup(skb, false);
	event->source = packet->source;
	event->destination = packet->destination;
	event->ifindex = packet->gate_ifindex;
	event->source_port = packet->source_port;
	event->destination_port = packet->destination_port;
	event->protocol = packet->protocol;
	event->verdict = judgement / REASON_SLOTS;
	event->reason = judgement % REASON_SLOTS;
	if (HAS_CURRENT_TASK)
		name_task(event);
	events.ringbuf_submit(event, 0);
}

/* A flooding bridge's copies are no news: the pod's own gate tells. Nor are self-tests. */
ALWAYS_INLINE void account(struct __sk_buff *skb, struct packet *packet, __u32 judgement,
			   __u64 now_ns)
{
	struct counters *count = counters.lookup(&packet->gate_ifindex);

	if (count && judgement < VERDICT_COUNT * REASON_SLOTS)
		count->packets[judgement]++;
	if (judgement >= DROP(0) && !packet->is_stray &&
	    judgement % REASON_SLOTS != REASON_SELF_TEST)
		tell_refusal(skb, packet, judgement, now_ns);
}

int gate_egress(struct __sk_buff *skb)
{
	struct packet packet = {.gate_ifindex = skb->ifindex};
	struct gate *gate;
	__u32 judgement;
	__u64 now_ns;
	bool is_drop;

	if (!is_node_sent(skb))
		return TCX_NEXT;
	gate = gates.lookup(&packet.gate_ifindex);
	if (!gate || gate->mode == MODE_OFF)
		return TCX_NEXT;

	now_ns = read_clock_ns();
	judgement = judge(skb, &gate, &packet, now_ns);
	is_drop = judgement >= DROP(0);
	if (is_drop && gate->mode == MODE_AUDIT) {
		judgement += (VERDICT_WOULD_DROP - VERDICT_DROP) * REASON_SLOTS;
		is_drop = false;
	}
	account(skb, &packet, judgement, now_ns);
	return is_drop ? TCX_DROP : TCX_NEXT;
}

/*
 * tc ingress on the same interface, so every packet from the pod: remembers what the pod asks.
 * The pod's own lies harm only its own answers.
 */
int gate_ingress(struct __sk_buff *skb)
{
	struct packet packet = {};
	__u32 ifindex = skb->ifindex;
	struct flow flow = {};
	void *table;
	bool is_read;

	if (skb->protocol == bpf_htons(ETHERTYPE_IPV4))
		is_read = read_ipv4(skb, &packet);
	else if (skb->protocol == bpf_htons(ETHERTYPE_IPV6))
		is_read = read_ipv6(skb, &packet);
	else
		return TCX_NEXT;
	if (!is_read || packet.protocol == IPPROTO_TCP || packet.is_later_fragment)
		return TCX_NEXT;
	table = replies.lookup(&ifindex);
	if (table && read_question(skb, &packet, &flow))
		remember(table, &flow);
	return TCX_NEXT;
}
