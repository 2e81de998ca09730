/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Raw and packet sockets of the host's network namespace that pods' containers create. Those of
 * cgroups that no HostAccessPolicy names are counted by source, and with --raw-sockets=deny-pods
 * rejected. Processes outside the cgroup of pods are not concerned: the kubelet, the container
 * runtime, the host's services.
 */
#ifndef PODGATE_RAW_SOCKET_POLICY_H
#define PODGATE_RAW_SOCKET_POLICY_H

ALWAYS_INLINE bool is_in_pod(struct config *node)
{
	return node->pods_cgroup &&
	       bpf_get_current_ancestor_cgroup_id(node->pods_cgroup_level) == node->pods_cgroup;
}

/* Whether a policy names the running task's cgroup, or one above it with all that it contains. */
ALWAYS_INLINE bool may_create_raw_sockets(__u64 cgroup)
{
	__u64 ancestor;
	__u32 *scope;

	if (raw_socket_creators.lookup(&cgroup))
		return true;
#pragma clang loop unroll(disable)
	for (int level = 0; level < MAX_CGROUP_LEVELS; level++) {
		ancestor = bpf_get_current_ancestor_cgroup_id(level);
		if (!ancestor)
			break;
		scope = raw_socket_creators.lookup(&ancestor);
		if (scope && *scope == CREATORS_SUBTREE)
			return true;
	}
	return false;
}

ALWAYS_INLINE void record_raw_socket(__u64 cgroup, __u16 family, __u8 verdict, __u64 now_ns)
{
	struct raw_socket_source_key key = {.cgroup = cgroup, .family = family, .verdict = verdict};
	struct drop_source new_source = {.first_ns = now_ns, .last_ns = now_ns, .count = 1};
	__u32 number = family * VERDICT_COUNT + verdict;
	struct drop_source *source = raw_socket_sources.lookup(&key);
	__u64 *count = raw_socket_counts.lookup(&number);

	if (count)
		__sync_fetch_and_add(count, 1);
	if (source) {
		source->last_ns = now_ns;
		__sync_fetch_and_add(&source->count, 1);
		return;
	}
	bpf_get_current_comm(&new_source.process_name, sizeof(new_source.process_name));
	raw_socket_sources.insert(&key, &new_source);
}

/* The running task creates a raw or packet socket of the host's namespace: whether it may. */
ALWAYS_INLINE bool check_raw_socket(struct config *node, __u16 family)
{
	__u64 cgroup = bpf_get_current_cgroup_id(), now_ns = bpf_ktime_get_ns();
	__u32 only = 0;
	struct raw_socket_policy *policy = raw_socket_policy.lookup(&only);
	__u8 verdict = VERDICT_WOULD_DROP;

	if (!policy || !is_in_pod(node) || may_create_raw_sockets(cgroup))
		return true;
	if (policy->denies_pods && !is_dead_man_expired(node, now_ns))
		verdict = VERDICT_DROP;
	record_raw_socket(cgroup, family, verdict, now_ns);
	return verdict != VERDICT_DROP;
}

#endif
