/* SPDX-License-Identifier: Apache-2.0 */
/* One pod's gates, made and removed as bpf/gates.py does, so that the agent takes them for its own.
 */
#ifndef PODGATE_CNI_GATE_H
#define PODGATE_CNI_GATE_H

#include <linux/types.h>
#include <stdbool.h>

#include "../../bpf/src/abi.h"

/* What the agent says of new pods (agent/cni/state.py). */
struct wanted {
	enum mode mode;
	bool is_tcx;	   /* else by clsact */
	char programs[33]; /* the directory of the programs that it uses */
};

/* Where everything is pinned; opened for one call of the plugin. */
struct installation {
	const char *bpffs;
	int gates;
	int counters;
	int addresses;
	int replies;
	int egress; /* programs; -1 unless opened */
	int ingress;
};

/* The pod's side: both are descriptors. */
struct pod {
	int netns;
	int netlink; /* of the node */
};

/* These note a problem and return false. */
bool open_installation(struct installation *opened, const char *bpffs);
bool open_programs(struct installation *opened, const struct wanted *wanted);
bool open_pod(struct pod *opened, const char *netns);

/* Gate every veth that leads from the node to the pod. What the agent has done already stays. */
bool gate_pod(const struct installation *at, const struct pod *pod, const struct wanted *wanted);

/* Whether each of the pod's gates is whole, or not there at all: a pod may be meant to have none.
 */
bool check_pod(const struct installation *at, const struct pod *pod);

/* Remove the gate of one interface, named as in the pod. */
bool release_pod(const struct installation *at, const struct pod *pod, const char *name);

/* Remove what is left of gates whose interface is gone. */
void sweep(const struct installation *at);

#endif
