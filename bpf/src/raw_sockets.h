/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Packets that a process wrote header by header, by a packet or a raw socket or a macvtap. What
 * they show of themselves proves nothing: they reach a pod only as a rule admits.
 *
 * The kernel answers by raw sockets of its own: for closed ports, with ICMP errors, with neighbour
 * discovery. Nothing in such a socket differs from a process's, but only those of processes run the
 * hooks, which mark them in their own storage (socket_histories). A process's raw socket that is
 * neither marked nor in old_raw_sockets counts as the kernel's: before Linux 5.14 and where no
 * cgroup v2 is mounted there are no hooks.
 */
#ifndef PODGATE_RAW_SOCKETS_H
#define PODGATE_RAW_SOCKETS_H

#include "sockets.h"

/* Read once for each packet: what several checks need of its socket. */
ALWAYS_INLINE void load_socket(struct __sk_buff *skb, struct packet *packet)
{
	struct bpf_sock *sk = socket_of(skb);

	if (!sk)
		return;
	packet->has_socket = true;
	packet->socket_family = sk->family;
	sk = bpf_sk_fullsock(sk);
	if (!sk)
		return;
	packet->has_full_socket = true;
	packet->socket_type = sk->type;
	packet->socket_protocol = sk->protocol;
}

/* Also of a macvtap's descriptor, by which a process writes whole frames as well. */
ALWAYS_INLINE bool is_from_packet_socket(struct packet *packet)
{
	if (packet->socket_family == AF_UNSPEC)
		return packet->socket_type == SOCK_RAW;
	return packet->socket_family == AF_PACKET;
}

/* Of the packet's socket; NULL if there is none, or it has not. */
ALWAYS_INLINE struct socket_history *socket_history(struct __sk_buff *skb)
{
	struct bpf_sock *sk = socket_of(skb);

	return sk ? socket_histories.sk_storage_get(sk, 0, 0) : 0;
}

ALWAYS_INLINE bool find_hand_made(struct __sk_buff *skb, struct packet *packet)
{
	struct socket_history *history;
	__u64 cookie;

	if (!packet->has_socket)
		return (stamp_of(skb) & STAMP_KIND_MASK) == STAMP_HAND_MADE;
	if (is_from_packet_socket(packet))
		return true;
	if (packet->socket_type != SOCK_RAW)
		return false;
	history = socket_history(skb);
	if (history && history->is_raw)
		return true;
	cookie = bpf_get_socket_cookie(skb);
	return old_raw_sockets.lookup(&cookie);
}

/* The same, found once for each packet. */
ALWAYS_INLINE bool is_hand_made(struct __sk_buff *skb, struct packet *packet)
{
	if (packet->maker == MAKER_UNKNOWN)
		packet->maker = find_hand_made(skb, packet) ? MAKER_PROCESS : MAKER_KERNEL;
	return packet->maker == MAKER_PROCESS;
}

/* For where the packet loses its socket. */
ALWAYS_INLINE void stamp_origin(struct __sk_buff *skb, struct packet *packet)
{
	__u16 value = STAMP;

	if (is_hand_made(skb, packet))
		value = STAMP_HAND_MADE;
	else if (!packet->has_socket && !had_plain_socket(skb))
		value = STAMP_UNPROVEN;
	stamp(skb, value);
}

#endif
