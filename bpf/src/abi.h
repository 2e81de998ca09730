/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * What the kernel side and user space share: every struct and enum here has its twin in bpf/abi.py
 * or bpf/verdicts.py, and tests compare the two. A change of layout or of an enumerator's number is
 * a new schema: raise SCHEMA in bpf/abi.py.
 */
#ifndef PODGATE_ABI_H
#define PODGATE_ABI_H

/* An IPv6 address, or an IPv4 one as ::ffff:a.b.c.d (RFC 4291, 2.5.5.2); network byte order. */
struct address {
	__u32 word[4];
};

enum mode {
	MODE_OFF,
	MODE_AUDIT,
	MODE_ENFORCE,
	MODE_STRICT,
};

enum verdict {
	VERDICT_PASS,
	VERDICT_DROP,
	VERDICT_WOULD_DROP, /* passed, because the pod is in audit */
	VERDICT_COUNT,
};

/* The one word that says why. Numbers are kept for ever: counters outlive the agent. */
enum reason {
	REASON_ARP,	    /* address resolution */
	REASON_CONTROL,	    /* ICMP errors, neighbour discovery, MLD */
	REASON_ESTABLISHED, /* TCP that opens nothing */
	REASON_UNJUDGED,    /* a protocol that the gate does not judge yet */
	REASON_UNPARSABLE,  /* not to be read to its end, so not to be trusted */
	REASON_FRAGMENT,    /* a fragment of a TCP packet: it hides the flags */
	REASON_STRAY,	    /* to an address that is not this pod's (a flooded copy) */
	REASON_NODE,	    /* the node started it */
	REASON_KERNEL,	    /* made by the kernel: no socket is known */
	REASON_COUNT,
};

/* Room for reasons to come, so that a new one does not change the layout. */
#define REASON_SLOTS 32

/* Two families and some secondary addresses; a pod with more is refused by user space. */
#define GATE_ADDRESSES 16

/* What one gate knows: the value of the gates map, keyed by ifindex, replaced as a whole. */
struct gate {
	__u32 mode;
	__u32 address_count;
	__u32 made_qdisc; /* user space's own note: the clsact qdisc is ours to remove */
	__u32 pad;
	struct address addresses[GATE_ADDRESSES];
};

/* Node-sent packets of one gate, per CPU. Forwarded packets are not counted: the device does. */
struct counters {
	__u64 packets[VERDICT_COUNT * REASON_SLOTS];
};

#define MAX_GATES 4096

/* One bit per ifindex. Never reused before 2^31, so a node may well pass a million; 1 MiB. */
#define ORIGIN_IFINDEXES (1 << 23)
#define ORIGIN_WORDS	 (ORIGIN_IFINDEXES / 64)

#endif
