/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Fragments. Only the first fragment of a datagram has the transport header, so it alone has a
 * verdict of its own. A later one passes if the first one passed and came by the same way from the
 * same socket: otherwise any process with a raw socket could put its bytes into a datagram that
 * others send to the pod. The kernel sends the first fragment first.
 */
#ifndef PODGATE_FRAGMENTS_H
#define PODGATE_FRAGMENTS_H

/* From the start of the IP header. */
#define IPV4_ID_OFFSET 4

/* The identification in a fragment header of IPv6, from the header's end. */
#define IPV6_ID_FROM_END 4

ALWAYS_INLINE bool parse_fragment(struct __sk_buff *skb, struct packet *packet,
				  struct fragment *fragment)
{
	__be32 *id6;
	__be16 *id4;

	fragment->source = packet->source;
	fragment->destination = packet->destination;
	fragment->socket = bpf_get_socket_cookie(skb);
	fragment->ingress_ifindex = skb->ingress_ifindex;
	fragment->protocol = packet->protocol;
	if (packet->is_ipv4) {
		id4 = header_at(skb, packet->network_offset + IPV4_ID_OFFSET, __be16);
		if (id4)
			fragment->id = *id4;
		return id4;
	}
	id6 = header_at(skb, packet->transport_offset - IPV6_ID_FROM_END, __be32);
	if (id6)
		fragment->id = *id6;
	return id6;
}

/* A first fragment has passed. */
ALWAYS_INLINE void record_fragment(struct __sk_buff *skb, struct packet *packet, __u64 now_ns)
{
	struct fragment fragment = {};

	if (parse_fragment(skb, packet, &fragment))
		fragments.update(&fragment, &now_ns);
}

/* Whether the first fragment of this later one's datagram has passed. */
ALWAYS_INLINE bool is_recorded_fragment(struct __sk_buff *skb, struct packet *packet, __u64 now_ns)
{
	struct fragment fragment = {};
	__u64 *passed_ns;

	if (!parse_fragment(skb, packet, &fragment))
		return false;
	passed_ns = fragments.lookup(&fragment);
	return passed_ns && age_ns(now_ns, *passed_ns) < FRAGMENT_LIFETIME_NS;
}

#endif
