/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The verdict on a TCP segment to a pod: a SYN is a new flow, all else belongs to a connection.
 */
#ifndef PODGATE_TCP_H
#define PODGATE_TCP_H

/*
 * Whether the kernel could have made the segment without the connection's socket, for a closed port
 * or TIME-WAIT (tcp_v4_send_reset, tcp_v4_send_ack): no payload. What a frame with offloads
 * (PACKET_VNET_HDR) carries is not in its IP header's length.
 */
ALWAYS_INLINE bool is_bare(struct __sk_buff *skb, __u8 flags, bool is_empty)
{
	if (skb->gso_size || skb->gso_segs > 1)
		return false;
	return flags & TCP_RST || (is_empty && (flags & (TCP_SYN | TCP_FIN | TCP_ACK)) == TCP_ACK);
}

/*
 * A pod connects to a server on the host: the server's segments are not SYNs, and pass if a TCP
 * socket sent them. Without a socket such a segment may be a bridge's flooded copy, or the kernel's
 * RST: these pass too, but to clients behind the pod only the latter. A raw or packet socket could
 * inject data into a connection between two pods, or end it, so nothing passes from these but the
 * kernel's own. A packet that came in by the loopback was sent by a packet socket: the kernel
 * routes nothing to pods that way.
 */
ALWAYS_INLINE __u64 evaluate_tcp(struct __sk_buff *skb, struct packet *packet)
{
	struct tcp_header *header;
	__u32 header_length;
	bool is_empty;
	__u8 flags;

	if (packet->is_fragment)
		return DROP(REASON_FRAGMENT);
	header = header_at(skb, packet->transport_offset, struct tcp_header);
	if (!header)
		return DROP(REASON_UNPARSABLE);
	flags = header->flags;
	header_length = (header->data_offset >> 4) * 4;
	if (header_length < TCP_MINIMUM)
		return DROP(REASON_UNPARSABLE);

	packet->source_port = bpf_ntohs(header->source_port);
	packet->destination_port = bpf_ntohs(header->destination_port);
	if (opens_connection(flags)) {
		/* No process can listen on port 0: bind(2) takes it for "any". Path tests use it.
		 */
		if (!packet->destination_port && !packet->is_stray)
			return DROP(REASON_PATH_TEST);
		return NEW_FLOW;
	}
	/* Request and TIME-WAIT sockets are not full sockets, and only TCP has them. */
	if (packet->has_socket &&
	    (!packet->has_full_socket ||
	     (packet->socket_type == SOCK_STREAM && packet->socket_protocol == IPPROTO_TCP))) {
		packet->maker = MAKER_KERNEL;
		return PASS(REASON_ESTABLISHED);
	}
	if (is_hand_made(skb, packet))
		return drop_reason(skb, packet);
	if (!packet->has_socket && skb->ingress_ifindex != LOOPBACK_IFINDEX &&
	    !packet->is_elsewhere)
		return PASS(REASON_ESTABLISHED);
	is_empty = packet->transport_length == header_length;
	return is_bare(skb, flags, is_empty) ? PASS(REASON_ESTABLISHED) : drop_reason(skb, packet);
}

#endif
