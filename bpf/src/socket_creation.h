/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * For tracing programs at security_socket_create, which may replace its result (fmod_ret).
 */
#ifndef PODGATE_SOCKET_CREATION_H
#define PODGATE_SOCKET_CREATION_H

#include "kernel_memory.h"

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

#endif
