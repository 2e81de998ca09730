/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Reply tables. A pod sends a DNS query to a server on the host; the reply must pass. TCP's flags
 * mark replies, so every flow of another protocol is recorded in a direct-mapped table of the pod's
 * own. A flow can be evicted by a newer flow of the same pod only.
 *
 * The peer is the address that the pod sent to: replies from a virtual IP that is translated to a
 * host process have the virtual IP as source.
 */
#ifndef PODGATE_REPLIES_H
#define PODGATE_REPLIES_H

#define ICMP_ECHO_REPLY	    0
#define ICMP_ECHO_REQUEST   8
#define ICMPV6_ECHO_REQUEST 128
#define ICMPV6_ECHO_REPLY   129

struct transport {
	__be16 source_port;
	__be16 destination_port;
};

struct echo {
	__u8 type;
	__u8 code;
	__sum16 checksum;
	__be16 identifier;
};

ALWAYS_INLINE bool has_ports(__u8 protocol)
{
	return protocol == IPPROTO_UDP || protocol == IPPROTO_TCP || protocol == IPPROTO_SCTP ||
	       protocol == IPPROTO_UDPLITE || protocol == IPPROTO_DCCP;
}

ALWAYS_INLINE bool is_icmp(struct packet *packet)
{
	return packet->protocol == (packet->is_ipv4 ? IPPROTO_ICMP : IPPROTO_ICMPV6);
}

/* Multicast, and IPv4's limited broadcast: replies come from other addresses. */
ALWAYS_INLINE bool is_group(struct packet *packet)
{
	__u32 last = bpf_ntohl(packet->destination.word[3]);

	if (packet->is_ipv4)
		return last >> 28 == 0xe || last == 0xffffffff;
	return bpf_ntohl(packet->destination.word[0]) >> 24 == 0xff;
}

ALWAYS_INLINE bool is_same_flow(struct flow *left, struct flow *right)
{
	__u64 *a = (__u64 *)left, *b = (__u64 *)right;

	return a[0] == b[0] && a[1] == b[1] && a[2] == b[2] && a[3] == b[3] && a[4] == b[4];
}

/* Only the pod itself fills its table, so the hash need not resist attacks. */
ALWAYS_INLINE struct reply_slot *slot_of(void *table, struct flow *flow)
{
	__u64 *word = (__u64 *)flow;
	__u64 hash = 0;
	__u32 index;

	for (int i = 0; i < sizeof(*flow) / sizeof(*word); i++)
		hash = (hash ^ word[i]) * 0x9e3779b97f4a7c15ULL;
	index = (hash >> 32) & (REPLY_SLOTS - 1);
	return bpf_map_lookup_elem(table, &index);
}

/*
 * Ports of UDP and similar protocols; of an ICMP echo of the given type its identifier twice, since
 * request and reply have the same one; 0 for other protocols. False for other ICMP types.
 */
ALWAYS_INLINE bool read_ports(struct __sk_buff *skb, struct packet *packet, __u8 echo_type,
			      struct transport *ports)
{
	struct echo echo;

	if (has_ports(packet->protocol))
		return !bpf_skb_load_bytes(skb, packet->transport_offset, ports, sizeof(*ports));
	if (!is_icmp(packet))
		return true;
	if (bpf_skb_load_bytes(skb, packet->transport_offset, &echo, sizeof(echo)) ||
	    echo.type != echo_type)
		return false;
	ports->source_port = echo.identifier;
	ports->destination_port = echo.identifier;
	return true;
}

/* The flow of a packet from the pod; false if it can have no reply. */
ALWAYS_INLINE bool parse_pod_flow(struct __sk_buff *skb, struct packet *packet, struct flow *flow)
{
	__u8 request = packet->is_ipv4 ? ICMP_ECHO_REQUEST : ICMPV6_ECHO_REQUEST;
	struct transport ports = {};

	if (!read_ports(skb, packet, request, &ports))
		return false;
	flow->protocol = packet->protocol;
	flow->pod = packet->source;
	flow->pod_port = ports.source_port;
	flow->peer_port = ports.destination_port;
	if (!is_group(packet))
		flow->peer = packet->destination;
	return true;
}

/* The flow that a packet to the pod would be a reply to; false if its kind is no reply. */
ALWAYS_INLINE bool parse_reply_flow(struct __sk_buff *skb, struct packet *packet, struct flow *flow)
{
	__u8 reply = packet->is_ipv4 ? ICMP_ECHO_REPLY : ICMPV6_ECHO_REPLY;
	struct transport ports = {};

	if (!read_ports(skb, packet, reply, &ports))
		return false;
	flow->protocol = packet->protocol;
	flow->pod = packet->destination;
	flow->pod_port = ports.destination_port;
	flow->peer = packet->source;
	flow->peer_port = ports.source_port;
	return true;
}

ALWAYS_INLINE bool is_recorded(void *table, struct flow *flow, __u64 now_ns)
{
	struct reply_slot *slot = slot_of(table, flow);

	return slot && is_same_flow(&slot->flow, flow) &&
	       age_ns(now_ns, slot->sent_ns) < REPLY_LIFETIME_NS;
}

/* Whether a host-sent packet is a reply to a flow of the pod to this address, or to a group. */
ALWAYS_INLINE bool is_reply(struct __sk_buff *skb, struct packet *packet, __u64 now_ns)
{
	struct flow flow = {};
	void *table;

	table = replies.lookup(&packet->gate_ifindex);
	if (!table || !parse_reply_flow(skb, packet, &flow))
		return false;
	if (is_recorded(table, &flow, now_ns))
		return true;
	flow.peer = (struct address){};
	return is_recorded(table, &flow, now_ns);
}

ALWAYS_INLINE void record_flow(void *table, struct flow *flow)
{
	struct reply_slot *slot = slot_of(table, flow);

	if (!slot)
		return;
	if (!is_same_flow(&slot->flow, flow))
		slot->flow = *flow;
	slot->sent_ns = read_clock_ns();
}

#endif
