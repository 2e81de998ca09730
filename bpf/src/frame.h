/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * A whole frame: what it carries, and whether it will still be the same when it arrives.
 */
#ifndef PODGATE_FRAME_H
#define PODGATE_FRAME_H

#define LOOPBACK_IFINDEX 1 /* in every network namespace */

#define AF_PACKET 17

/*
 * A packet socket can leave a checksum to be filled in later (PACKET_VNET_HDR) and says at which
 * bytes. Where the interface does not offload checksums the kernel fills it in after the gate, and
 * those bytes may be the TCP flags or the EtherType: a RST becomes a SYN. The frame that was judged
 * is then not the one that arrives. By the loopback such a frame comes in without its socket.
 *
 * No field tells of a pending checksum, but bpf_l4_csum_replace leaves the bytes alone where one is
 * pending, so it is tried on the first two bytes of the frame, which are put back.
 */
ALWAYS_INLINE bool is_rewritten_later(struct __sk_buff *skb)
{
	struct bpf_sock *sk = skb->sk;
	__u16 before, after;

	if (sk ? sk->family != AF_PACKET : skb->ingress_ifindex != LOOPBACK_IFINDEX)
		return false;
	if (bpf_skb_load_bytes(skb, 0, &before, sizeof(before)) ||
	    bpf_l4_csum_replace(skb, 0, 0, 1, 0) ||
	    bpf_skb_load_bytes(skb, 0, &after, sizeof(after)))
		return true;
	return before == after || bpf_skb_store_bytes(skb, 0, &before, sizeof(before), 0);
}

/* Default-deny: what is not read to its transport header is REASON_UNPARSABLE, or ARP. */
ALWAYS_INLINE enum reason read_frame(struct __sk_buff *skb, struct packet *packet)
{
	__be16 type;

	/* An empty tag (VID 0) is taken off by the receiver, so a tag hides what is behind it. */
	if (skb->vlan_present || bpf_skb_load_bytes(skb, ETHERNET_TYPE_OFFSET, &type, sizeof(type)))
		return REASON_UNPARSABLE;
	if (type == bpf_htons(ETHERTYPE_ARP))
		return REASON_ARP;
	if (type == bpf_htons(ETHERTYPE_IPV4))
		return read_ipv4(skb, packet) ? REASON_COUNT : REASON_UNPARSABLE;
	if (type == bpf_htons(ETHERTYPE_IPV6))
		return read_ipv6(skb, packet) ? REASON_COUNT : REASON_UNPARSABLE;
	return REASON_UNPARSABLE;
}

#endif
