/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Whether ports have a listener that would accept a connection now, in other network namespaces.
 * Never attached: BPF_PROG_TEST_RUN runs it with a frame that is a list of queries, of which each
 * repetition answers the next one in place. So one system call answers all of them.
 * bpf/listener_lookup.py has the twins of these declarations.
 */
#define ALWAYS_INLINE static inline __attribute__((always_inline))

#define FAMILY_IPV4  2	/* AF_INET */
#define STATE_LISTEN 10 /* TCP_LISTEN */

#define QUERIES_MAX 96 /* As many as fit into the page of a frame. */

/*
 * With more requests in its queue than this, the kernel may drop some: without SYN cookies as soon
 * as the queue is three quarters of net.ipv4.tcp_max_syn_backlog long (tcp_conn_request of
 * net/ipv4/tcp_input.c), which pods may set.
 */
#define PENDING_MAX 8

enum listener_state {
	NO_ANSWER,
	NO_LISTENER,
	HAS_ROOM,
	QUEUE_FULL,
	UNDECIDED, /* There is one, but a connection may reach another one, or none. */
};

/* Offsets in structs of the kernel, from its type information. */
struct socket_layout {
	__u32 net;
	__u32 net_cookie;
	__u32 filter;
	__u32 reuseport;
	__u32 reuseport_members;
	__u32 accept_queue;
	__u32 accept_queue_max;
	__u32 pending;
};

struct listener_query {
	__u64 netns_cookie;
	__u32 netns_id;	  /* As the namespace of the calling process names it. */
	__u16 port;	  /* Network order, as the address. */
	__u8 family;	  /* AF_INET or AF_INET6 */
	__u8 state;	  /* The answer: `enum listener_state`. */
	__u32 address[4]; /* IPv4: the first one. */
};

struct listener_queries {
	__u8 ethernet_header[14]; /* All 0. */
	__u16 next;		  /* The query of the next repetition. */
	struct socket_layout layout;
};

/* See kernel_memory.h. */
static long (*probe_read_kernel)(void *to, __u32 bytes,
				 const void *from) = (void *)BPF_FUNC_probe_read_kernel;

/* These are 0 for what cannot be read. */
ALWAYS_INLINE __u16 read_u16(__u64 at)
{
	__u16 value = 0;

	probe_read_kernel(&value, sizeof(value), (void *)at);
	return value;
}

ALWAYS_INLINE __u32 read_u32(__u64 at)
{
	__u32 value = 0;

	probe_read_kernel(&value, sizeof(value), (void *)at);
	return value;
}

ALWAYS_INLINE __u64 read_u64(__u64 at)
{
	__u64 value = 0;

	probe_read_kernel(&value, sizeof(value), (void *)at);
	return value;
}

/* listener: its address in the kernel. */
ALWAYS_INLINE __u8 state_of(__u64 listener, __u64 netns_cookie, struct socket_layout *layout)
{
	__u32 room, pending;
	__u64 group;

	/* By now the id may be another namespace's. */
	if (read_u64(read_u64(listener + layout->net) + layout->net_cookie) != netns_cookie)
		return UNDECIDED;
	/* SO_ATTACH_FILTER and SO_ATTACH_BPF apply to SYNs, too. */
	if (read_u64(listener + layout->filter))
		return UNDECIDED;
	/* SO_REUSEPORT: the queue of another member may be full. */
	group = read_u64(listener + layout->reuseport);
	if (group && read_u16(group + layout->reuseport_members) != 1)
		return UNDECIDED;
	/* As sk_acceptq_is_full of include/net/sock.h. */
	room = read_u32(listener + layout->accept_queue_max);
	if (read_u32(listener + layout->accept_queue) > room)
		return QUEUE_FULL;
	pending = read_u32(listener + layout->pending);
	if (pending && (pending >= room || pending > PENDING_MAX))
		return UNDECIDED;
	return HAS_ROOM;
}

int look_up_listeners(struct __sk_buff *frame)
{
	void *end = (void *)(long)frame->data_end;
	struct listener_queries *queries = (void *)(long)frame->data;
	struct bpf_sock_tuple to = {};
	struct listener_query *query;
	struct bpf_sock *found;
	__u32 number, bytes;

	if ((void *)(queries + 1) > end)
		return 0;
	number = queries->next;
	if (number >= QUERIES_MAX)
		return 0;
	queries->next = number + 1;
	query = (void *)(queries + 1) + number * sizeof(*query);
	if ((void *)(query + 1) > end)
		return 0;
	if (query->family == FAMILY_IPV4) {
		bytes = sizeof(to.ipv4);
		to.ipv4.daddr = query->address[0];
		to.ipv4.dport = query->port;
	} else {
		bytes = sizeof(to.ipv6);
		to.ipv6.daddr[0] = query->address[0];
		to.ipv6.daddr[1] = query->address[1];
		to.ipv6.daddr[2] = query->address[2];
		to.ipv6.daddr[3] = query->address[3];
		to.ipv6.dport = query->port;
	}
	found = bpf_skc_lookup_tcp(frame, &to, bytes, query->netns_id, 0);
	if (!found) {
		query->state = NO_LISTENER;
		return 0;
	}
	/*
	 * A listener bound to an interface: the lookup is as if by the loopback, and the kernel
	 * takes a connection to an own address as one by the address's interface.
	 */
	if (found->state != STATE_LISTEN || found->bound_dev_if)
		query->state = UNDECIDED;
	else
		/* Read as a number: the verifier allows no arithmetic with the pointer. */
		query->state =
			state_of(read_u64((__u64)&found), query->netns_cookie, &queries->layout);
	bpf_sk_release(found);
	return 0;
}
