/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * In whose name a socket of the node may speak. A process may send with a source address that is
 * not the node's: over IPv6 any process (IPV6_FREEBIND), over IPv4 one with CAP_NET_RAW
 * (IP_TRANSPARENT). The source of a packet to the pod proves little: connection tracking translates
 * that of an honest server to a service's, and that of a forger, too. What counts is what the
 * socket is bound to, and with which sources it has ever sent. Where all of these are the node's, a
 * process has written no other name, and translation has.
 */
#ifndef PODGATE_SPOOFING_H
#define PODGATE_SPOOFING_H

#include "sockets.h"

#define AF_INET	 2
#define AF_INET6 10

/* In a program that does not know the routes. */
ALWAYS_INLINE bool is_listed_as_own(struct address *address)
{
	struct node_address key = {.prefix_bits = 8 * sizeof(*address), .address = *address};

	return node_addresses.lookup(&key);
}

/* Whether the node routes packets to this address elsewhere. */
ALWAYS_INLINE bool is_routed(struct __sk_buff *skb, struct address *address, bool is_ipv4)
{
	struct bpf_fib_lookup route = {.ifindex = skb->ifindex};
	long found;

	if (is_ipv4) {
		route.family = AF_INET;
		route.ipv4_dst = address->word[3];
	} else {
		route.family = AF_INET6;
		__builtin_memcpy(route.ipv6_dst, address->word, sizeof(route.ipv6_dst));
	}
	found = bpf_fib_lookup(skb, &route, sizeof(route), 0);
	return found >= 0 && found != BPF_FIB_LKUP_RET_NOT_FWDED &&
	       found != BPF_FIB_LKUP_RET_FWD_DISABLED;
}

/*
 * Whether the node itself has the address. While no agent lists its new ones, every address that
 * the node does not route elsewhere may be one.
 */
ALWAYS_INLINE bool is_own(struct __sk_buff *skb, struct packet *packet, struct address *address)
{
	__u32 only = 0;
	struct config *node;

	if (is_listed_as_own(address))
		return true;
	node = config.lookup(&only);
	if (node && node->has_node_addresses &&
	    (!node->heartbeat_ns ||
	     age_ns(packet_time_ns(packet), node->heartbeat_ns) < NODE_ADDRESSES_STALE_NS))
		return false;
	return !is_routed(skb, address, packet->is_ipv4);
}

/* The address to which the socket is bound, or from which it is connected; all 0: none. */
ALWAYS_INLINE void read_bound_address(struct __sk_buff *skb, bool is_ipv4, struct address *bound)
{
	struct bpf_sock *sk = socket_of(skb);

	if (!sk)
		return;
	if (is_ipv4) {
		if (sk->src_ip4)
			*bound = map_ipv4(sk->src_ip4);
		return;
	}
	bound->word[0] = sk->src_ip6[0];
	bound->word[1] = sk->src_ip6[1];
	bound->word[2] = sk->src_ip6[2];
	bound->word[3] = sk->src_ip6[3];
}

/* The packet's source, and the addresses of its socket. */
#define NAMES 3

/*
 * Whether the packet is in the node's own name, or in one that translation has given it; if a
 * process wrote its headers only the former.
 */
ALWAYS_INLINE bool may_speak(struct __sk_buff *skb, struct packet *packet, bool is_hand_made)
{
	struct socket_history *history = socket_history(skb);
	struct address names[NAMES] = {packet->source}, *name;
	__u32 foreign_sources = is_hand_made ? 2 : 0;
	bool is_unspecified;

	read_bound_address(skb, packet->is_ipv4, &names[1]);
	if (history) {
		foreign_sources += history->foreign_sources;
		names[2] = history->foreign_source;
	}
#pragma clang loop unroll(disable)
	for (__u32 i = 0; i < NAMES; i++) {
		asm volatile("" : "+r"(i));
		name = &names[i];
		is_unspecified = !(name->word[0] | name->word[1] | name->word[2] | name->word[3]);
		if (is_unspecified)
			continue;
		if (is_own(skb, packet, name)) {
			if (!i)
				return true;
		} else if (i) {
			return false;
		}
	}
	return foreign_sources < 2;
}

/*
 * The hook's part: a datagram's source. False if it is not the node's, and the socket has no room
 * for that: its process has used up its memory for options.
 */
ALWAYS_INLINE bool record_source(struct bpf_sock_addr *context, struct address *source)
{
	struct bpf_sock *sk = context->sk;
	struct socket_history *history;

	if (!sk || is_listed_as_own(source))
		return true;
	history = socket_histories.sk_storage_get(sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!history)
		return false;
	if (history->foreign_sources && is_same_address(&history->foreign_source, source))
		return true;
	if (history->foreign_sources >= 2)
		return true;
	/* Counted first, since another thread may send with another source at the same time. */
	__sync_fetch_and_add(&history->foreign_sources, 1);
	asm volatile("" ::: "memory");
	if (history->foreign_sources == 1)
		history->foreign_source = *source;
	return true;
}

#endif
