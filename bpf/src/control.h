/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Control packets: they keep the pod's network working and deliver nothing to applications. From
 * packet and raw sockets of processes they are no control: they could take the pod's traffic
 * elsewhere, and end its connections.
 */
#ifndef PODGATE_CONTROL_H
#define PODGATE_CONTROL_H

#define IPPROTO_IGMP 2

#define ARP_OPERATION_OFFSET (ETHERNET_LENGTH + 6)
#define ARP_REQUEST	     1
#define ARP_REPLY	     2

#define ICMP_REDIRECT	5
#define ICMPV6_REDIRECT 137

/* The type of an ICMP message; -1 for other packets, and for fragments. */
ALWAYS_INLINE int icmp_type(struct __sk_buff *skb, struct packet *packet)
{
	__u8 *type;

	if (packet->protocol != (packet->is_ipv4 ? IPPROTO_ICMP : IPPROTO_ICMPV6) ||
	    packet->is_fragment)
		return -1;
	type = header_at(skb, packet->transport_offset, __u8);
	return type ? *type : -1;
}

/*
 * Membership and neighbour messages go to multicast groups, not to the pod's address, and without
 * them the pod has no network: MLD 130 to 132 and 143, neighbour discovery 133 to 136 (RFC 3810,
 * RFC 4861). Not 137: a redirect would let host processes steer the pod's own traffic.
 */
ALWAYS_INLINE bool is_link_control(struct packet *packet, int type)
{
	if (packet->is_ipv4)
		return packet->protocol == IPPROTO_IGMP;
	return (type >= 130 && type <= 136) || type == 143;
}

/* Linux reads no other operations (arp_process). */
ALWAYS_INLINE bool is_request_or_reply(struct __sk_buff *skb)
{
	__be16 *operation = header_at(skb, ARP_OPERATION_OFFSET, __be16);

	return !operation || *operation == bpf_htons(ARP_REQUEST) ||
	       *operation == bpf_htons(ARP_REPLY);
}

/* Errors about the pod's own packets; path-MTU discovery needs them. Not v4 redirects (5). */
ALWAYS_INLINE bool is_icmp_error(struct packet *packet, int type)
{
	if (packet->is_ipv4)
		return type == 3 || type == 11 || type == 12;
	return type >= 1 && type <= 4;
}

/* A redirect would let host processes steer the pod's own traffic. */
ALWAYS_INLINE bool is_redirect(struct packet *packet, int type)
{
	return type == (packet->is_ipv4 ? ICMP_REDIRECT : ICMPV6_REDIRECT);
}

#endif
