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

/*
 * The TCP header of a SYN, which one byte of most packets decides. A process needs privileges for
 * the IPv6 headers that may precede TCP's, but not for IPv4's options.
 */
ALWAYS_INLINE struct tcp_header *syn_at(struct __sk_buff *skb, struct packet *packet)
{
	struct tcp_header *header;

	if (skb->protocol == bpf_htons(ETHERTYPE_IPV4)) {
		struct ipv4_header *network = header_at(skb, ETHERNET_LENGTH, struct ipv4_header);

		if (!network || network->protocol != IPPROTO_TCP ||
		    network->fragment & bpf_htons(IPV4_OFFSET_MASK))
			return 0;
		packet->is_ipv4 = true;
		packet->transport_offset = ETHERNET_LENGTH + (network->version_length & 0x0f) * 4;
	} else if (skb->protocol == bpf_htons(ETHERTYPE_IPV6)) {
		struct ipv6_header *network = header_at(skb, ETHERNET_LENGTH, struct ipv6_header);

		if (!network || network->next_header != IPPROTO_TCP)
			return 0;
		packet->transport_offset = ETHERNET_LENGTH + sizeof(*network);
	} else {
		return 0;
	}
	header = header_at(skb, packet->transport_offset, struct tcp_header);
	return header && opens_connection(header->flags) ? header : 0;
}

ALWAYS_INLINE void read_hairpin(struct __sk_buff *skb, struct packet *packet,
				struct host_connect *hairpin)
{
	packet->protocol = IPPROTO_TCP;
	packet->hairpin_cgroup = hairpin->cgroup;
	if (packet->is_ipv4) {
		struct ipv4_header *header = header_at(skb, ETHERNET_LENGTH, struct ipv4_header);

		if (header) {
			packet->source = map_ipv4(header->source);
			packet->destination = map_ipv4(header->destination);
		}
	} else {
		struct ipv6_header *header = header_at(skb, ETHERNET_LENGTH, struct ipv6_header);

		if (header) {
			packet->source = header->source;
			packet->destination = header->destination;
		}
	}
}

/*
 * The connect(2) of a host process whose SYN this packet of another sender is; NULL for all else.
 * Of the packet, what a verdict and a drop event need is read.
 */
ALWAYS_INLINE struct host_connect *find_hairpin(struct __sk_buff *skb, struct packet *packet)
{
	struct tcp_header *syn = syn_at(skb, packet);
	struct host_connect *hairpin;
	__be32 sequence;

	if (!syn)
		return 0;
	__builtin_memcpy(&sequence, syn->sequence, sizeof(sequence));
	packet->source_port = bpf_ntohs(syn->source_port);
	packet->destination_port = bpf_ntohs(syn->destination_port);
	hairpin = host_connects.lookup(&sequence);
	if (!hairpin || age_ns(packet_time_ns(packet), hairpin->sent_ns) > HAIRPIN_LIFETIME_NS)
		return 0;
	read_hairpin(skb, packet, hairpin);
	return hairpin;
}

#endif
