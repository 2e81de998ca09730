/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The tables of HostEgressPolicies. bpf/host_egress.py has the twins of these declarations.
 *
 * All of them change in one step: user space writes subjects and rules of the next version, and
 * then the state that names it.
 */
#ifndef PODGATE_HOST_EGRESS_H
#define PODGATE_HOST_EGRESS_H

#include "abi.h"

/* One bit of a mask each. */
#define EGRESS_POLICIES 64
#define EGRESS_RULES	128

/* Cgroups that policies name are at few depths: of units, of the kubelet's classes, of pods. */
#define EGRESS_LEVELS 7

#define MAX_EGRESS_SUBJECTS 16384
#define MAX_EGRESS_SOURCES  4096

/*
 * The state, in one number that is written in one step: the version in the lowest byte, and then
 * the depths of subjects below the root, ascending, 0 for none. 0: no policy.
 */
#define EGRESS_VERSION(state)	    ((state) & 0xff)
#define EGRESS_LEVEL(state, number) ((state) >> (8 * ((number) + 1)) & 0xff)

struct egress_subject_key {
	__u64 cgroup; /* id */
	__u64 version;
};

/* Masks of policies for this cgroup and all below it, of which the nearest has the last word. */
struct egress_subject {
	__u64 denied;
	__u64 excepted;
};

/* A destination. Addresses match if they are equal where the mask has a bit. */
struct egress_rule {
	struct address address;
	struct address mask;
	__u32 policy; /* its bit's number */
	__u16 first_port;
	__u16 last_port; /* inclusive, host byte order; 0 to 65535 for all */
	__u8 protocol;	 /* 0 for all */
	__u8 is_nodes;	 /* 1: only the node's own addresses and the loopback */
	__u16 pad;
};

/* enforced: mask of policies; the others only count. */
struct egress_rules {
	__u64 enforced;
	__u32 count;
	__u32 pad;
	struct egress_rule rules[EGRESS_RULES];
};

/* A source by policy. */
struct egress_source_key {
	__u64 cgroup; /* id */
	__u32 policy;
	__u8 protocol;
	__u8 verdict;
	__u16 pad;
};

/* For readers without an agent; empty: the number is free. */
struct egress_policy {
	char name[256];
};

/* What the kernel side knows of a socket. */
struct egress_socket {
	__u32 counted;	   /* number of the policy plus 1 for which it is counted in audit */
	__u32 is_accepted; /* 1: its peer opened the connection */
};

BPF_TABLE("array", __u32, __u64, egress_state, 1);
BPF_F_TABLE("hash", struct egress_subject_key, struct egress_subject, egress_subjects,
	    MAX_EGRESS_SUBJECTS, BPF_F_NO_PREALLOC);
/* By the version's lowest bit. */
BPF_TABLE("array", __u32, struct egress_rules, egress_rules, 2);
BPF_TABLE("array", __u32, struct egress_policy, egress_policies, EGRESS_POLICIES);
/* By policy and verdict: policy * VERDICT_COUNT + verdict. */
BPF_TABLE("array", __u32, __u64, egress_counts, EGRESS_POLICIES *VERDICT_COUNT);
BPF_TABLE("lru_hash", struct egress_source_key, struct drop_source, egress_sources,
	  MAX_EGRESS_SOURCES);
BPF_SK_STORAGE(egress_sockets, struct egress_socket);

#endif
