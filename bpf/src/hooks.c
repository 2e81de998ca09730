/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Hooks at the root cgroup, so for every socket of the machine; sockets of other network namespaces
 * return at once. A host process connects to a pod that no rule allows: it gets EPERM at once and
 * is reported by name; without the hook it gets a timeout. The gates enforce, hooks or not.
 *
 * In connect the relay's hooks (relay.c) may run before or after these, which then see the relay's
 * address or the pod's: each has a gate. Translation of services (services.c) runs first.
 */
#define SOL_SOCKET	    1
#define SO_PRIORITY	    12
#define SOL_PACKET	    263
#define PACKET_QDISC_BYPASS 20
#define SOL_XDP		    283
#define XDP_TX_RING	    3
#define XDP_UMEM_REG	    4

ALWAYS_INLINE void emit_hook_event(struct address *to, __u16 port, __u8 protocol, __u32 ifindex,
				   enum reason reason, __u64 now_ns)
{
	struct drop_event *event = reserve_event(now_ns);

	if (!event)
		return;
	event->cgroup = bpf_get_current_cgroup_id();
	event->destination = *to;
	event->destination_port = port;
	event->ifindex = ifindex;
	event->protocol = protocol;
	event->verdict = VERDICT_DROP;
	event->reason = reason;
	set_event_process(event);
	drop_events.ringbuf_submit(event, 0);
}

/*
 * An unprivileged process can encapsulate a packet for a pod in UDP to a tunnel's port. The port
 * decides, not the address: another node's tunnel would deliver the packet as well.
 */
ALWAYS_INLINE int check_tunnel_port(struct config *node, struct address *to, __u16 port)
{
	__u64 now_ns = bpf_ktime_get_ns();

	if (!is_tunnel_port(node, port) || is_dead_man_expired(node, now_ns))
		return SOCKET_ALLOW;
	count_host_drop(REASON_TUNNEL);
	emit_hook_event(to, port, IPPROTO_UDP, 0, REASON_TUNNEL, now_ns);
	return SOCKET_REJECT;
}

ALWAYS_INLINE int check_datagram(struct bpf_sock_addr *context, struct address *to)
{
	struct config *node = host_config(context);

	if (!node || context->protocol != IPPROTO_UDP || !node->tunnel_port_count)
		return SOCKET_ALLOW;
	return check_tunnel_port(node, to, bpf_ntohs(context->user_port));
}

/*
 * Packets of a socket bound to an interface may take another path than to the pod. Not over IPv6:
 * there a router may send them back, and the kernel does not drop them as it drops IPv4's martians.
 */
ALWAYS_INLINE bool may_use_other_path(struct bpf_sock *sk, struct address *to)
{
	return sk->bound_dev_if && to->word[2] == bpf_htonl(0xffff) && !to->word[0] && !to->word[1];
}

/*
 * The interface whose gate decides which sources may connect: the pod's, or the relay's pair.
 * 0: no pod has the address, or several have it.
 */
ALWAYS_INLINE __u32 gated_ifindex(struct address *to)
{
	__u32 *ifindex = addresses.lookup(to);
	struct relay_pod *origin;

	if (ifindex)
		return *ifindex;
	origin = relay_pods.lookup(to);
	return origin ? origin->ifindex : 0;
}

/*
 * The default-deny table matches the kubelet's cgroup by an id that only an agent can change. So
 * while none does, the kubelet's sockets get a priority that the table admits; the table removes it
 * before any queue or capture sees it.
 */
ALWAYS_INLINE void set_kubelet_priority(struct bpf_sock_addr *context, struct config *node)
{
	__u64 cgroup = bpf_get_current_cgroup_id();
	struct kubelet_unit *unit;
	__u32 only = 0;
	int priority;

	if (!node->kubelet_unit || !is_tcp(context) || !is_kubelet_cgroup(node, cgroup))
		return;
	if (cgroup == node->kubelet_cgroup && !is_stale(node, bpf_ktime_get_ns()))
		return;
	unit = kubelet_unit.lookup(&only);
	if (!unit || !unit->priority)
		return;
	priority = unit->priority;
	bpf_setsockopt(context, SOL_SOCKET, SO_PRIORITY, &priority, sizeof(priority));
}

/*
 * A pod's author sends the kubelet to any address by `host` of a probe or hook. Not without an
 * agent, which would know that the pod is gone.
 */
ALWAYS_INLINE bool is_denied_host_probe(struct config *node, struct address *to, __u16 port)
{
	struct host_probe probe = {.address = *to, .port = port};
	__u64 *count = denied_host_probes.lookup(&probe);

	if (!count || !is_kubelet_cgroup(node, bpf_get_current_cgroup_id()) ||
	    is_stale(node, bpf_ktime_get_ns()))
		return false;
	__sync_fetch_and_add(count, 1);
	return true;
}

/* Rejects TCP only: packets of other protocols may be replies to the pod, as the gate can see. */
ALWAYS_INLINE int check_connect(struct bpf_sock_addr *context, struct address *to)
{
	struct config *node = host_config(context);
	__u16 port = bpf_ntohs(context->user_port);
	struct drop_source_key source = {.port = port, .protocol = IPPROTO_TCP};
	struct bpf_sock *sk = context->sk;
	struct gate *gate;
	bool is_kubelet;
	__u64 now_ns;

	if (!node)
		return SOCKET_ALLOW;
	set_kubelet_priority(context, node);
	if (context->protocol == IPPROTO_UDP && node->tunnel_port_count)
		return check_tunnel_port(node, to, port);
	if (is_tcp(context) && is_denied_host_probe(node, to, port))
		return SOCKET_REJECT;
	if (!is_tcp(context) || !sk || may_use_other_path(sk, to))
		return SOCKET_ALLOW;
	source.ifindex = gated_ifindex(to);
	gate = find_gate(source.ifindex);
	if (!gate)
		return SOCKET_ALLOW;
	if (gate->mode < MODE_ENFORCE)
		return SOCKET_ALLOW;
	now_ns = bpf_ktime_get_ns();
	source.cgroup = bpf_get_current_cgroup_id();
	source.mode = gate->mode;
	is_kubelet = may_be_kubelet_at(gate, 0, true, node, source.cgroup, now_ns);
	if (find_rule(0, true, 0, gate, source.cgroup, is_kubelet, IPPROTO_TCP, port) ||
	    is_dead_man_expired(node, now_ns))
		return SOCKET_ALLOW;

	record_drop_source(&source, true, now_ns);
	count_packet(gate->slot, DROP(REASON_NODE));
	emit_hook_event(to, port, IPPROTO_TCP, source.ifindex, REASON_NODE, now_ns);
	return SOCKET_REJECT;
}

int hook_connect4(struct bpf_sock_addr *context)
{
	struct address to = map_ipv4(context->user_ip4);

	return check_connect(context, &to);
}

int hook_connect6(struct bpf_sock_addr *context)
{
	struct address to = ipv6_destination(context);

	return check_connect(context, &to);
}

int hook_sendmsg4(struct bpf_sock_addr *context)
{
	struct address to = map_ipv4(context->user_ip4), source = map_ipv4(context->msg_src_ip4);

	if (context->msg_src_ip4 && host_config(context) && !record_source(context, &source))
		return SOCKET_REJECT;
	return check_datagram(context, &to);
}

int hook_sendmsg6(struct bpf_sock_addr *context)
{
	struct address to = ipv6_destination(context), unspecified = {};
	struct address source = {{context->msg_src_ip6[0], context->msg_src_ip6[1],
				  context->msg_src_ip6[2], context->msg_src_ip6[3]}};

	if (!is_same_address(&source, &unspecified) && host_config(context) &&
	    !record_source(context, &source))
		return SOCKET_REJECT;
	return check_datagram(context, &to);
}

/*
 * Frames that skip the interface's queue, or come from an XDP ring, pass no gate. A socket that set
 * such an option before the hook was attached keeps it.
 */
int hook_setsockopt(struct bpf_sockopt *context)
{
	bool is_bypass_option =
		(context->level == SOL_PACKET && context->optname == PACKET_QDISC_BYPASS) ||
		(context->level == SOL_XDP &&
		 (context->optname == XDP_TX_RING || context->optname == XDP_UMEM_REG));
	struct address nowhere = {};
	struct config *node;
	__u64 now_ns;

	/* "Unchanged": otherwise a value of over a page is EFAULT (before Linux 6.5). */
	context->optlen = 0;
	if (!is_bypass_option)
		return SOCKET_ALLOW;
	node = host_config(context);
	now_ns = bpf_ktime_get_ns();
	if (!node || is_dead_man_expired(node, now_ns))
		return SOCKET_ALLOW;
	count_host_drop(REASON_EVASION);
	emit_hook_event(&nowhere, 0, 0, 0, REASON_EVASION, now_ns);
	return SOCKET_REJECT;
}

/*
 * Marks the raw sockets of processes (raw_sockets.h), and rejects those that pods must not have.
 * Packet sockets do not run this hook.
 */
int hook_create(struct bpf_sock *context)
{
	struct socket_history *history;
	struct config *node;

	if (context->type != SOCK_RAW)
		return SOCKET_ALLOW;
	node = host_config(context);
	if (!node)
		return SOCKET_ALLOW;
	if (!check_raw_socket(node, context->family))
		return SOCKET_REJECT;
	history = socket_histories.sk_storage_get(context, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!history) /* no memory */
		return SOCKET_REJECT;
	history->is_raw = true;
	return SOCKET_ALLOW;
}

int hook_release(struct bpf_sock *context)
{
	__u64 cookie;

	if (context->type != SOCK_RAW)
		return SOCKET_ALLOW;
	cookie = bpf_get_socket_cookie(context);
	old_raw_sockets.delete(&cookie);
	return SOCKET_ALLOW;
}
