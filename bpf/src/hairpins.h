/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Hairpins (RFC 4787, 6): a host process connects to another machine, which translates the
 * destination to a pod of this node: a node port of another node, a load balancer, an external IP.
 * Its SYN arrives as another host's, but with the sequence number that this host chose at random
 * (RFC 6528), since NAT translates addresses and ports only. What ends a connection and opens one
 * of its own, such as a proxy or SYN cookies, is another host.
 */
#ifndef PODGATE_HAIRPINS_H
#define PODGATE_HAIRPINS_H

/* Of who sent a packet; 0: unknown. */
ALWAYS_INLINE __u64 packet_cgroup(struct __sk_buff *skb, struct packet *packet)
{
	return packet->is_hairpin ? packet->hairpin_cgroup : source_cgroup(skb, false);
}

/*
 * Finds a SYN by one byte of most packets. A process needs privileges for the IPv6 headers that may
 * precede TCP's, but not for IPv4's options.
 */
ALWAYS_INLINE struct tcp_header *syn_at(struct __sk_buff *skb)
{
	__u32 offset = ETHERNET_LENGTH + sizeof(struct ipv6_header);
	struct tcp_header *header;

	if (skb->protocol == bpf_htons(ETHERTYPE_IPV4)) {
		struct ipv4_header *network = header_at(skb, ETHERNET_LENGTH, struct ipv4_header);

		if (!network || network->protocol != IPPROTO_TCP ||
		    network->fragment & bpf_htons(IPV4_OFFSET_MASK))
			return 0;
		offset = ETHERNET_LENGTH + (network->version_length & 0x0f) * 4;
	} else if (skb->protocol == bpf_htons(ETHERTYPE_IPV6)) {
		struct ipv6_header *network = header_at(skb, ETHERNET_LENGTH, struct ipv6_header);

		if (!network || network->next_header != IPPROTO_TCP)
			return 0;
	} else {
		return 0;
	}
	header = header_at(skb, offset, struct tcp_header);
	return header && opens_connection(header->flags) ? header : 0;
}

/* Whether this packet of another sender is the SYN of a connection that a host process opens. */
ALWAYS_INLINE bool is_hairpin(struct __sk_buff *skb, struct packet *packet)
{
	struct tcp_header *syn = syn_at(skb);
	struct host_connect *connect;

	if (!syn)
		return false;
	__builtin_memcpy(&packet->sequence, syn->sequence, sizeof(packet->sequence));
	connect = host_connects.lookup(&packet->sequence);
	if (!connect || age_ns(packet_time_ns(packet), connect->sent_ns) > HAIRPIN_LIFETIME_NS)
		return false;
	packet->hairpin_cgroup = connect->cgroup;
	packet->is_hairpin = true;
	return true;
}

#endif
