/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The structs and enums shared by kernel side and user space: each has its twin in bpf/abi.py,
 * bpf/rules.py or bpf/verdicts.py, and tests compare the two. A change of layout or of an
 * enumerator's number is a new schema: raise SCHEMA in bpf/abi.py.
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

/* The reason of a verdict. Numbers never change: counters outlive the agent. */
enum reason {
	REASON_ARP,	     /* address resolution */
	REASON_CONTROL,	     /* ICMP errors, neighbour discovery, IGMP and MLD */
	REASON_ESTABLISHED,  /* TCP segment without SYN */
	REASON_REPLY,	     /* reply to a flow of the pod, or later packet of an admitted flow */
	REASON_RULE,	     /* new flow admitted by a rule */
	REASON_PROBE,	     /* kubelet, to a port that the pod declares */
	REASON_GRACE,	     /* possible reply to a flow from before the gate */
	REASON_DEAD_MAN,     /* no agent for too long: all gates are open */
	REASON_UNPARSABLE,   /* not parsable to its transport header */
	REASON_FRAGMENT,     /* fragment of TCP, or of a datagram whose first did not pass */
	REASON_STRAY,	     /* not an address of this pod: a flooded copy */
	REASON_NODE,	     /* new flow from a host process */
	REASON_KERNEL,	     /* new flow without a socket: from the kernel */
	REASON_TUNNEL,	     /* to a tunnel port, to be forwarded once decapsulated */
	REASON_EVASION,	     /* socket option by which packets bypass the gate */
	REASON_PATH_TEST,    /* path test of the agent: TCP to port 0 */
	REASON_SWITCH,	     /* without a socket, on a node with Open vSwitch */
	REASON_FORWARDED,    /* forwarded IPv6 fragment without ingress interface */
	REASON_RELAY,	     /* to the relay, from a pod or from outside */
	REASON_STRICT,	     /* kubelet, to a pod in strict, but not through the relay */
	REASON_UNIDENTIFIED, /* host process that may be the kubelet, which is not identified */
	REASON_STALE,	     /* the same, since the agent that followed the kubelet is missing */
	REASON_HOST_EGRESS,  /* host process, to a destination that a HostEgressPolicy denies */
	REASON_HAIRPIN,	     /* host process, by another machine that sends the SYN back */
	REASON_COUNT,
};

/* Spare slots, so that a new reason does not change the layout. */
#define REASON_SLOTS 32

/* Addresses within struct gate: one of each family. The map gate_addresses has the others. */
#define GATE_ADDRESSES 2

/* With more, GATE_ANY_ADDRESS is set: a pod cannot fill the map. */
#define MAX_GATE_ADDRESSES 1024

/* The kind of source that a rule admits. */
enum source_kind {
	SOURCE_ANY,	 /* any host-sent packet */
	SOURCE_KUBELET,	 /* sockets of the kubelet's cgroup, whose id is in struct config */
	SOURCE_CGROUP,	 /* sockets of exactly this cgroup */
	SOURCE_ANCESTOR, /* sockets of this cgroup and of all below it */
	SOURCE_KERNEL,	 /* the host kernel: no socket */
	SOURCE_COUNT,
};

/*
 * A rule: this source may open flows to this pod. A socket's cgroup is that of its creator at
 * socket(2), so it is the same for retransmits, moved processes and passed descriptors.
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

/* Every rule is checked for each new flow; user space merges rules and rejects more. */
#define GATE_RULES 32

/* Rules within struct gate, enough for most pods. The map more_rules has the others. */
#define GATE_FIRST_RULES 4
#define GATE_MORE_RULES	 (GATE_RULES - GATE_FIRST_RULES)

/* In a gate's flags: all addresses behind the interface are the pod's (the relay's range). */
#define GATE_ANY_ADDRESS 1
/* In strict the kubelet is not admitted, with a relay or without: failed probes, no exception. */
#define GATE_NO_FALLBACK 2
/* The map gate_addresses has further addresses of the pod. */
#define GATE_HAS_MORE_ADDRESSES 4
/* Only the identified kubelet is admitted as the kubelet: a relay's pair. */
#define GATE_IDENTIFIED_KUBELET 8

/* The configuration of one gate. */
struct gate {
	__u32 ifindex;
	__u32 slot; /* its index in the maps gates and counters */
	__u32 mode;
	__u32 rule_count;
	__u16 flags;
	__u16 address_count;  /* of those in this struct */
	__u16 claimed_count;  /* the last of these, which count in this gate only */
	__u16 version;	      /* its index in struct gate_slot */
	__u64 grace_until_ns; /* CLOCK_MONOTONIC: end of the grace period */
	struct address addresses[GATE_ADDRESSES];
	struct rule rules[GATE_FIRST_RULES];
};

/*
 * The value of the map gates. A new configuration is written to the version that is not current,
 * and then becomes current by one store: programs see the one or the other, never a mix.
 */
struct gate_slot {
	__u32 current;
	__u32 pad;
	struct gate versions[2];
};

/* The rules of a gate that are not in struct gate: the key and value of more_rules. */
struct more_rules_key {
	__u32 ifindex;
	__u32 version;
};

struct more_rules {
	struct rule rules[GATE_MORE_RULES];
};

/* An address of a pod that is not in struct gate: the key of gate_addresses. */
struct gate_address {
	struct address address;
	__u32 ifindex;
};

/* Ports of the host's tunnels (VXLAN, Geneve, ...): usually one for each kind. */
#define TUNNEL_PORTS 8

/* The configuration shared by all gates and hooks. Times are CLOCK_MONOTONIC in nanoseconds. */
struct config {
	__u64 kubelet_cgroup; /* id; 0: unknown, so any process outside pods may be it */
	__u64 pods_cgroup;    /* id of the cgroup above all pods'; 0: unknown */
	__u64 heartbeat_ns;   /* the agent's last heartbeat; 0: none yet */
	__u64 stale_after_ns; /* heartbeat age from which the kubelet may have another cgroup; 0:
				 never */
	__u64 dead_man_ns;    /* heartbeat age from which all gates are open; 0: never */
	__u64 node_netns;     /* cookie of the host's network namespace; 0: unknown */
	__u32 pods_cgroup_level;
	__u32 tunnel_port_count;
	__u16 tunnel_ports[TUNNEL_PORTS]; /* UDP, host byte order */
	__u32 has_ovs;			  /* 1: an Open vSwitch datapath is on the node */
	__u32 kubelet_unit;		  /* number of the followed unit; 0: none */
	__u32 has_node_addresses;	  /* 1: an agent keeps the map node_addresses */
	__u32 has_enforced;		  /* 1: a pod's gate drops packets of the host */
};

/* Offsets in bytes in struct sk_buff, from the kernel's BTF; all 0: unknown. */
struct buffer_layout {
	__u32 head;	   /* the buffer's start */
	__u32 data;	   /* the frame's start */
	__u32 csum_start;  /* where a pending checksum begins, from the buffer's start */
	__u32 csum_offset; /* where it is written, from csum_start */
};

/* Longer paths are not followed: this is read onto a program's stack. */
#define KUBELET_PATH_BYTES 256

/*
 * The cgroup path of the kubelet's unit, which the kernel follows: the service manager makes the
 * cgroup again at each start. Offsets in bytes, from the kernel's BTF.
 */
struct kubelet_unit {
	__u32 number;		/* changes with the path */
	__u32 node_offset;	/* struct cgroup: kn */
	__u32 id_offset;	/* struct kernfs_node: id */
	__u32 root_offset;	/* struct cgroup: root */
	__u32 hierarchy_offset; /* struct cgroup_root: hierarchy_id */
	__u32 priority;		/* of its sockets in a new cgroup, for the default-deny table */
	char path[KUBELET_PATH_BYTES]; /* from the hierarchy's root; zeros up to the end */
};

/* The newest cgroup that was made at the unit's path. Written by the kernel side only. */
struct kubelet_remade {
	__u64 cgroup; /* id */
	__u64 unit;   /* its number; written last */
};

/*
 * The share of one cgroup in the drop sources, so that it cannot displace the others. Its packets
 * to further ports of a pod are counted as to one port, MANY_PORTS.
 */
#define CGROUP_SOURCES 1024
#define MANY_PORTS     0

/* A source of drops: one entry for each combination, so that rare sources are not missed. */
struct drop_source_key {
	__u64 cgroup; /* id; 0: no socket */
	__u32 ifindex;
	__u16 port; /* the pod's, host byte order; 0 for protocols without, and MANY_PORTS */
	__u8 protocol;
	__u8 mode; /* the gate's at that time: packets of audit have passed */
};

/* Times are CLOCK_MONOTONIC in nanoseconds. */
struct drop_source {
	__u64 first_ns;
	__u64 last_ns;
	__u64 count;	       /* packets */
	char process_name[16]; /* of the first packet; empty: unknown */
};

/* The source of a CPU's last dropped packet, and its packets that are not in drop_sources yet. */
struct recent_source {
	struct drop_source_key key;
	__u64 since_ns;
	__u64 last_ns;
	__u64 packets;
};

/* For how long packets are not added to drop_sources, while they are from the same source. */
#define RECENT_SOURCE_NS (100ULL * 1000 * 1000)

/* One dropped packet (in audit: would be dropped) or rejected call. The kernel limits the rate. */
struct drop_event {
	__u64 at_ns;	       /* CLOCK_MONOTONIC */
	__u64 cgroup;	       /* id of the source's; 0: no socket */
	struct address source; /* all 0: not chosen yet */
	struct address destination;
	__u32 ifindex; /* of the gate; 0: no interface chosen yet */
	__u32 pid;     /* in the initial PID namespace; 0: unknown */
	__u16 source_port;
	__u16 destination_port; /* host byte order */
	__u8 protocol;
	__u8 verdict;
	__u8 reason;
	__u8 pad;
	char process_name[16]; /* empty: unknown */
};

/* 64 KiB hold 600 events; a reader that reads every second misses none within the rate limit. */
#define EVENT_RING_BYTES  65536
#define EVENT_WINDOW_NS	  (100ULL * 1000 * 1000)
#define EVENTS_PER_WINDOW 16 /* of each CPU */

struct event_budget {
	__u64 since_ns;	  /* start of this window */
	__s64 remaining;  /* below 0 if a program took the last one while another did */
	__u64 suppressed; /* events not sent, since the map was created */
};

/* A CPU's last reading of the clock, and the tick in which it was. */
struct clock_reading {
	__u64 jiffies;
	__u64 now_ns; /* CLOCK_MONOTONIC */
};

/* A flow other than TCP, as the pod sees it. Both ports of ICMP: the echo identifier. */
struct flow {
	struct address pod;
	struct address peer; /* all 0: a group; replies come from any address */
	__be16 pod_port;
	__be16 peer_port;
	__u8 protocol;
	__u8 pad[3];
} __attribute__((aligned(8)));

/* Two values of 8 bytes, each written in one step. */
struct reply_slot {
	__u64 fingerprint; /* of a struct flow, with the pod's port; 0: unused */
	__u64 sent_ns;	   /* the flow's last packet, either way; CLOCK_MONOTONIC */
};

/* The lowest bit of `sent_ns`: the flow has had a reply. */
#define REPLIED 1

/*
 * Each pod has a table of its own, so that no pod can evict another's flows: 96 KiB. A flow may be
 * in any slot of two sets, which its pod's port and QUESTION_BUCKETS decide. With 1,600 replies
 * outstanding, 1 of 100,000 flows is evicted too early (simulated); with one set of 8 it is 1,300,
 * and 29,000 in a table of 1,024 single slots.
 *
 * A port has at most PORT_FLOWS flows in each of its pairs of sets. Further ones, as of a server
 * and its thousands of clients, are in the sets of the crowd, where they evict only each other: so
 * clients of the pod cannot evict its questions from other ports. A question is from a port of its
 * own, or goes to a few servers.
 */
#define REPLY_WAYS	 8
#define QUESTION_SETS	 512
#define CROWD_SETS	 256
#define REPLY_SETS	 (QUESTION_SETS + CROWD_SETS)
#define QUESTION_BUCKETS 8
#define PORT_FLOWS	 4

struct reply_set {
	struct reply_slot slots[REPLY_WAYS];
};

/* Random numbers, so that no other process can find two flows with the same fingerprint. */
#define REPLY_KEY_WORDS 12

struct reply_key {
	__u32 words[REPLY_KEY_WORDS];
};

/* Conntrack's default timeout of a UDP stream (nf_conntrack_udp_timeout_stream). */
#define REPLY_LIFETIME_NS (120ULL * 1000 * 1000 * 1000)

/*
 * A reply renews its flow, but not within this time. The first reply does so much later: most flows
 * are one question and one answer, and would keep their slots twice as long. With 1,000 replies
 * outstanding for over a second, 2 of 100,000 flows would be evicted too early, instead of none in
 * 20 million (simulated).
 */
#define REPLY_RENEWAL_NS       (1ULL * 1000 * 1000 * 1000)
#define FIRST_REPLY_RENEWAL_NS (30ULL * 1000 * 1000 * 1000)

/*
 * Answers to a group come from any address, so they have a few seconds only: mDNS (RFC 6762) and
 * SSDP answer within five, and a DHCP server offers after it has pinged the address for three.
 */
#define GROUP_LIFETIME_NS (10ULL * 1000 * 1000 * 1000)

/* From before the hooks: the agent records them. Later ones are known by their own storage. */
#define MAX_OLD_RAW_SOCKETS 65536

/* Who may create raw and packet sockets of the host's namespace. Offsets from the kernel's BTF. */
struct raw_socket_policy {
	__u32 denies_pods;    /* 0: sockets of pods without a policy are only counted */
	__u32 node_netns;     /* inode number of the host's network namespace; 0: unknown */
	__u32 nsproxy_offset; /* struct task_struct: nsproxy */
	__u32 netns_offset;   /* struct nsproxy: net_ns */
	__u32 inode_offset;   /* struct net: ns, and in it struct ns_common: inum */
};

/* Values of the map raw_socket_creators: of a cgroup's processes, or of those below it, too. */
#define CREATORS_EXACT	 1
#define CREATORS_SUBTREE 2

/* systemd and nested kubelets use less than ten. */
#define MAX_CGROUP_LEVELS 32

/* A source of such sockets. Families: AF_INET, AF_INET6 and AF_PACKET. */
struct raw_socket_source_key {
	__u64 cgroup; /* id */
	__u16 family;
	__u8 verdict;
	__u8 pad[5];
};

/* One for each family and verdict: family * VERDICT_COUNT + verdict. */
#define RAW_SOCKET_COUNTS ((17 + 1) * 3)

#define MAX_RAW_SOCKET_CREATORS 65536
#define MAX_RAW_SOCKET_SOURCES	4096

/* An address of the node, or a range of its own: the key of node_addresses. */
struct node_address {
	__u32 prefix_bits;
	struct address address;
};

/* Each interface of a pod adds a link-local one. */
#define MAX_NODE_ADDRESSES 65536

/* A heartbeat of this age: no agent adds the node's new addresses. */
#define NODE_ADDRESSES_STALE_NS (15ULL * 1000 * 1000 * 1000)

/* What a socket of the node has done, in its own storage: no other socket makes it forgotten. */
struct socket_history {
	struct address foreign_source; /* the first with which it sent that was not the node's */
	__u32 foreign_sources;	       /* how many, counted at each change: 0, 1 or more */
	__u32 is_raw;		       /* 1: a process's raw socket */
};

/* Where the `host` of a probe or hook sends the kubelet, port in host order. */
struct host_probe {
	struct address address;
	__u16 port;
	__u16 pad;
};

#define MAX_DENIED_HOST_PROBES 1024

/* Of the cgroups above a connecting process. Rules about deeper ones admit no hairpin. */
#define CONNECT_LEVELS 16

/* A TCP connection that a host process opens, not answered yet (connects.c). */
struct host_connect {
	__u64 sent_ns; /* the last SYN; CLOCK_MONOTONIC */
	__u64 cgroup;  /* id, of the running task; 0: unknown */
};

/* Only connects that are not answered yet: 2.8 MiB. As many others displace one. */
#define MAX_HOST_CONNECTS 32768

/* Of a connecting process' cgroup: ids, by level; 0: the cgroup is above it. */
struct cgroup_ancestors {
	__u64 ids[CONNECT_LEVELS];
};

#define MAX_CONNECTING_CGROUPS 1024

/*
 * How long a SYN may take to come back, since a timer has sent it again: a neighbour that is being
 * resolved holds it for three seconds. A SYN of another host with the same number is dropped, too:
 * with 100 connects of this time that have no answer, that is one of 40 million.
 */
#define HAIRPIN_LIFETIME_NS (10ULL * 1000 * 1000 * 1000)

/* Offsets in bytes, from the kernel's BTF. `sequence` of 0: unknown. */
struct connect_layout {
	__u32 socket;	/* struct bpf_sock_ops_kern: sk */
	__u32 sequence; /* struct tcp_sock: write_seq */
};

/* A datagram in fragments, and how it came. */
struct fragment {
	struct address source;
	struct address destination;
	__u64 socket; /* cookie; 0: none */
	__u32 id;     /* as in the packet */
	__u32 ingress_ifindex;
	__u8 protocol;
	__u8 pad[7];
};

/* Of the whole node; as many as Cilium's table of fragments has. */
#define MAX_FRAGMENTS 8192

/* How long Linux waits for the rest of an IPv6 datagram; of an IPv4 one it is half of that. */
#define FRAGMENT_LIFETIME_NS (60ULL * 1000 * 1000 * 1000)

/*
 * Host-sent packets of one gate: those that passed or were dropped, by reason, since each reason
 * belongs to one of the two; then those that would be dropped. Shared by all CPUs and counted
 * atomically: cgroup programs are preemptible, and a copy for each CPU has 24 MiB on 128 CPUs.
 * Forwarded packets are counted by the device only.
 */
#define COUNTER_SLOTS 64

struct counters {
	__u64 packets[COUNTER_SLOTS];
};

/*
 * The same of one CPU for the two reasons that a busy connection and a flood count: an atomic
 * operation takes half as long as an empty program. 64 KiB for each CPU.
 */
struct frequent_counts {
	__u64 established;
	__u64 node;
};

/* A pod's port that the kubelet may connect to. */
struct relay_target_key {
	struct address pod;
	__u32 port; /* host byte order; 0: all ports without an entry */
};

/* The pod that one of the relay's addresses represents. */
struct relay_pod {
	struct address pod;
	__u32 ifindex;		 /* of the host's end of the relay's pair */
	__u32 admits_translated; /* 1: the kubelet may connect by a translated address, too */
};

/* 300 ms. A relay without a heartbeat for longer is considered hung: no more redirects. */
#define RELAY_BEAT_LIMIT_NS 300000000

#define MAX_RELAY_TARGETS 65536

/* Only the connects of the last seconds matter, since their SYNs may be sent again. */
#define MAX_RELAY_BYPASSES 8192

#define MAX_GATES	   4096
#define MAX_ADDRESSES	   16384
#define MAX_MORE_ADDRESSES 65536

/*
 * Slots, the indexes into the maps gates and counters. That of a gate is FIRST_SLOT plus its
 * ifindex modulo MAX_GATES, or, if another gate has that one, any other. HOST_SLOT counts drops
 * before an interface is chosen. FALLBACK_SLOT has the configuration of attached gates that have
 * none, because a map is full.
 */
#define HOST_SLOT     0
#define FALLBACK_SLOT 1
#define FIRST_SLOT    2
#define SLOT_COUNT    (FIRST_SLOT + MAX_GATES)

#define MAX_RULE_HITS	   65536
#define MAX_DROP_SOURCES   16384
#define MAX_SOURCE_CGROUPS 4096

/* One bit per ifindex. Indexes are not reused before 2^31, and a node may pass a million; 1 MiB. */
#define INJECTABLE_IFINDEXES (1 << 23)
#define INJECTABLE_WORDS     (INJECTABLE_IFINDEXES / 64)

/* The verifier follows each turn of the loop: 50 ms, once. One comparison of all takes 0.1 ms. */
#define MAX_WATCHED_WORDS 4096

/* Eight bytes of the kernel's memory. */
struct watched_word {
	__u64 address;
	__u64 expected;
	__u64 found; /* when it was compared last */
};

/* Of memory_watch.c alone, whose maps are not pinned. */
struct watched_words {
	__u64 count;	   /* of the words that are compared; 0 after a change */
	__u64 comparisons; /* of all words together, since user space wrote them */
	struct watched_word words[MAX_WATCHED_WORDS];
};

#endif
