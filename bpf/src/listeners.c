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
#define STATE_CLOSE		     7	/* TCP_CLOSE */
#define STATE_LISTEN		     10 /* TCP_LISTEN */
#define LEVEL_TCP		     6
#define TCP_SOCK_OPS_FLAGS	     1008 /* TCP_BPF_SOCK_OPS_CB_FLAGS */

#define MAX_WATCHED 4096
#define MAX_SOCKETS 4096  /* 500 pods with eight ports each; 0.3 MB */
#define RING_BYTES  65536 /* 2,000 events: 500 pods with four ports each, all at once */

struct listener_event {
	__u64 netns_cookie;
	__u64 at_ns; /* CLOCK_MONOTONIC */
	__u32 port;  /* host order */
	__u32 is_open;
};

struct watched_socket {
	__u64 netns_cookie;
	__u32 port; /* host order */
	__u32 pad;
};

/* The watched network namespaces, by cookie. */
BPF_HASH(watched_netns, __u64, __u32, MAX_WATCHED);
/* Events lost because the ring was full. */
BPF_ARRAY(listener_losses, __u64, 1);
/* PAGE_SIZE: the kernel's, defined by the compile process. */
BPF_RINGBUF_OUTPUT(listener_events, RING_BYTES / PAGE_SIZE);

/* Number of sockets that `bpf_iter__tcp` has made report. */
BPF_ARRAY(listeners_adopted, __u64, 1);
/* Listeners from before the watch, by cookie, where no iterator can make them report. */
BPF_HASH(watched_sockets, __u64, struct watched_socket, MAX_SOCKETS);

static inline __attribute__((always_inline)) void emit_listener_event(__u64 cookie, __u32 port,
								      __u32 is_open)
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
	event->port = port;
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
		emit_listener_event(cookie, ctx->local_port, 1);
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
			emit_listener_event(cookie, ctx->local_port, 0);
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

/*
 * Tracepoint inet_sock_set_state, with type information: its arguments are the socket, and its
 * state before and after. Runs for each change of state of each TCP socket of the node, so all but
 * the last case must be cheap. A socket that was accepted comes here as one that listened before,
 * but not to be closed. The listener is in no table of the kernel's any more.
 */
int watch_listener_closes(struct bpf_raw_tracepoint_args *ctx)
{
	struct watched_socket *found, closed;
	__u64 socket, cookie;

	if ((__u32)ctx->args[1] != STATE_LISTEN || (__u32)ctx->args[2] != STATE_CLOSE)
		return 0;
	socket = ctx->args[0];
	if (!socket)
		return 0;
	/* Of tracing programs since Linux 5.12 (c5dbb89fc2ac). */
	cookie = bpf_get_socket_cookie((void *)socket);
	found = watched_sockets.lookup(&cookie);
	if (!found)
		return 0;
	closed = *found;
	watched_sockets.delete(&cookie);
	emit_listener_event(closed.netns_cookie, closed.port, 0);
	return 0;
}
