/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Replies in another host's name. A UDP socket may have a source address that is not the node's: by
 * IPV6_FREEBIND any process's, by IP_TRANSPARENT that of one with CAP_NET_RAW. A reply to the pod
 * may also have one by translation, if the pod sent to a service's address; the socket does not
 * know that address. So a reply is spoofed if its source is the one that the socket has chosen, and
 * is no address of the node.
 */
#ifndef PODGATE_SPOOFING_H
#define PODGATE_SPOOFING_H

#include "sockets.h"

#define AF_INET	 2
#define AF_INET6 10

/* Whether the node routes packets to this address elsewhere, so that it is not the node's own. */
ALWAYS_INLINE bool is_foreign(struct __sk_buff *skb, struct packet *packet)
{
	struct bpf_fib_lookup route = {.ifindex = skb->ifindex};
	long found;

	if (packet->is_ipv4) {
		route.family = AF_INET;
		route.ipv4_dst = packet->source.word[3];
	} else {
		route.family = AF_INET6;
		__builtin_memcpy(route.ipv6_dst, packet->source.word, sizeof(route.ipv6_dst));
	}
	found = bpf_fib_lookup(skb, &route, sizeof(route), 0);
	return found >= 0 && found != BPF_FIB_LKUP_RET_NOT_FWDED &&
	       found != BPF_FIB_LKUP_RET_FWD_DISABLED;
}

/* Whether the socket is bound to the packet's source, or has sent with it (IPV6_PKTINFO). */
ALWAYS_INLINE bool has_chosen_source(struct __sk_buff *skb, struct packet *packet)
{
	struct chosen_source chosen = {.source = packet->source};
	struct bpf_sock *sk = socket_of(skb);

	if (!sk)
		return false;
	if (packet->is_ipv4)
		return sk->src_ip4 == packet->source.word[3];
	if (sk->src_ip6[0] == packet->source.word[0] && sk->src_ip6[1] == packet->source.word[1] &&
	    sk->src_ip6[2] == packet->source.word[2] && sk->src_ip6[3] == packet->source.word[3])
		return true;
	chosen.socket = bpf_get_socket_cookie(skb);
	return chosen_sources.lookup(&chosen);
}

/* Where the datagram goes: a connected socket's message usually names no destination. */
ALWAYS_INLINE struct address datagram_destination(struct bpf_sock_addr *context)
{
	struct address to = ipv6_destination(context), unspecified = {};
	struct bpf_sock *sk = context->sk;

	if (sk && is_same_address(&to, &unspecified)) {
		to.word[0] = sk->dst_ip6[0];
		to.word[1] = sk->dst_ip6[1];
		to.word[2] = sk->dst_ip6[2];
		to.word[3] = sk->dst_ip6[3];
	}
	return to;
}

/* The hook's part: a datagram to a pod with a source that its sender has chosen. */
ALWAYS_INLINE void record_chosen_source(struct bpf_sock_addr *context)
{
	struct chosen_source chosen = {
		.source = {{context->msg_src_ip6[0], context->msg_src_ip6[1],
			    context->msg_src_ip6[2], context->msg_src_ip6[3]}}};
	struct address to = datagram_destination(context), unspecified = {};
	__u64 now_ns = bpf_ktime_get_ns();

	if (is_same_address(&chosen.source, &unspecified) || !addresses.lookup(&to))
		return;
	chosen.socket = bpf_get_socket_cookie(context);
	chosen_sources.update(&chosen, &now_ns);
}

#endif
