/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Follows the kubelet into the cgroup that its service manager makes at each start, without an
 * agent. The tracepoint runs before mkdir(2) returns, so before a process can be in the cgroup.
 * Only the unit's own path counts, in the hierarchy of cgroup v2, which cannot rename cgroups.
 */

/* The number of the v2 hierarchy, the first in the kernel's list; those of v1 have others. */
#define CGROUP2_HIERARCHY 0

/* raw_tracepoint cgroup_mkdir: its arguments are a struct cgroup, and its path from the root. */
int follow_kubelet(struct bpf_raw_tracepoint_args *context)
{
	__u64 group = context->args[0], node = 0, root = 0, id = 0;
	__u64 path[KUBELET_PATH_BYTES / sizeof(__u64)] = {};
	__u32 only = 0, hierarchy = CGROUP2_HIERARCHY + 1;
	struct kubelet_unit *unit = kubelet_unit.lookup(&only);
	struct kubelet_remade *remade = kubelet_remade.lookup(&only);

	if (!unit || !remade || !unit->number)
		return 0;
	if (!read_kernel_string(path, sizeof(path), context->args[1]))
		return 0;
#pragma unroll
	for (int i = 0; i < KUBELET_PATH_BYTES / sizeof(__u64); i++) {
		if (path[i] != ((__u64 *)unit->path)[i])
			return 0;
	}
	if (!read_kernel(&root, sizeof(root), group + unit->root_offset) ||
	    !read_kernel(&hierarchy, sizeof(hierarchy), root + unit->hierarchy_offset) ||
	    hierarchy != CGROUP2_HIERARCHY)
		return 0;
	if (!read_kernel(&node, sizeof(node), group + unit->node_offset) ||
	    !read_kernel(&id, sizeof(id), node + unit->id_offset))
		return 0;
	remade->cgroup = id;
	*(volatile __u64 *)&remade->unit = unit->number;
	return 0;
}
