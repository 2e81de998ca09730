/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Hooks at the root cgroup, so for every socket of the machine; those of other network namespaces
 * leave at once. They are speed and names, the gates are the authority: who is refused hears of it
 * at once, with EPERM, and is known by name, where a dropped SYN would leave him waiting.
 *
 * In connect the relay's hooks (relay.c) may come before or after these, which see either address
 * of what is redirected: each of them has a gate. Translation of services (services.c) comes first.
 */
#define SOL_PACKET	    263
#define PACKET_QDISC_BYPASS 20
#define SOL_XDP		    283
#define XDP_TX_RING	    3
#define XDP_UMEM_REG	    4

/* What is known, where this socket is the node's; else NULL. */
ALWAYS_INLINE struct config *known_to_node(void *context)
{
	__u32 only = 0;
	struct config *known = config.lookup(&only);

	if (!known || !known->node_netns || bpf_get_netns_cookie(context) != known->node_netns)
		return 0;
	return known;
}

ALWAYS_INLINE void tell_hook(struct address *to, __u16 port, __u8 protocol, __u32 ifindex,
			     enum reason reason, __u64 now_ns)
{
	struct event *event;

	if (!may_tell(now_ns))
		return;
	event = events.ringbuf_reserve(sizeof(*event));
	if (!event) {
		count_untold();
		return;
	}
	__builtin_memset(event, 0, sizeof(*event));
	event->at_ns = now_ns;
	event->cgroup = bpf_get_current_cgroup_id();
	event->destination = *to;
	event->destination_port = port;
	event->ifindex = ifindex;
	event->protocol = protocol;
	event->verdict = VERDICT_DROP;
	event->reason = reason;
	name_task(event);
	events.ringbuf_submit(event, 0);
}

/*
 * An unprivileged process can wrap a packet for a pod in UDP to a tunnel's port. By port, whatever
 * the address: the next node's tunnel would deliver it as well.
 */
ALWAYS_INLINE int judge_tunnel(struct config *known, struct address *to, __u16 port)
{
	__u64 now_ns = bpf_ktime_get_ns();

	if (!is_tunnel_port(known, port) || is_abandoned(known, now_ns))
		return SOCKET_ALLOW;
	count_for_node(REASON_TUNNEL);
	tell_hook(to, port, IPPROTO_UDP, 0, REASON_TUNNEL, now_ns);
	return SOCKET_REFUSE;
}

ALWAYS_INLINE int judge_datagram(struct bpf_sock_addr *context, struct address *to)
{
	struct config *known = known_to_node(context);

	if (!known || context->protocol != IPPROTO_UDP || !known->tunnel_port_count)
		return SOCKET_ALLOW;
	return judge_tunnel(known, to, bpf_ntohs(context->user_port));
}

/*
 * A socket that is bound to an interface may go another way than to the pod. Not over IPv6: there a
 * router may send it back, and unlike IPv4's martians nothing stops it then.
 */
ALWAYS_INLINE bool may_go_elsewhere(struct bpf_sock *sk, struct address *to)
{
	return sk->bound_dev_if && to->word[2] == bpf_htonl(0xffff) && !to->word[0] && !to->word[1];
}

/*
 * The interface whose gate says who may connect there: the pod's, or the one of the relay's pair.
 * 0: nobody's address, or that of several.
 */
ALWAYS_INLINE __u32 gated_ifindex(struct address *to)
{
	__u32 *ifindex = addresses.lookup(to);
	struct relay_origin *origin;

	if (ifindex)
		return *ifindex;
	origin = relay_origins.lookup(to);
	return origin ? origin->ifindex : 0;
}

/* Only TCP is refused here: other protocols may answer what the pod asked, which the gate knows. */
ALWAYS_INLINE int judge_connect(struct bpf_sock_addr *context, struct address *to)
{
	struct config *known = known_to_node(context);
	__u16 port = bpf_ntohs(context->user_port);
	struct caller_key caller = {.port = port, .protocol = IPPROTO_TCP};
	struct bpf_sock *sk = context->sk;
	struct counters *count;
	struct gate *gate;
	__u64 now_ns;

	if (!known)
		return SOCKET_ALLOW;
	if (context->protocol == IPPROTO_UDP && known->tunnel_port_count)
		return judge_tunnel(known, to, port);
	if (!is_tcp(context) || !sk || may_go_elsewhere(sk, to))
		return SOCKET_ALLOW;
	caller.ifindex = gated_ifindex(to);
	gate = gates.lookup(&caller.ifindex);
	if (!gate)
		return SOCKET_ALLOW;
	if (gate->mode < MODE_ENFORCE)
		return SOCKET_ALLOW;
	now_ns = bpf_ktime_get_ns();
	if (find_rule(0, true, gate, known, IPPROTO_TCP, port, now_ns) ||
	    is_abandoned(known, now_ns))
		return SOCKET_ALLOW;

	caller.cgroup = bpf_get_current_cgroup_id();
	note_caller(&caller, true, now_ns);
	count = counters.lookup(&caller.ifindex);
	if (count)
		count->packets[DROP(REASON_NODE)]++;
	tell_hook(to, port, IPPROTO_TCP, caller.ifindex, REASON_NODE, now_ns);
	return SOCKET_REFUSE;
}

int hook_connect4(struct bpf_sock_addr *context)
{
	struct address to = map_ipv4(context->user_ip4);

	return judge_connect(context, &to);
}

int hook_connect6(struct bpf_sock_addr *context)
{
	struct address to = ipv6_destination(context);

	return judge_connect(context, &to);
}

int hook_sendmsg4(struct bpf_sock_addr *context)
{
	struct address to = map_ipv4(context->user_ip4);

	return judge_datagram(context, &to);
}

int hook_sendmsg6(struct bpf_sock_addr *context)
{
	struct address to = ipv6_destination(context);

	return judge_datagram(context, &to);
}

/*
 * Frames that skip the interface's queue, or come from an XDP ring, pass no gate. Only from here
 * on: a socket that had it before keeps it.
 */
int hook_setsockopt(struct bpf_sockopt *context)
{
	bool is_evasion =
		(context->level == SOL_PACKET && context->optname == PACKET_QDISC_BYPASS) ||
		(context->level == SOL_XDP &&
		 (context->optname == XDP_TX_RING || context->optname == XDP_UMEM_REG));
	struct address nowhere = {};
	struct config *known;
	__u64 now_ns;

	/* "As it was": else a value of over a page is EFAULT (before Linux 6.5). */
	context->optlen = 0;
	if (!is_evasion)
		return SOCKET_ALLOW;
	known = known_to_node(context);
	now_ns = bpf_ktime_get_ns();
	if (!known || is_abandoned(known, now_ns))
		return SOCKET_ALLOW;
	count_for_node(REASON_EVASION);
	tell_hook(&nowhere, 0, 0, 0, REASON_EVASION, now_ns);
	return SOCKET_REFUSE;
}
