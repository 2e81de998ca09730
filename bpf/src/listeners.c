/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Listeners of pods that open and close: sock_ops at the root cgroup, so for every TCP socket of
 * the node in any namespace. Events are hints: each comes before the change (listen() before a SYN
 * finds the socket, close() before it no longer does), and some may be lost. bpf/listeners.py has
 * the twins of these declarations.
 */
#define SOCK_OPS_PASSIVE_ESTABLISHED 5
#define SOCK_OPS_STATE		     10
#define SOCK_OPS_TCP_LISTEN	     11
#define STATE_CB_FLAG		     4
#define STATE_LISTEN		     10 /* TCP_LISTEN */
#define LEVEL_TCP		     6
#define TCP_SOCK_OPS_FLAGS	     1008 /* TCP_BPF_SOCK_OPS_CB_FLAGS */

#define MAX_WATCHED 4096
#define RING_BYTES  65536 /* 2,000 events: 500 pods with four ports each, all at once */

struct listener_event {
	__u64 netns_cookie;
	__u64 at_ns; /* CLOCK_MONOTONIC */
	__u32 port;  /* host order */
	__u32 is_open;
};

/* The watched network namespaces, by cookie. */
BPF_HASH(watched_netns, __u64, __u32, MAX_WATCHED);
/* Events lost because the ring was full. */
BPF_ARRAY(listener_losses, __u64, 1);
/* PAGE_SIZE: the kernel's, defined by the compile process. */
BPF_RINGBUF_OUTPUT(listener_events, RING_BYTES / PAGE_SIZE);

/* Number of sockets that `bpf_iter__tcp` has made report. */
BPF_ARRAY(listeners_adopted, __u64, 1);

static inline __attribute__((always_inline)) void emit_listener_event(struct bpf_sock_ops *ctx,
								      __u64 cookie, __u32 is_open)
{
	struct listener_event *event;
	__u32 zero = 0;
	__u64 *losses;

	event = listener_events.ringbuf_reserve(sizeof(*event));
	if (!event) {
		losses = listener_losses.lookup(&zero);
		if (losses)
			__sync_fetch_and_add(losses, 1);
		return;
	}
	event->netns_cookie = cookie;
	event->at_ns = bpf_ktime_get_ns();
	event->port = ctx->local_port;
	event->is_open = is_open;
	listener_events.ringbuf_submit(event, 0);
}

int watch_listeners(struct bpf_sock_ops *ctx)
{
	__u64 cookie;
	__u32 flags;

	switch (ctx->op) {
	case SOCK_OPS_TCP_LISTEN:
		cookie = bpf_get_netns_cookie(ctx);
		if (!watched_netns.lookup(&cookie))
			return 1;
		/* Set here, so that sockets outside watched namespaces do not pay for it. */
		flags = ctx->bpf_sock_ops_cb_flags;
		bpf_sock_ops_cb_flags_set(ctx, flags | STATE_CB_FLAG);
		emit_listener_event(ctx, cookie, 1);
		break;
	case SOCK_OPS_PASSIVE_ESTABLISHED:
		/* Accepted sockets inherit the listener's flags: 8 more callbacks each. */
		flags = ctx->bpf_sock_ops_cb_flags;
		if (flags & STATE_CB_FLAG)
			bpf_sock_ops_cb_flags_set(ctx, flags & ~STATE_CB_FLAG);
		break;
	case SOCK_OPS_STATE:
		if (ctx->args[0] != STATE_LISTEN)
			return 1;
		cookie = bpf_get_netns_cookie(ctx);
		if (watched_netns.lookup(&cookie))
			emit_listener_event(ctx, cookie, 0);
		break;
	default:
		break;
	}
	return 1;
}

/* The first fields of `struct sock_common`. */
struct listed_socket {
	__u8 addresses_and_ports[16];
	__u16 family;
	volatile __u8 state;
};

/* `struct bpf_iter__tcp`. */
struct iterated_socket {
	void *meta;
	struct listed_socket *socket;
};

/*
 * Makes listeners report that existed before the watch: all of the network namespace in which the
 * iterator is opened. Before Linux 6.12 the flags cannot be set from here (EINVAL), and no listener
 * is adopted.
 */
int bpf_iter__tcp(struct iterated_socket *ctx)
{
	struct listed_socket *socket = ctx->socket;
	__u32 zero = 0, flags = 0;
	__u64 *adopted;

	if (!socket || socket->state != STATE_LISTEN)
		return 0;
	if (bpf_getsockopt((void *)socket, LEVEL_TCP, TCP_SOCK_OPS_FLAGS, &flags, sizeof(flags)))
		return 0;
	flags |= STATE_CB_FLAG;
	if (bpf_setsockopt((void *)socket, LEVEL_TCP, TCP_SOCK_OPS_FLAGS, &flags, sizeof(flags)))
		return 0;
	adopted = listeners_adopted.lookup(&zero);
	if (adopted)
		__sync_fetch_and_add(adopted, 1);
	return 0;
}
