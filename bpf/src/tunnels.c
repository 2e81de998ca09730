/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * tc ingress on the loopback, by which the host's packets to itself come in. A host process sends a
 * packet for a pod encapsulated in the protocol of one of the host's tunnels: the kernel would
 * decapsulate it and deliver it as forwarded. Such packets have no other use on the loopback.
 * Attached only where the node has tunnels.
 */
#define IPPROTO_IPIP 4
#define IPPROTO_IPV6 41
#define IPPROTO_GRE  47
#define IPPROTO_L2TP 115

ALWAYS_INLINE bool is_tunnel_port(struct config *node, __u16 port)
{
	__u64 is_found = 0;

#pragma clang loop unroll(disable)
	for (int i = 0; i < TUNNEL_PORTS; i++) {
		if (i >= node->tunnel_port_count)
			break;
		is_found |= is_zero(node->tunnel_ports[i] ^ port);
	}
	return is_found;
}

/* A later fragment is useless without the first one, which has the port. */
ALWAYS_INLINE bool is_encapsulated(struct __sk_buff *skb, struct packet *packet,
				   struct config *node)
{
	struct transport *ports;

	if (packet->protocol == IPPROTO_IPIP || packet->protocol == IPPROTO_IPV6 ||
	    packet->protocol == IPPROTO_GRE || packet->protocol == IPPROTO_L2TP)
		return true;
	if (packet->protocol != IPPROTO_UDP || packet->is_later_fragment)
		return false;
	ports = header_at(skb, packet->transport_offset, struct transport);
	if (!ports)
		return true;
	packet->source_port = bpf_ntohs(ports->source_port);
	packet->destination_port = bpf_ntohs(ports->destination_port);
	return is_tunnel_port(node, packet->destination_port);
}

int tunnel_gate(struct __sk_buff *skb)
{
	struct packet packet = {};
	__u32 only = 0;
	struct config *node = config.lookup(&only);
	enum reason reason = REASON_TUNNEL;
	enum reason unread;

	if (!node)
		return TCX_NEXT;
	/* An unparsable packet may hide an encapsulated one. */
	unread = read_untagged_frame(skb, &packet);
	if (unread == REASON_UNPARSABLE)
		reason = REASON_UNPARSABLE;
	else if (unread == REASON_ARP || !is_encapsulated(skb, &packet, node))
		return TCX_NEXT;
	if (is_dead_man_expired(node, packet_time_ns(&packet)))
		return TCX_NEXT;
	count_host_drop(reason);
	emit_drop_event(skb, &packet, DROP(reason));
	return TCX_DROP;
}
