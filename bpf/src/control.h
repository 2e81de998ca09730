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

/*
 * Membership and neighbour messages go to multicast groups, not to the pod's address, and without
 * them the pod has no network.
 */
ALWAYS_INLINE bool is_link_control(struct __sk_buff *skb, struct packet *packet)
{
	__u8 type;

	if (packet->is_ipv4)
		return packet->protocol == IPPROTO_IGMP;
	if (packet->protocol != IPPROTO_ICMPV6 || packet->is_fragment ||
	    !read_header(skb, packet->transport_offset, &type))
		return false;
	/* MLD 130 to 132 and 143, neighbour discovery 133 to 136 (RFC 3810, RFC 4861). Not 137:
	 * a redirect would let host processes steer the pod's own traffic. */
	return (type >= 130 && type <= 136) || type == 143;
}

/* Linux reads no other operations (arp_process). */
ALWAYS_INLINE bool is_request_or_reply(struct __sk_buff *skb)
{
	__be16 operation;

	if (bpf_skb_load_bytes(skb, ARP_OPERATION_OFFSET, &operation, sizeof(operation)))
		return true;
	return operation == bpf_htons(ARP_REQUEST) || operation == bpf_htons(ARP_REPLY);
}

/* Errors about the pod's own packets; path-MTU discovery needs them. Not v4 redirects (5). */
ALWAYS_INLINE bool is_icmp_error(struct __sk_buff *skb, struct packet *packet)
{
	__u8 type;

	if (packet->protocol != (packet->is_ipv4 ? IPPROTO_ICMP : IPPROTO_ICMPV6))
		return false;
	if (packet->is_fragment || !read_header(skb, packet->transport_offset, &type))
		return false;
	if (packet->is_ipv4)
		return type == 3 || type == 11 || type == 12;
	return type >= 1 && type <= 4;
}

/* A redirect would let host processes steer the pod's own traffic. */
ALWAYS_INLINE bool is_redirect(struct __sk_buff *skb, struct packet *packet)
{
	__u8 type;

	if (packet->protocol != (packet->is_ipv4 ? IPPROTO_ICMP : IPPROTO_ICMPV6))
		return false;
	if (packet->is_fragment || !read_header(skb, packet->transport_offset, &type))
		return false;
	return type == (packet->is_ipv4 ? ICMP_REDIRECT : ICMPV6_REDIRECT);
}

#endif
