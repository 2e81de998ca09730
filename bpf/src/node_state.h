/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * What the node's configuration states: which sockets are the host's, which cgroup is the
 * kubelet's, and whether the agent is missing.
 */
#ifndef PODGATE_NODE_STATE_H
#define PODGATE_NODE_STATE_H

#include "clock.h"

/* The configuration, if this socket is in the host's network namespace; otherwise NULL. */
ALWAYS_INLINE struct config *host_config(void *context)
{
	__u32 only = 0;
	struct config *node = config.lookup(&only);

	if (!node || !node->node_netns || bpf_get_netns_cookie(context) != node->node_netns)
		return 0;
	return node;
}

/* The newest cgroup at the path of the followed unit (kubelet.c); 0: none. */
ALWAYS_INLINE __u64 remade_cgroup(struct config *node)
{
	__u32 only = 0;
	struct kubelet_remade *remade;

	if (!node->kubelet_unit)
		return 0;
	remade = kubelet_remade.lookup(&only);
	return remade && remade->unit == node->kubelet_unit ? remade->cgroup : 0;
}

/* Whether this is the kubelet's cgroup: that of the agent's search, or the unit's made since. */
ALWAYS_INLINE bool is_kubelet_cgroup(struct config *node, __u64 cgroup)
{
	if (!cgroup)
		return false;
	return cgroup == node->kubelet_cgroup || cgroup == remade_cgroup(node);
}

ALWAYS_INLINE bool is_stale(struct config *node, __u64 now_ns)
{
	return node->heartbeat_ns && node->stale_after_ns &&
	       age_ns(now_ns, node->heartbeat_ns) >= node->stale_after_ns;
}

/* Whether the agent has been gone longer than the dead man's time, after which all gates open. */
ALWAYS_INLINE bool is_dead_man_expired(struct config *node, __u64 now_ns)
{
	return node->heartbeat_ns && node->dead_man_ns &&
	       age_ns(now_ns, node->heartbeat_ns) > node->dead_man_ns;
}

#endif
