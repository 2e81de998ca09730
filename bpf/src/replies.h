/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Reply tables. A pod sends a DNS query to a server on the host; the reply must pass. TCP's flags
 * mark replies, so every flow of another protocol is recorded in a table of the pod's own, by its
 * fingerprint. A flow can be evicted by newer flows of the same pod only, and not by those of a
 * port of it that has many: what the pod answers to its clients is recorded as well, since nothing
 * in a packet shows which side opened it.
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

#define DHCP_SERVER_PORT 67
#define DHCP_CLIENT_PORT 68

#define PACKET_BROADCAST 1

/* 2^64 divided by the golden ratio (Knuth, TAOCP 6.4). */
#define FINGERPRINT_MULTIPLIER 0x9e3779b97f4a7c15ULL
#define FINGERPRINT_PORT_SHIFT 48

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

/*
 * Multicast and broadcast: replies come from other addresses. A broadcast to the subnet is known by
 * its frame's destination, since only the pod knows its subnet's length.
 */
ALWAYS_INLINE bool is_group(struct __sk_buff *skb, struct packet *packet)
{
	__u32 last = bpf_ntohl(packet->destination.word[3]);

	if (skb->pkt_type == PACKET_BROADCAST)
		return true;
	if (packet->is_ipv4)
		return last >> 28 == 0xe || last == 0xffffffff;
	return bpf_ntohl(packet->destination.word[0]) >> 24 == 0xff;
}

ALWAYS_INLINE __u64 mix(__u64 value)
{
	value = (value ^ value >> 32) * FINGERPRINT_MULTIPLIER;
	return value ^ value >> 32;
}

/*
 * The pod's port in the upper 16 bits. The others differ for different flows of the port, unless by
 * a chance of about 2^-47 for a process that does not know the key: NH of UMAC (RFC 4418) with two
 * keys, then mixed.
 */
ALWAYS_INLINE __u64 flow_fingerprint(struct reply_key *key, struct flow *flow)
{
	__u32 *word = (__u32 *)flow, *random = key->words;
	__u64 first = 0, second = 0;

#pragma clang loop unroll(full)
	for (int i = 0; i < sizeof(*flow) / sizeof(*word); i += 2) {
		first += (__u64)(__u32)(word[i] + random[i]) * (__u32)(word[i + 1] + random[i + 1]);
		second += (__u64)(__u32)(word[i] + random[i + 2]) *
			  (__u32)(word[i + 1] + random[i + 3]);
	}
	return (__u64)flow->pod_port << FINGERPRINT_PORT_SHIFT |
	       mix(first + second * FINGERPRINT_MULTIPLIER) >> 16 | 1;
}

/* The sets that may hold the flow: of its port 0 and 1, of the crowd 2 and 3. */
ALWAYS_INLINE struct reply_set *set_of(void *table, __u64 fingerprint, int choice)
{
	__u32 shift = choice & 1 ? 32 : 16, bucket = (fingerprint >> 1) % QUESTION_BUCKETS, index;
	__u64 port = fingerprint >> FINGERPRINT_PORT_SHIFT;

	if (choice < 2)
		index = mix((port * QUESTION_BUCKETS + bucket + 1) * FINGERPRINT_MULTIPLIER) >>
				shift &
			(QUESTION_SETS - 1);
	else
		index = QUESTION_SETS + (fingerprint >> shift & (CROWD_SETS - 1));
	return bpf_map_lookup_elem(table, &index);
}

ALWAYS_INLINE struct reply_slot *find_slot(void *table, __u64 fingerprint)
{
	for (int choice = 0; choice < 4; choice++) {
		struct reply_set *set = set_of(table, fingerprint, choice);

		if (!set)
			return 0;
#pragma clang loop unroll(full)
		for (int i = 0; i < REPLY_WAYS; i++)
			if (set->slots[i].fingerprint == fingerprint)
				return &set->slots[i];
	}
	return 0;
}

/*
 * Ports of UDP and similar protocols; of an ICMP echo of the given type its identifier twice, since
 * request and reply have the same one; 0 for other protocols. False for other ICMP types.
 */
ALWAYS_INLINE bool read_ports(struct __sk_buff *skb, struct packet *packet, __u8 echo_type,
			      struct transport *ports)
{
	struct transport *header;
	struct echo *echo;

	if (has_ports(packet->protocol)) {
		header = header_at(skb, packet->transport_offset, struct transport);
		if (header)
			*ports = *header;
		return header;
	}
	if (!is_icmp(packet))
		return true;
	echo = header_at(skb, packet->transport_offset, struct echo);
	if (!echo || echo->type != echo_type)
		return false;
	ports->source_port = echo->identifier;
	ports->destination_port = echo->identifier;
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
	if (!is_group(skb, packet))
		flow->peer = packet->destination;
	return true;
}

/* Of a protocol with ports; false if they are missing. */
ALWAYS_INLINE bool load_ports(struct __sk_buff *skb, struct packet *packet)
{
	struct transport *ports;

	if (packet->is_later_fragment)
		return true;
	ports = header_at(skb, packet->transport_offset, struct transport);
	if (!ports)
		return false;
	packet->source_port = bpf_ntohs(ports->source_port);
	packet->destination_port = bpf_ntohs(ports->destination_port);
	return true;
}

/*
 * The flow that a packet to the pod, with its ports, would be a reply to; false if its kind is no
 * reply. No host has the address `::`, which in a flow stands for a group.
 */
ALWAYS_INLINE bool parse_reply_flow(struct __sk_buff *skb, struct packet *packet, struct flow *flow)
{
	__u8 reply = packet->is_ipv4 ? ICMP_ECHO_REPLY : ICMPV6_ECHO_REPLY;
	struct transport ports = {bpf_htons(packet->source_port),
				  bpf_htons(packet->destination_port)};

	if (is_icmp(packet) && !read_ports(skb, packet, reply, &ports))
		return false;
	if (is_same_address(&packet->source, &flow->peer))
		return false;
	flow->protocol = packet->protocol;
	flow->pod = packet->destination;
	flow->pod_port = ports.destination_port;
	flow->peer = packet->source;
	flow->peer_port = ports.source_port;
	return true;
}

/* From a DHCP server to a client (RFC 2131), which may have no address yet. */
ALWAYS_INLINE bool is_dhcp_answer(struct packet *packet)
{
	return packet->source_port == DHCP_SERVER_PORT &&
	       packet->destination_port == DHCP_CLIENT_PORT && packet->is_ipv4 &&
	       packet->protocol == IPPROTO_UDP;
}

/* The slot of a flow that had a packet within this time; otherwise NULL. */
ALWAYS_INLINE struct reply_slot *live_slot(void *table, struct flow *flow, __u64 lifetime_ns,
					   __u64 now_ns)
{
	__u32 only = 0;
	struct reply_key *key = reply_key.lookup(&only);
	struct reply_slot *slot;

	if (!key)
		return 0;
	slot = find_slot(table, flow_fingerprint(key, flow));
	return slot && age_ns(now_ns, slot->sent_ns) < lifetime_ns ? slot : 0;
}

/* At a reply. */
ALWAYS_INLINE void renew_flow(struct reply_slot *slot, __u64 now_ns)
{
	__u64 sent_ns = slot->sent_ns;
	__u64 renewal_ns = sent_ns & REPLIED ? REPLY_RENEWAL_NS : FIRST_REPLY_RENEWAL_NS;

	if (age_ns(now_ns, sent_ns) >= renewal_ns)
		slot->sent_ns = now_ns | REPLIED;
	else if (!(sent_ns & REPLIED))
		slot->sent_ns = sent_ns | REPLIED;
}

/*
 * Whether a host-sent packet is a reply to a flow of the pod to this address, or to a group. A
 * server may stream for as long as it likes after one request, unless the request was to a group,
 * or the answer is one of DHCP that a process has written header by header.
 */
ALWAYS_INLINE bool is_reply(struct __sk_buff *skb, struct packet *packet)
{
	bool is_written = is_dhcp_answer(packet) && is_hand_made(skb, packet);
	struct reply_slot *slot;
	struct flow flow = {};
	__u64 now_ns;
	void *table;

	table = replies.lookup(&packet->gate_ifindex);
	if (!table || !parse_reply_flow(skb, packet, &flow))
		return false;
	now_ns = packet_time_ns(packet);
	slot = live_slot(table, &flow, is_written ? GROUP_LIFETIME_NS : REPLY_LIFETIME_NS, now_ns);
	if (slot) {
		if (!is_written)
			renew_flow(slot, now_ns);
		return true;
	}
	flow.peer = (struct address){};
	/* Of those to another address only answers of DHCP pass without a peer. */
	if (packet->is_stray)
		flow.pod = map_ipv4(0);
	return live_slot(table, &flow, GROUP_LIFETIME_NS, now_ns);
}

/* How many live flows of the same port are in the set. */
ALWAYS_INLINE __u64 count_of_port(struct reply_set *set, __u64 fingerprint, __u64 now_ns)
{
	__u64 count = 0;

#pragma clang loop unroll(full)
	for (int i = 0; i < REPLY_WAYS; i++) {
		struct reply_slot *slot = &set->slots[i];
		__u64 is_same =
			is_zero((slot->fingerprint ^ fingerprint) >> FINGERPRINT_PORT_SHIFT);
		/* A difference is negative if the flow is younger. */
		__u64 is_live = (now_ns - slot->sent_ns - REPLY_LIFETIME_NS) >> 63;

		count += slot->fingerprint & is_same & is_live;
	}
	return count;
}

/*
 * The slot for a new flow. A free one has the time 0, and slots are used from the first one on. So
 * the flow takes the one of its two sets that holds fewer, while neither is full. Then it takes the
 * oldest flow's slot.
 */
ALWAYS_INLINE struct reply_slot *oldest_slot(void *table, __u64 fingerprint, __u64 now_ns)
{
	struct reply_set *first = set_of(table, fingerprint, 0);
	struct reply_set *second = set_of(table, fingerprint, 1);
	struct reply_slot *oldest;

	if (!first || !second)
		return 0;
	if (count_of_port(first, fingerprint, now_ns) +
		    count_of_port(second, fingerprint, now_ns) >=
	    PORT_FLOWS) {
		first = set_of(table, fingerprint, 2);
		second = set_of(table, fingerprint, 3);
		if (!first || !second)
			return 0;
	}
	oldest = first->slots;
#pragma clang loop unroll(full)
	for (int i = 0; i < REPLY_WAYS; i++) {
		if (first->slots[i].sent_ns < oldest->sent_ns)
			oldest = &first->slots[i];
		if (second->slots[i].sent_ns < oldest->sent_ns)
			oldest = &second->slots[i];
	}
	return oldest;
}

/*
 * A slot's time is written first: between the two writes another CPU sees an older flow as renewed,
 * and never a newer flow as old. The exact clock shows which flow is oldest: hundreds begin within
 * a tick of the coarse one, and more while a virtual machine's tick is late.
 */
ALWAYS_INLINE void record_flow(void *table, struct flow *flow)
{
	__u32 only = 0;
	struct reply_key *key = reply_key.lookup(&only);
	__u64 fingerprint, now_ns = bpf_ktime_get_ns();
	struct reply_slot *slot;

	if (!key)
		return;
	fingerprint = flow_fingerprint(key, flow);
	slot = find_slot(table, fingerprint);
	if (!slot)
		slot = oldest_slot(table, fingerprint, now_ns);
	if (!slot)
		return;
	*(volatile __u64 *)&slot->sent_ns = now_ns & ~REPLIED;
	*(volatile __u64 *)&slot->fingerprint = fingerprint;
}

#endif
