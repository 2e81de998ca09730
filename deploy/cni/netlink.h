/* SPDX-License-Identifier: Apache-2.0 */
/* Interfaces and addresses by rtnetlink, and filters on a clsact qdisc. */
#ifndef PODGATE_CNI_NETLINK_H
#define PODGATE_CNI_NETLINK_H

#include <linux/types.h>
#include <stdbool.h>
#include <stddef.h>

#include "../../bpf/src/abi.h"

/* More than any pod has. */
#define POD_LINKS 64

struct link {
	int ifindex;
	int peer;      /* ifindex of the other end, in its own namespace; 0: none */
	int peer_nsid; /* the host's nsid of that namespace; -1: this one, or unknown */
	bool is_veth;
};

struct links {
	size_t count;
	struct link all[POD_LINKS];
};

/* A gate lists no more. */
#define POD_ADDRESSES (GATE_ADDRESSES + MAX_GATE_ADDRESSES)

struct addresses {
	size_t count; /* may be more than are in `all` */
	struct address all[POD_ADDRESSES];
};

/* A socket in the calling thread's namespace, which waits 5 s at most; -1 with an error set. */
int netlink_open(void);

/* These set an error and return false. */
bool read_links(int netlink, struct links *found);
bool read_link(int netlink, int ifindex, struct link *found);
bool read_addresses(int netlink, struct addresses *found); /* all but loopback ones */
bool read_nsid(int netlink, int netns, int *nsid);

/* As in bpf/clsact.py; an existing filter stays. is_egress: towards the pod. */
bool add_filter(int netlink, int ifindex, bool is_egress, int program, const char *name);
bool has_filter(int netlink, int ifindex, bool is_egress);
void delete_filter(int netlink, int ifindex, bool is_egress);

#endif
