/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Packet sockets run no cgroup hook when they are created, so a tracing program does this: before
 * security_socket_create, whose result it may replace (fmod_ret, Linux 5.7; on arm64 6.4). That
 * needs no security module. socket(2) with SOCK_PACKET comes here as AF_PACKET as well.
 */
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
