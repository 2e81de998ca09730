/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Packets that a process wrote header by header, by a packet or a raw socket. What they show of
 * themselves proves nothing: they reach a pod only as a rule admits.
 *
 * The kernel answers by raw sockets of its own: for closed ports, with ICMP errors, with neighbour
 * discovery. Nothing in such a socket differs from a process's, but only those of processes run the
 * hooks below. A process's raw socket that is not in the map counts as the kernel's: before Linux
 * 5.14 and where no cgroup v2 is mounted there are no hooks.
 */
#ifndef PODGATE_RAW_SOCKETS_H
#define PODGATE_RAW_SOCKETS_H

#include "sockets.h"

ALWAYS_INLINE bool find_hand_made(struct __sk_buff *skb)
{
	struct bpf_sock *sk = socket_of(skb);
	__u64 cookie;

	if (!sk)
		return (stamp_of(skb) & STAMP_KIND_MASK) == STAMP_HAND_MADE;
	if (sk->family == AF_PACKET)
		return true;
	sk = bpf_sk_fullsock(sk);
	if (!sk || sk->type != SOCK_RAW)
		return false;
	cookie = bpf_get_socket_cookie(skb);
	return raw_sockets.lookup(&cookie);
}

/* The same, found once for each packet. */
ALWAYS_INLINE bool is_hand_made(struct __sk_buff *skb, struct packet *packet)
{
	if (packet->maker == MAKER_UNKNOWN)
		packet->maker = find_hand_made(skb) ? MAKER_PROCESS : MAKER_KERNEL;
	return packet->maker == MAKER_PROCESS;
}

/* For where the packet loses its socket. */
ALWAYS_INLINE void stamp_origin(struct __sk_buff *skb, bool is_hand_made)
{
	stamp(skb, is_hand_made ? STAMP_HAND_MADE : STAMP);
}

#endif
