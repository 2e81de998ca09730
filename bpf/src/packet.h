/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Parsing a packet by default-deny.
 *
 * Everything is read from the frame, since a process with a packet socket chooses skb->protocol.
 * Nearly all headers are in the frame's linear part. Of a frame from a packet ring only the
 * Ethernet header is: the rest is memory that the process can still write, also after the verdict.
 * So headers are pulled into the linear part, which is the kernel's own, before they are read. A
 * packet that cannot be parsed to its transport header is REASON_UNPARSABLE.
 */
#ifndef PODGATE_PACKET_H
#define PODGATE_PACKET_H

#include "addresses.h"
#include "protocols.h"
#include "verifier.h"

#define ETHERNET_TYPE_OFFSET 12
#define ETHERNET_LENGTH	     14

#define IPV4_PROTOCOL_OFFSET (ETHERNET_LENGTH + 9)
#define IPV6_PROTOCOL_OFFSET (ETHERNET_LENGTH + 6)

/* From the start of the IP header. */
#define IPV4_SOURCE_OFFSET 12
#define IPV6_SOURCE_OFFSET 8

#define ETHERTYPE_IPV4 0x0800
#define ETHERTYPE_ARP  0x0806
#define ETHERTYPE_IPV6 0x86dd

#define ETHERTYPE_VLAN	       0x8100
#define ETHERTYPE_SERVICE_VLAN 0x88a8

/* RFC 8200 sets no limit. Longer chains occur only in attempts to hide the transport header. */
#define IPV6_MAX_HEADERS 8

#define IPV4_FRAGMENT_MASK 0x3fff /* offset and more-fragments, not don't-fragment */
#define IPV4_OFFSET_MASK   0x1fff
#define IPV6_OFFSET_MASK   0xfff8

/* No header begins later: eight of an IPv6 chain have 2 KiB each. */
#define MAX_OFFSET 0x7fff

/* Packet pointers are 32-bit fields for the compiler, which must not join two loads before it
 * widens them. */
ALWAYS_INLINE void *frame_start(struct __sk_buff *skb)
{
	void *start = (void *)(long)skb->data;

	asm volatile("" : "+r"(start));
	return start;
}

/*
 * The header at this offset in bytes, in the frame's linear part; NULL if the frame is too short.
 * Pointers of previous calls are no longer valid.
 */
#define header_at(skb, offset, type)                                                               \
	({                                                                                         \
		__u32 offset_ = (offset) & MAX_OFFSET;                                             \
		type *header_ = frame_start(skb) + offset_;                                        \
                                                                                                   \
		if ((void *)(header_ + 1) > (void *)(long)(skb)->data_end) {                       \
			bpf_skb_pull_data(skb, offset_ + sizeof(type));                            \
			header_ = frame_start(skb) + offset_;                                      \
			if ((void *)(header_ + 1) > (void *)(long)(skb)->data_end)                 \
				header_ = 0;                                                       \
		}                                                                                  \
		header_;                                                                           \
	})

/* Who wrote a packet's headers. */
enum maker {
	MAKER_UNKNOWN,
	MAKER_KERNEL,
	MAKER_PROCESS,
};

struct packet {
	struct address source;
	struct address destination __attribute__((aligned(8)));
	__u32 network_offset; /* bytes from the start of the frame, by frame.h */
	__u32 transport_offset;
	__u32 gate_ifindex;	/* of the gate that counts the packet */
	__u32 gate_slot;	/* the same gate's */
	__u32 transport_length; /* bytes, from the IP header; 0 for a jumbo: unknown */
	__u16 source_port;	/* host byte order; 0 until read, or for protocols without */
	__u16 destination_port;
	__u8 protocol;
	bool is_ipv4;
	bool is_fragment;
	bool is_later_fragment; /* not the first: without the transport header */
	bool is_stray;		/* not an address of this gate's pod */
	bool is_elsewhere;	/* nor of another pod's: maybe of a client behind this one */
	bool is_arp;		/* and nothing else is set */
	__u8 maker;		/* enum maker, by raw_sockets.h */
	bool has_socket;	/* and of it, by load_socket: */
	bool has_full_socket;	/* no request or TIME-WAIT socket, which have no type */
	__u8 socket_family;
	__u16 socket_type;
	__u16 socket_protocol;
	__u64 now_ns;	      /* 0 until read: most packets need no time */
	__u64 hairpin_cgroup; /* id, of who connects (hairpins.h); 0: no hairpin, or unknown */
};

struct ipv4_header {
	__u8 version_length;
	__u8 service;
	__be16 total_length;
	__be16 identification;
	__be16 fragment;
	__u8 ttl;
	__u8 protocol;
	__sum16 checksum;
	__be32 source;
	__be32 destination;
};

/* What is shorter has no transport header, and is no ARP. */
struct shortest_frame {
	__u8 bytes[ETHERNET_LENGTH + sizeof(struct ipv4_header)];
};

struct ipv6_header {
	__be32 version_class_flow;
	__be16 payload_length;
	__u8 next_header;
	__u8 hop_limit;
	struct address source;
	struct address destination;
};

struct ipv6_extension {
	__u8 next_header;
	__u8 length;
	union {
		struct {
			__u8 routing_type;
			__u8 segments_left;
		};
		__be16 offset; /* of a fragment header, with two reserved bits and more-fragments */
	};
};

/* network_offset: the header's, in bytes from the start of the frame; a constant. */
ALWAYS_INLINE bool read_ipv4(struct ipv4_header *header, __u32 network_offset,
			     struct packet *packet)
{
	__u32 header_length, total_length;

	header_length = (header->version_length & 0x0f) * 4;
	if (header->version_length >> 4 != 4 || header_length < sizeof(*header))
		return false;
	total_length = bpf_ntohs(header->total_length);
	/* 0 is BIG TCP (Linux 6.3 for IPv4): longer than the field can express. */
	if (total_length && total_length < header_length)
		return false;

	packet->source = map_ipv4(header->source);
	packet->destination = map_ipv4(header->destination);
	packet->transport_offset = network_offset + header_length;
	packet->transport_length = total_length ? total_length - header_length : 0;
	packet->protocol = header->protocol;
	packet->is_ipv4 = true;
	if (header->fragment & bpf_htons(IPV4_FRAGMENT_MASK)) {
		packet->is_fragment = true;
		packet->is_later_fragment = header->fragment & bpf_htons(IPV4_OFFSET_MASK);
	}
	return true;
}

/*
 * Follows the chain to the transport header. A routing header with segments left is unparsable: the
 * destination in the fixed header is then only the next stop. So is "no next header", which no pod
 * needs and which can hide a payload.
 */
ALWAYS_INLINE bool read_ipv6(struct __sk_buff *skb, __u32 network_offset, struct packet *packet)
{
	struct ipv6_header *header = header_at(skb, network_offset, struct ipv6_header);
	__u32 offset = network_offset + sizeof(*header);
	__u32 payload_length, extensions_length;
	__u8 next;

	if (!header || bpf_ntohl(header->version_class_flow) >> 28 != 6)
		return false;
	packet->source = header->source;
	packet->destination = header->destination;
	payload_length = bpf_ntohs(header->payload_length);
	next = header->next_header;

#pragma clang loop unroll(disable)
	for (int i = 0; i <= IPV6_MAX_HEADERS; i++) {
		struct ipv6_extension *extension;
		__u32 length;

		if (next != IPPROTO_HOPOPTS && next != IPPROTO_ROUTING && next != IPPROTO_DSTOPTS &&
		    next != IPPROTO_FRAGMENT && next != IPPROTO_AH)
			goto transport;
		extension = header_at(skb, offset, struct ipv6_extension);
		if (!extension)
			return false;
		if (next == IPPROTO_ROUTING && extension->segments_left)
			return false;
		if (next == IPPROTO_FRAGMENT) {
			/*
			 * Atomic fragments (offset 0, no more to come) count too: RFC 6946 makes
			 * them legal, and no TCP stack sends them. What follows a later
			 * fragment's header is payload, so the chain ends here.
			 */
			packet->is_fragment = true;
			packet->is_later_fragment = extension->offset & bpf_htons(IPV6_OFFSET_MASK);
			length = 8;
		} else if (next == IPPROTO_AH) {
			length = (extension->length + 2) * 4;
		} else {
			length = (extension->length + 1) * 8;
		}
		next = extension->next_header;
		offset = forget(offset + length, skb->len);
		if (packet->is_fragment)
			goto transport;
	}
	return false;

transport:
	/* Chains of headers after a fragment header, and headers not parsed here. */
	if (next == IPPROTO_NONE || next == IPPROTO_HOPOPTS || next == IPPROTO_ROUTING ||
	    next == IPPROTO_DSTOPTS || next == IPPROTO_FRAGMENT || next == IPPROTO_AH ||
	    next == IPPROTO_MOBILITY || next == IPPROTO_HIP || next == IPPROTO_SHIM6 || next >= 253)
		return false;
	extensions_length = offset - network_offset - sizeof(*header);
	/* 0 is a jumbogram (RFC 2675) or BIG TCP (Linux 5.19 for IPv6). */
	if (payload_length && payload_length < extensions_length)
		return false;
	packet->transport_length = payload_length ? payload_length - extensions_length : 0;
	/* Otherwise the verifier follows all of the program once for each length of the chain. */
	packet->transport_offset = forget(offset, skb->len);
	packet->protocol = next;
	return true;
}

/*
 * What the verifier knows of packets that differ: constant words of a translated IPv4 address, that
 * no port is read yet, which packets are later fragments. It would follow all that comes later once
 * for each combination. scalar: as of forget().
 */
ALWAYS_INLINE void forget_differences(struct packet *packet, __u64 scalar)
{
	__u64 *source = (__u64 *)&packet->source;

	source[0] = forget(source[0], scalar);
	source[1] = forget(source[1], scalar);
	packet->destination_port = forget(packet->destination_port, scalar);
	packet->is_later_fragment = forget(packet->is_later_fragment, scalar) & 1;
}

#endif
