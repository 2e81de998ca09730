/* SPDX-License-Identifier: Apache-2.0 */
/* One pod's gates, attached and removed as by bpf/gates.py, so that the agent adopts them. */
#ifndef PODGATE_CNI_GATE_H
#define PODGATE_CNI_GATE_H

#include <linux/types.h>
#include <stdbool.h>

#include "../../bpf/src/abi.h"

/* The agent's settings for new pods (agent/cni/state.py). */
struct gate_options {
	enum mode mode;
	bool is_tcx;	   /* otherwise clsact */
	char programs[33]; /* the directory of the programs that it uses */
};

/* The pinned objects, opened for one call of the plugin. */
struct installation {
	const char *bpffs;
	int slots;
	int gates;
	int counters;
	int frequent_counts;
	int more_rules;
	int more_addresses;
	int addresses;
	int replies;
	int egress; /* programs; -1 unless opened */
	int ingress;
};

/* The pod's network namespace; both are descriptors. */
struct pod_netns {
	int netns;
	int netlink; /* of the host */
};

/* These set an error and return false. */
bool open_installation(struct installation *opened, const char *bpffs);
bool open_programs(struct installation *opened, const struct gate_options *options);
bool open_pod_netns(struct pod_netns *opened, const char *netns);

/* Attach a gate to every veth from host to pod. Existing gates of the agent stay. */
bool gate_pod(const struct installation *at, const struct pod_netns *pod,
	      const struct gate_options *options);

/* Whether each of the pod's gates is complete, or missing: a pod may have none by its mode. */
bool check_pod(const struct installation *at, const struct pod_netns *pod);

/* Remove the gate of one interface, named as in the pod. */
bool release_pod(const struct installation *at, const struct pod_netns *pod, const char *name);

/* Remove entries and links of deleted interfaces. */
void remove_stale(const struct installation *at);

#endif
