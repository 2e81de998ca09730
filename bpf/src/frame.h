/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Frames: parsing, and whether the kernel will change the frame after the gate.
 */
#ifndef PODGATE_FRAME_H
#define PODGATE_FRAME_H

#define EINVAL		22
#define CHECKSUM_LENGTH 2

/*
 * A packet socket can leave a checksum to be filled in later (PACKET_VNET_HDR), at bytes that it
 * names. Where the interface does not offload checksums the kernel fills it in after the gate, and
 * those bytes may be the TCP flags or the EtherType: a RST becomes a SYN. The frame that arrives is
 * then not the one that the gate has seen.
 *
 * No field shows a pending checksum, but bpf_l4_csum_replace does not change the bytes if one is
 * pending, so it is tried on the first two bytes of the frame, which are restored.
 */
ALWAYS_INLINE bool is_checksum_pending(struct __sk_buff *skb)
{
	__u16 before, after;

	if (bpf_skb_load_bytes(skb, 0, &before, sizeof(before)) ||
	    bpf_l4_csum_replace(skb, 0, 0, 1, 0) ||
	    bpf_skb_load_bytes(skb, 0, &after, sizeof(after)))
		return true;
	return before == after || bpf_skb_store_bytes(skb, 0, &before, sizeof(before), 0);
}

/* A frame from a packet socket; one that comes in by the loopback has lost its socket. */
ALWAYS_INLINE bool is_rewritten_later(struct __sk_buff *skb, struct packet *packet)
{
	if (packet->has_socket ? !is_from_packet_socket(packet)
			       : skb->ingress_ifindex != LOOPBACK_IFINDEX)
		return false;
	return is_checksum_pending(skb);
}

/* Bytes from the start of the frame to the end of the transport's checksum; 0: it has none. */
ALWAYS_INLINE __u32 checksum_end(struct packet *packet)
{
	if (packet->is_later_fragment)
		return 0;
	if (packet->protocol == IPPROTO_TCP)
		return packet->transport_offset + 18;
	if (packet->protocol == IPPROTO_UDP || packet->protocol == IPPROTO_UDPLITE)
		return packet->transport_offset + 8;
	if (packet->protocol == IPPROTO_SCTP)
		return packet->transport_offset + 12;
	return 0;
}

/*
 * Bytes from the start of the frame to the end of its pending checksum. False: unknown, since the
 * kernel has no BTF, or forbids programs to read its memory (lockdown).
 */
ALWAYS_INLINE bool read_pending_end(struct __sk_buff *skb, __s64 *end)
{
#if HAS_KERNEL_READ
	__u32 only = 0;
	struct buffer_layout *layout = buffer_layout.lookup(&only);
	__u64 buffer = (__u64)skb, head, data;
	__u16 start, offset;

	if (!layout || !layout->csum_start ||
	    !read_kernel(&head, sizeof(head), buffer + layout->head) ||
	    !read_kernel(&data, sizeof(data), buffer + layout->data) ||
	    !read_kernel(&start, sizeof(start), buffer + layout->csum_start) ||
	    !read_kernel(&offset, sizeof(offset), buffer + layout->csum_offset))
		return false;
	*end = (__s64)(head + start + offset + CHECKSUM_LENGTH - data);
	return true;
#else
	return false;
#endif
}

/*
 * A frame that comes in by an injectable interface has lost its socket, too. Its pending checksum
 * must not be before the transport's. Where the kernel does not show the checksum's place, it is
 * found by trimming, except in audit, where the frame passes: kernels do not trim a frame to before
 * the end of its pending checksum (EINVAL), so trimming to one byte before the end of the
 * transport's must fail. A trimmed frame is dropped. Kernels of 2026 (6.1.192: bpf_skb_trim_rcsum)
 * do trim it, and drop every such frame here. Host packets that a CNI routes through a veth pair of
 * its own usually have a pending checksum as well, which the kernel itself has set if their socket
 * was a plain one.
 */
ALWAYS_INLINE bool has_false_checksum(struct __sk_buff *skb, struct packet *packet, bool is_audit)
{
	__s64 pending_end;
	__u32 end;

	if (packet->has_socket || skb->ingress_ifindex <= LOOPBACK_IFINDEX ||
	    had_plain_socket(skb) || !is_checksum_pending(skb))
		return false;
	end = checksum_end(packet);
	if (!end)
		return true;
	if (read_pending_end(skb, &pending_end))
		return pending_end < end;
	return !is_audit && bpf_skb_change_tail(skb, end - 1, 0) != -EINVAL;
}

/*
 * Default-deny: a frame not parsed to its transport header is REASON_UNPARSABLE, or ARP. The tag of
 * a VLAN interface is beside the frame, so it is read as without; one that is in it hides the rest.
 */
ALWAYS_INLINE enum reason read_frame(struct __sk_buff *skb, struct packet *packet)
{
	void *start = header_at(skb, 0, struct shortest_frame);
	__be16 type;

	packet->network_offset = ETHERNET_LENGTH;
	if (!start)
		return REASON_UNPARSABLE;
	type = *(__be16 *)(start + ETHERNET_TYPE_OFFSET);
	if (type == bpf_htons(ETHERTYPE_ARP))
		return REASON_ARP;
	if (type == bpf_htons(ETHERTYPE_IPV4))
		return read_ipv4(start + ETHERNET_LENGTH, ETHERNET_LENGTH, packet)
			       ? REASON_COUNT
			       : REASON_UNPARSABLE;
	if (type == bpf_htons(ETHERTYPE_IPV6))
		return read_ipv6(skb, ETHERNET_LENGTH, packet) ? REASON_COUNT : REASON_UNPARSABLE;
	return REASON_UNPARSABLE;
}

/* More tags than any network has. */
#define MAX_TAGS   8
#define TAG_LENGTH 4

/*
 * Only the addresses, behind VLAN tags that are in the frame: a packet socket has written them,
 * since those of VLAN interfaces are not.
 */
ALWAYS_INLINE void read_tagged_addresses(struct __sk_buff *skb, struct packet *packet)
{
	__u32 offset = ETHERNET_TYPE_OFFSET;

#pragma clang loop unroll(disable)
	for (int i = 0; i <= MAX_TAGS; i++) {
		__be16 *found = header_at(skb, offset, __be16);
		__be16 type;

		if (!found)
			return;
		type = *found;
		offset += sizeof(type);
		if (type == bpf_htons(ETHERTYPE_IPV4)) {
			struct ipv4_header *header = header_at(skb, offset, struct ipv4_header);

			if (header) {
				packet->source = map_ipv4(header->source);
				packet->destination = map_ipv4(header->destination);
			}
			return;
		}
		if (type == bpf_htons(ETHERTYPE_IPV6)) {
			struct ipv6_header *header = header_at(skb, offset, struct ipv6_header);

			if (header) {
				packet->source = header->source;
				packet->destination = header->destination;
			}
			return;
		}
		if (type != bpf_htons(ETHERTYPE_VLAN) && type != bpf_htons(ETHERTYPE_SERVICE_VLAN))
			return;
		offset += TAG_LENGTH - sizeof(type);
	}
}

/* A packet of a device whose frames have no Ethernet header; skb->protocol may be false. */
ALWAYS_INLINE enum reason read_bare_packet(struct __sk_buff *skb, struct packet *packet)
{
	struct ipv4_header *header = header_at(skb, 0, struct ipv4_header);
	bool is_read = false;

	if (header && header->version_length >> 4 == 4)
		is_read = read_ipv4(header, 0, packet);
	else if (header && header->version_length >> 4 == 6)
		is_read = read_ipv6(skb, 0, packet);
	return is_read ? REASON_COUNT : REASON_UNPARSABLE;
}

/* For receivers that have no VLANs: they remove an empty tag (VID 0), and drop others. */
ALWAYS_INLINE enum reason read_untagged_frame(struct __sk_buff *skb, struct packet *packet)
{
	return skb->vlan_present ? REASON_UNPARSABLE : read_frame(skb, packet);
}

#endif
