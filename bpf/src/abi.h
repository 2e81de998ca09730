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
	REASON_REPLY, /* answers what the pod asked, or goes on with a datagram that was let in */
	REASON_RULE,  /* a rule lets this sender in */
	REASON_PROBE, /* the kubelet, to what the pod declares */
	REASON_GRACE, /* may answer what the pod asked before the gate was there */
	REASON_DEAD_MAN,   /* no agent for so long that everything passes */
	REASON_UNPARSABLE, /* not to be read to its end, so not to be trusted */
	REASON_FRAGMENT,   /* a fragment of a TCP packet: it hides the flags */
	REASON_STRAY,	   /* to an address that is not this pod's (a flooded copy) */
	REASON_NODE,	   /* the node started it */
	REASON_KERNEL,	   /* made by the kernel: no socket is known */
	REASON_TUNNEL,	   /* wrapped in the node's own tunnel, to come out as forwarded */
	REASON_EVASION,	   /* a packet socket asked for a way that passes no gate */
	REASON_PATH_TEST,  /* the agent asks whether this gate is on the way: TCP to port 0 */
	REASON_SWITCH, /* no socket is known, as when Open vSwitch puts in again what others sent */
	REASON_FORWARDED, /* a fragment of what others sent, which lost how it came in */
	REASON_RELAY,	  /* to the relay, from others than the node */
	REASON_COUNT,
};

/* Room for reasons to come, so that a new one does not change the layout. */
#define REASON_SLOTS 32

/* Two families and some secondary addresses; a pod with more is refused by user space. */
#define GATE_ADDRESSES 16

/* Whom a rule lets in. */
enum source_kind {
	SOURCE_ANY,	 /* whatever the node sends */
	SOURCE_KUBELET,	 /* sockets of the kubelet's cgroup, whose id is in struct config */
	SOURCE_CGROUP,	 /* sockets of exactly this cgroup */
	SOURCE_ANCESTOR, /* sockets of this cgroup and of all below it */
	SOURCE_KERNEL,	 /* the kernel's own: no socket */
	SOURCE_COUNT,
};

/*
 * An exception: this sender may start flows to this pod. A socket's cgroup is that of its creator
 * at socket(2), so it is the same for retransmits, moved processes and passed descriptors.
 */
struct rule {
	__u64 cgroup; /* id, for SOURCE_CGROUP and SOURCE_ANCESTOR */
	__u32 id;     /* key of its hit counter; 0 for none */
	__u32 level;  /* of the ancestor; the root's is 0 */
	__u16 first_port;
	__u16 last_port; /* inclusive, host byte order; 0 to 65535 for protocols without ports */
	__u8 source_kind;
	__u8 protocol; /* 0 for all */
	__u16 pad;
};

/* More would be checked for each opening packet; user space merges and refuses the rest. */
#define GATE_RULES 32

/* In a gate's flags: every address behind the interface is its own, as with the relay's range. */
#define GATE_ANY_ADDRESS 1

/* What one gate knows: the value of the gates map, keyed by ifindex, replaced as a whole. */
struct gate {
	__u32 mode;
	__u32 address_count;
	__u32 rule_count;
	__u16 flags;
	__u16 claimed_count;  /* the last of the addresses: nobody else goes by those */
	__u64 grace_until_ns; /* CLOCK_MONOTONIC: until then what is not TCP may be an answer */
	struct address addresses[GATE_ADDRESSES];
	struct rule rules[GATE_RULES];
};

/* Of the node's own tunnels (VXLAN, Geneve, ...): one for each kind is usual. */
#define TUNNEL_PORTS 8

/* What all gates and hooks know. Times are CLOCK_MONOTONIC in nanoseconds. */
struct config {
	__u64 kubelet_cgroup; /* id; 0: not known */
	__u64 pods_cgroup;    /* id of the cgroup above all pods'; 0: not known */
	__u64 heartbeat_ns;   /* when the agent last said that it is there; 0: not yet */
	__u64 stale_after_ns; /* after so long the kubelet may have another cgroup; 0: never */
	__u64 dead_man_ns;    /* after so long everything passes; 0: never */
	__u64 node_netns;     /* cookie of the node's network namespace; 0: not known */
	__u32 pods_cgroup_level;
	__u32 tunnel_port_count;
	__u16 tunnel_ports[TUNNEL_PORTS]; /* UDP, host byte order */
	__u32 has_ovs;			  /* 1: an Open vSwitch datapath is on the node */
	__u32 pad;
};

/* Who started what to whom: kept for each combination, so that no rare caller is ever missed. */
struct drop_source_key {
	__u64 cgroup; /* id; 0: no socket */
	__u32 ifindex;
	__u16 port; /* the pod's, host byte order; 0 for protocols without */
	__u8 protocol;
	__u8 pad;
};

/* What is known of it. Times are CLOCK_MONOTONIC in nanoseconds. */
struct drop_source {
	__u64 first_ns;
	__u64 last_ns;
	__u64 count;	       /* packets */
	char process_name[16]; /* of the process at first sight; empty where the kernel does not say
				*/
};

/* One refusal, or would-be refusal, as it happened: a sample, limited in the kernel. */
struct drop_event {
	__u64 at_ns;	       /* CLOCK_MONOTONIC */
	__u64 cgroup;	       /* id of the sender's; 0: no socket */
	struct address source; /* all 0: not known (yet) */
	struct address destination;
	__u32 ifindex; /* of the gate; 0: a hook, before any interface is chosen */
	__u32 pid;     /* id, as the node's first PID namespace numbers it; 0: not known */
	__u16 source_port;
	__u16 destination_port; /* host byte order */
	__u8 protocol;
	__u8 verdict;
	__u8 reason;
	__u8 pad;
	char process_name[16]; /* of the process; empty: not known */
};

/* 64 KiB hold 600 events; a reader that comes by every second misses none of those allowed. */
#define EVENT_RING_BYTES  65536
#define EVENT_WINDOW_NS	  (100ULL * 1000 * 1000)
#define EVENTS_PER_WINDOW 16 /* of each CPU */

struct event_budget {
	__u64 since_ns; /* start of this window */
	__u64 remaining;
	__u64 suppressed; /* events not sent, since the map was created */
};

/* A conversation that is not TCP, as the pod sees it. Both ports of ICMP: the echo identifier. */
struct flow {
	struct address pod;
	struct address peer; /* all 0: whoever answers what was sent to a group */
	__be16 pod_port;
	__be16 peer_port;
	__u8 protocol;
	__u8 pad[3];
} __attribute__((aligned(8)));

/* The pod's newest flow of those that fall on this slot. */
struct reply_slot {
	struct flow flow;
	__u64 sent_ns; /* CLOCK_MONOTONIC */
};

/* Of each pod's own, so that none can evict its neighbour's: 48 KiB a pod. A power of two. */
#define REPLY_SLOTS 1024

/* As long as conntrack remembers a UDP stream by default (nf_conntrack_udp_timeout_stream). */
#define REPLY_LIFETIME_NS (120ULL * 1000 * 1000 * 1000)

/* Node-sent packets of one gate, per CPU. Forwarded packets are not counted: the device does. */
struct counters {
	__u64 packets[VERDICT_COUNT * REASON_SLOTS];
};

/* What the kubelet may mean to reach: a pod's port. */
struct relay_target_key {
	struct address pod;
	__u32 port; /* host byte order; 0: any that has no entry of its own */
};

/* What one of the relay's addresses stands for. */
struct relay_pod {
	struct address pod;
	__u32 ifindex; /* of the node's side of the relay's pair */
	__u32 pad;
};

/* 300 ms. A relay that has not beaten for so long is taken for hung, and gets no more. */
#define RELAY_BEAT_LIMIT_NS 300000000

#define MAX_RELAY_TARGETS 65536

#define MAX_GATES	 4096
#define MAX_ADDRESSES	 16384
#define MAX_RULE_HITS	 65536
#define MAX_DROP_SOURCES 16384

/* One bit per ifindex. Never reused before 2^31, so a node may well pass a million; 1 MiB. */
#define INJECTABLE_IFINDEXES (1 << 23)
#define INJECTABLE_WORDS     (INJECTABLE_IFINDEXES / 64)

#endif
