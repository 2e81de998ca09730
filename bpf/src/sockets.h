/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Reading and rewriting the destination of a socket that connects or sends.
 */
#ifndef PODGATE_SOCKETS_H
#define PODGATE_SOCKETS_H

#include "addresses.h"
#include "protocols.h"

#define SOCKET_REJECT 0
#define SOCKET_ALLOW  1

#define SOCK_STREAM 1
#define SOCK_DGRAM  2
#define SOCK_RAW    3

#define AF_UNSPEC 0 /* of sockets behind descriptors of tun and tap devices, with SOCK_RAW */
#define AF_PACKET 17

ALWAYS_INLINE bool is_tcp(struct bpf_sock_addr *context)
{
	return context->type == SOCK_STREAM &&
	       (context->protocol == IPPROTO_TCP || context->protocol == IPPROTO_MPTCP);
}

ALWAYS_INLINE struct address ipv6_destination(struct bpf_sock_addr *context)
{
	struct address to = {{context->user_ip6[0], context->user_ip6[1], context->user_ip6[2],
			      context->user_ip6[3]}};

	return to;
}

ALWAYS_INLINE void write_ipv6(struct bpf_sock_addr *context, struct address *address)
{
	context->user_ip6[0] = address->word[0];
	context->user_ip6[1] = address->word[1];
	context->user_ip6[2] = address->word[2];
	context->user_ip6[3] = address->word[3];
}

#endif
