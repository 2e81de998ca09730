/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Packet sockets run no cgroup hook when they are created, so a tracing program does this: before
 * security_socket_create, whose result it may replace (fmod_ret, Linux 5.7; on arm64 6.4). That
 * needs no security module. socket(2) with SOCK_PACKET comes here as AF_PACKET as well.
 */
#define EPERM 1

/* The arguments of security_socket_create, of 8 bytes each. */
struct socket_creation {
	__u64 family;
	__u64 type;
	__u64 protocol;
	__u64 is_kernels;
	__u64 result;
};

/* The inode number of the running task's network namespace; 0 if it cannot be read. */
ALWAYS_INLINE __u32 current_netns(struct raw_socket_policy *policy)
{
	__u64 task = bpf_get_current_task(), proxy = 0, netns = 0;
	__u32 inode = 0;

	if (!read_kernel(&proxy, sizeof(proxy), task + policy->nsproxy_offset) ||
	    !read_kernel(&netns, sizeof(netns), proxy + policy->netns_offset) ||
	    !read_kernel(&inode, sizeof(inode), netns + policy->inode_offset))
		return 0;
	return inode;
}

int create_packet_socket(struct socket_creation *context)
{
	__u32 only = 0;
	struct raw_socket_policy *policy;
	struct config *node;

	if ((__u32)context->family != AF_PACKET || (__u32)context->is_kernels)
		return 0;
	policy = raw_socket_policy.lookup(&only);
	node = config.lookup(&only);
	if (!policy || !node || !policy->node_netns || current_netns(policy) != policy->node_netns)
		return 0;
	return check_raw_socket(node, AF_PACKET) ? 0 : -EPERM;
}
