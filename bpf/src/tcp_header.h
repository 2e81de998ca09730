/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#ifndef PODGATE_TCP_HEADER_H
#define PODGATE_TCP_HEADER_H

#include "addresses.h"

#define TCP_FLAGS_OFFSET 13
#define TCP_MINIMUM	 20
#define TCP_FIN		 0x01
#define TCP_SYN		 0x02
#define TCP_RST		 0x04
#define TCP_ACK		 0x10

struct tcp_header {
	__be16 source_port;
	__be16 destination_port;
	__be16 sequence[2];
	__be16 acknowledgement[2];
	__u8 data_offset; /* in its upper half, in words */
	__u8 flags;
};

/* By mask: a SYN opens a connection whatever other flags it has (PSH, URG, ECN). */
ALWAYS_INLINE bool opens_connection(__u8 flags)
{
	return (flags & (TCP_SYN | TCP_ACK)) == TCP_SYN;
}

#endif
