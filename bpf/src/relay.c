/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The kubelet connects to a pod in strict: the hooks rewrite its connect(2) to an address of the
 * relay, which proxies the connection into the pod's namespace. They never reject. The relay's
 * process attaches them, and they end with it: then connect goes to the pod itself and its gate.
 */

#define ICMPV6_NEIGHBOUR_SOLICITATION  135
#define ICMPV6_NEIGHBOUR_ADVERTISEMENT 136

/*
 * The kubelet's own cgroup only. The relay connects from inside the pod, past what the pod itself
 * rejects from outside (a mesh's mTLS, rules of its own). So while the kubelet is not identified,
 * the processes that may be it connect to the gate, as in enforce, and the pod decides.
 */
ALWAYS_INLINE bool is_kubelet_connecting(struct bpf_sock_addr *context)
{
	struct config *node = host_config(context);

	if (!node || !is_tcp(context))
		return false;
	return is_kubelet_cgroup(node, bpf_get_current_cgroup_id());
}

/*
 * Replaces the pod's address by the relay's; false if the connection is not redirected, which is
 * recorded. A socket bound to an interface may reach another pod with this address, so it is not
 * redirected, and the record is an address to which no packet goes.
 */
ALWAYS_INLINE bool redirect(struct bpf_sock_addr *context, struct address *to)
{
	struct bpf_sock *sk = context->sk;
	struct address connected = *to;
	struct address relay;
	__u64 cookie;

	if (!is_kubelet_connecting(context) || !sk || !is_relay_alive())
		return false;
	if (find_relay(to, bpf_ntohs(context->user_port), &relay)) {
		if (!sk->bound_dev_if) {
			*to = relay;
			return true;
		}
		__builtin_memset(&connected, 0, sizeof(connected));
	}
	cookie = bpf_get_socket_cookie(context);
	relay_bypasses.update(&cookie, &connected);
	return false;
}

int relay_connect4(struct bpf_sock_addr *context)
{
	struct address to = map_ipv4(context->user_ip4);

	if (redirect(context, &to))
		context->user_ip4 = to.word[3];
	return SOCKET_ALLOW;
}

int relay_connect6(struct bpf_sock_addr *context)
{
	struct address to = ipv6_destination(context);

	if (redirect(context, &to))
		write_ipv6(context, &to);
	return SOCKET_ALLOW;
}

/* The pod of a relay's address, if this socket is in the host's namespace; otherwise NULL. */
ALWAYS_INLINE struct address *relayed_pod(struct bpf_sock_addr *context, struct address *peer)
{
	struct relay_pod *origin;

	if (!host_config(context))
		return 0;
	origin = relay_pods.lookup(peer);
	if (!origin)
		return 0;
	return &origin->pod;
}

int relay_getpeername4(struct bpf_sock_addr *context)
{
	struct address peer = map_ipv4(context->user_ip4);
	struct address *pod = relayed_pod(context, &peer);

	if (pod)
		context->user_ip4 = pod->word[3];
	return SOCKET_ALLOW;
}

int relay_getpeername6(struct bpf_sock_addr *context)
{
	struct address peer = ipv6_destination(context);
	struct address *pod = relayed_pod(context, &peer);

	if (pod)
		write_ipv6(context, pod);
	return SOCKET_ALLOW;
}

/*
 * tc egress on the host's end of the relay's pair. A pod connects to an address of the relay: gates
 * leave forwarded packets to NetworkPolicy, which has no rules for the relay, and the relay would
 * proxy the connection into another pod. The kubelet's own packets have come in by no interface; a
 * stamp shows nothing here, since a pod without a gate, or another container, may forge it.
 */
int drop_forwarded(struct __sk_buff *skb)
{
	struct gate *gate;

	if (!skb->ingress_ifindex)
		return TCX_NEXT;
	gate = find_gate(skb->ifindex);
	if (gate)
		count_packet(gate->slot, DROP(REASON_RELAY));
	return TCX_DROP;
}

ALWAYS_INLINE bool is_neighbour_discovery(struct __sk_buff *skb, struct packet *packet)
{
	int type = icmp_type(skb, packet);

	if (packet->is_ipv4)
		return false;
	return type == ICMPV6_NEIGHBOUR_SOLICITATION || type == ICMPV6_NEIGHBOUR_ADVERTISEMENT;
}

ALWAYS_INLINE bool is_syn(struct __sk_buff *skb, struct packet *packet)
{
	struct tcp_header *header = header_at(skb, packet->transport_offset, struct tcp_header);

	return !header || opens_connection(header->flags);
}

/*
 * tc ingress on the relay's end of its pair, in the relay's namespace. The kubelet's connection
 * must not open before the pod's, so its SYN is dropped here: the relay's packet socket has seen
 * it, since taps run first, and sends it again when the pod has accepted. Of the rest only TCP and
 * neighbour discovery pass: no router advertisement, and no fragment, which would hide the flags.
 */
int hold_syns(struct __sk_buff *skb)
{
	struct packet packet = {};
	enum reason unread = read_untagged_frame(skb, &packet);

	if (unread == REASON_ARP)
		return TCX_NEXT;
	if (unread == REASON_UNPARSABLE || packet.is_fragment)
		return TCX_DROP;
	if (packet.protocol == IPPROTO_TCP)
		return is_syn(skb, &packet) ? TCX_DROP : TCX_NEXT;
	return is_neighbour_discovery(skb, &packet) ? TCX_NEXT : TCX_DROP;
}
