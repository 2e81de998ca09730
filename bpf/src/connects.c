/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Records the TCP connections that host processes open, for the gates (hairpins.h): at the root
 * cgroup, for every socket of the machine; sockets of other network namespaces return at once.
 */

/* Before tcp_connect copies it to fields that a program may read, only write_seq has it. */
ALWAYS_INLINE bool read_sequence(struct bpf_sock_ops *context, __u32 *sequence)
{
	__u32 only = 0;
	struct connect_layout *layout = connect_layout.lookup(&only);
	__u64 socket;

	return layout && layout->sequence &&
	       read_kernel(&socket, sizeof(socket), (__u64)context + layout->socket) &&
	       read_kernel(sequence, sizeof(*sequence), socket + layout->sequence);
}

/* A cgroup keeps its ancestors for life. */
ALWAYS_INLINE void record_ancestors(__u64 cgroup)
{
	struct cgroup_ancestors ancestors;

	if (connect_cgroups.lookup(&cgroup))
		return;
#pragma unroll
	for (int level = 0; level < CONNECT_LEVELS; level++)
		ancestors.ids[level] = bpf_get_current_ancestor_cgroup_id(level);
	connect_cgroups.update(&cgroup, &ancestors);
}

/* The running task is in connect(2), or sends the first data (TCP Fast Open). */
ALWAYS_INLINE void record_connect(struct bpf_sock_ops *context)
{
	struct host_connect connect = {.sent_ns = bpf_ktime_get_ns()};
	__u32 sequence;

	if (!read_sequence(context, &sequence))
		return;
	connect.cgroup = bpf_get_current_cgroup_id();
	record_ancestors(connect.cgroup);
	sequence = bpf_htonl(sequence);
	host_connects.update(&sequence, &connect);
	bpf_sock_ops_cb_flags_set(context,
				  context->bpf_sock_ops_cb_flags | BPF_SOCK_OPS_RTO_CB_FLAG);
}

/* Before a SYN is sent again, by a timer. A record that was displaced comes back without cgroup. */
ALWAYS_INLINE void renew_connect(struct bpf_sock_ops *context)
{
	struct host_connect again = {.sent_ns = bpf_ktime_get_ns()};
	__be32 sequence = bpf_htonl(context->snd_una);
	struct host_connect *connect;

	if (context->state != BPF_TCP_SYN_SENT)
		return;
	connect = host_connects.lookup(&sequence);
	if (connect)
		connect->sent_ns = again.sent_ns;
	else
		host_connects.update(&sequence, &again);
}

/*
 * The SYN is acknowledged. Not when the socket is closed: the process can do that while its SYN,
 * which may have data, is under way.
 */
ALWAYS_INLINE void forget_connect(struct bpf_sock_ops *context)
{
	__be32 sequence = bpf_htonl(context->snd_una - 1);

	host_connects.delete(&sequence);
}

int hook_sockops(struct bpf_sock_ops *context)
{
	if (!host_config(context))
		return SOCKET_ALLOW;
	if (context->op == BPF_SOCK_OPS_TCP_CONNECT_CB)
		record_connect(context);
	else if (context->op == BPF_SOCK_OPS_RTO_CB)
		renew_connect(context);
	else if (context->op == BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB)
		forget_connect(context);
	return SOCKET_ALLOW;
}
