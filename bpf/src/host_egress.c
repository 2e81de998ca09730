/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Keeps cgroups of the host from destinations: HostEgressPolicy. All programs are at the root
 * cgroup, and act for sockets of the host's network namespace.
 *
 * The hooks at connect and sendmsg know the running task's cgroup and reject with EPERM. The
 * program for packets knows the cgroup of the socket's creator, and the address after translation:
 * it has what the hooks do not see, namely raw sockets, sockets that came from another process or
 * were connected before, and protocols without hooks. A packet socket passes neither: its frames
 * go directly to the device.
 */
/* The headers have more than this file needs. */
#pragma clang diagnostic ignored "-Wunused-function"

#include "abi.h"
#include "node_maps.h"
#include "addresses.h"
#include "verifier.h"
#include "clock.h"
#include "events.h"
#include "node_state.h"
#include "sockets.h"
#include "counting.h"
#include "host_egress.h"

#define PACKET_DROP 0
#define PACKET_PASS 1

#define STATE_LISTEN 10 /* TCP_LISTEN */

#define TCP_FLAGS_OFFSET 13
#define TCP_SYN		 0x02
#define TCP_ACK		 0x10

#define IPV6_HEADER_BYTES 40
#define IPV6_MAX_HEADERS  8

/* What a subject sends, or is about to. port: host byte order. */
struct egress_attempt {
	struct address destination __attribute__((aligned(8)));
	__u64 policies; /* that deny something to its cgroup: a mask */
	__u64 cgroup;	/* id */
	__u16 port;
	__u8 protocol;
	bool is_any_port;     /* of a fragment: unknown */
	bool is_any_protocol; /* of a packet with headers that are not read */
};

ALWAYS_INLINE __u64 current_state(void)
{
	__u32 only = 0;
	__u64 *state = egress_state.lookup(&only);

	return state ? *(volatile __u64 *)state : 0;
}

/* The policies for a packet's socket, or (skb is NULL, a constant) for the running task. */
ALWAYS_INLINE __u64 policies_of(struct __sk_buff *skb, __u64 state)
{
	struct egress_subject_key key = {.version = EGRESS_VERSION(state)};
	struct egress_subject *subject;
	__u64 policies = 0;
	__u32 level;

#pragma unroll
	for (int i = 0; i < EGRESS_LEVELS; i++) {
		level = EGRESS_LEVEL(state, i);
		if (!level)
			break;
		key.cgroup = skb ? bpf_skb_ancestor_cgroup_id(skb, level)
				 : bpf_get_current_ancestor_cgroup_id(level);
		if (!key.cgroup)
			break;
		subject = egress_subjects.lookup(&key);
		if (subject)
			policies = (policies | subject->denied) & ~subject->excepted;
	}
	return forget(policies, state);
}

/* A socket that connects to no address connects to the loopback. */
ALWAYS_INLINE void replace_unspecified(struct address *to)
{
	if (to->word[0] | to->word[1])
		return;
	if (!to->word[2] && !to->word[3])
		to->word[3] = bpf_htonl(1);
	else if (to->word[2] == bpf_htonl(0xffff) && !to->word[3])
		to->word[3] = bpf_htonl(0x7f000001);
}

ALWAYS_INLINE bool is_of_node(struct address *to)
{
	struct node_address key = {.prefix_bits = 8 * sizeof(*to), .address = *to};
	__u32 *word = to->word;

	if (!(word[0] | word[1] | word[2]) && word[3] == bpf_htonl(1))
		return true;
	if (!(word[0] | word[1]) && word[2] == bpf_htonl(0xffff) && bpf_ntohl(word[3]) >> 24 == 127)
		return true;
	return node_addresses.lookup(&key);
}

/* The rules of this version of the tables. */
ALWAYS_INLINE struct egress_rules *rules_of(__u64 state)
{
	__u32 number = state & 1;

	return egress_rules.lookup(&number);
}

/*
 * The first rule of a policy in force that matches, or else the first of one in audit: its policy's
 * number plus 1, and 0 for none. Without branches, as match_rules of rules.h.
 */
ALWAYS_INLINE __u64 find_policy(struct egress_rules *rules, struct egress_attempt *attempt,
				__u64 state)
{
	__u64 enforced = 0, audited = 0, is_nodes = is_of_node(&attempt->destination);
	__u64 *words = (__u64 *)&attempt->destination;

	is_nodes = forget(is_nodes, state) & 1;
	words[0] = forget(words[0], state);
	words[1] = forget(words[1], state);
#pragma clang loop unroll(disable)
	for (__u32 i = 0; i < EGRESS_RULES; i++) {
		struct egress_rule *rule;
		__u64 difference = 0, is_match, in_force, policy;

		asm volatile("" : "+r"(i));
		if (i >= rules->count)
			break;
		rule = &rules->rules[i];
		for (int word = 0; word < 4; word++)
			difference |= (attempt->destination.word[word] ^ rule->address.word[word]) &
				      rule->mask.word[word];
		policy = rule->policy & (EGRESS_POLICIES - 1);
		is_match = is_zero(difference) & (attempt->policies >> policy);
		is_match &= (rule->is_nodes ^ 1) | is_nodes;
		is_match &= is_zero(rule->protocol) | is_zero(rule->protocol ^ attempt->protocol) |
			    attempt->is_any_protocol;
		is_match &= (is_zero(((__u64)attempt->port - rule->first_port) >> 63) &
			     is_zero(((__u64)rule->last_port - attempt->port) >> 63)) |
			    attempt->is_any_port;
		is_match &= 1;
		in_force = rules->enforced >> policy & 1;
		enforced |= (policy + 1) & -(is_match & in_force & is_zero(enforced));
		audited |= (policy + 1) & -(is_match & ~in_force & is_zero(audited));
	}
	enforced = forget(enforced, state);
	audited = forget(audited, state);
	return enforced | (audited & -is_zero(enforced));
}

ALWAYS_INLINE void count_attempt(struct egress_source_key *key, __u64 now_ns, bool has_task)
{
	struct drop_source new_source = {.first_ns = now_ns, .last_ns = now_ns, .count = 1};
	__u32 number = key->policy * VERDICT_COUNT + key->verdict;
	struct drop_source *source = egress_sources.lookup(key);
	__u64 *count = egress_counts.lookup(&number);

	if (count)
		__sync_fetch_and_add(count, 1);
	if (key->verdict == VERDICT_DROP)
		count_host_drop(REASON_HOST_EGRESS);
	if (source) {
		source->last_ns = now_ns;
		__sync_fetch_and_add(&source->count, 1);
		return;
	}
	if (has_task)
		bpf_get_current_comm(&new_source.process_name, sizeof(new_source.process_name));
	egress_sources.insert(key, &new_source);
}

/* has_task: a constant; programs for packets have no running task. */
ALWAYS_INLINE void emit_egress_event(struct egress_attempt *attempt, __u8 verdict, __u64 now_ns,
				     bool has_task)
{
	struct drop_event *event = reserve_event(now_ns);

	if (!event)
		return;
	event->cgroup = attempt->cgroup;
	event->destination = attempt->destination;
	event->destination_port = attempt->port;
	event->protocol = attempt->protocol;
	event->verdict = verdict;
	event->reason = REASON_HOST_EGRESS;
	if (has_task)
		set_event_process(event);
	drop_events.ringbuf_submit(event, 0);
}

/* Whether policies are without effect: for the kubelet, and once the agent is gone for too long. */
ALWAYS_INLINE bool is_exempt(struct config *node, __u64 cgroup, __u64 now_ns)
{
	return is_kubelet_cgroup(node, cgroup) || is_dead_man_expired(node, now_ns);
}

/* Whether the policy that find_policy returned is in force, or only counts. */
ALWAYS_INLINE bool is_enforced(struct egress_rules *rules, __u64 found)
{
	return rules->enforced >> ((found - 1) & (EGRESS_POLICIES - 1)) & 1;
}

/* Count what a policy denies, of this number plus 1; returns whether it is in force. */
ALWAYS_INLINE bool record_attempt(struct egress_rules *rules, struct egress_attempt *attempt,
				  __u64 found, __u64 now_ns, bool has_task)
{
	struct egress_source_key key = {.cgroup = attempt->cgroup, .protocol = attempt->protocol};

	key.policy = (found - 1) & (EGRESS_POLICIES - 1);
	key.verdict = is_enforced(rules, found) ? VERDICT_DROP : VERDICT_WOULD_DROP;
	count_attempt(&key, now_ns, has_task);
	emit_egress_event(attempt, key.verdict, now_ns, has_task);
	return key.verdict == VERDICT_DROP;
}

ALWAYS_INLINE int check_call(struct bpf_sock_addr *context, struct address *to)
{
	struct egress_attempt attempt = {.destination = *to};
	struct egress_socket *socket;
	struct egress_rules *rules;
	__u64 state = current_state(), found, now_ns;
	struct config *node;

	if (!state)
		return SOCKET_ALLOW;
	node = host_config(context);
	if (!node)
		return SOCKET_ALLOW;
	attempt.policies = policies_of(0, state);
	if (!attempt.policies)
		return SOCKET_ALLOW;
	rules = rules_of(state);
	if (!rules)
		return SOCKET_ALLOW;
	replace_unspecified(&attempt.destination);
	attempt.protocol = forget(is_tcp(context) ? IPPROTO_TCP : context->protocol, state);
	attempt.port = bpf_ntohs(context->user_port);
	found = find_policy(rules, &attempt, state);
	if (!found)
		return SOCKET_ALLOW;
	attempt.cgroup = bpf_get_current_cgroup_id();
	now_ns = bpf_ktime_get_ns();
	if (is_exempt(node, attempt.cgroup, now_ns))
		return SOCKET_ALLOW;
	if (record_attempt(rules, &attempt, found, now_ns, true))
		return SOCKET_REJECT;
	/* The socket's packets do not count again. */
	if (context->sk) {
		socket = egress_sockets.sk_storage_get(context->sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
		if (socket)
			socket->counted = found;
	}
	return SOCKET_ALLOW;
}

int egress_connect4(struct bpf_sock_addr *context)
{
	struct address to = map_ipv4(context->user_ip4);

	return check_call(context, &to);
}

int egress_connect6(struct bpf_sock_addr *context)
{
	struct address to = ipv6_destination(context);

	return check_call(context, &to);
}

int egress_sendmsg4(struct bpf_sock_addr *context)
{
	struct address to = map_ipv4(context->user_ip4);

	return check_call(context, &to);
}

int egress_sendmsg6(struct bpf_sock_addr *context)
{
	struct address to = ipv6_destination(context);

	return check_call(context, &to);
}

struct egress_ipv4 {
	__u8 version_length;
	__u8 service;
	__be16 total_length;
	__be16 identification;
	__be16 fragment;
	__u8 ttl;
	__u8 protocol;
	__sum16 checksum;
	__be32 source;
	__be32 destination;
};

struct egress_ipv6 {
	__be32 version_class_flow;
	__be16 payload_length;
	__u8 next_header;
	__u8 hop_limit;
	struct address source;
	struct address destination;
};

/* The transport header's offset from the start of the packet; 0 if it is missing or not read. */
ALWAYS_INLINE __u32 read_ipv6_chain(struct __sk_buff *skb, __u8 next, __u8 *protocol)
{
	__u32 offset = IPV6_HEADER_BYTES;
	__u8 extension[4];

#pragma clang loop unroll(disable)
	for (int i = 0; i < IPV6_MAX_HEADERS; i++) {
		if (next != IPPROTO_HOPOPTS && next != IPPROTO_ROUTING && next != IPPROTO_DSTOPTS &&
		    next != IPPROTO_FRAGMENT && next != IPPROTO_AH) {
			*protocol = next;
			return offset;
		}
		if (bpf_skb_load_bytes(skb, offset & 0x7fff, extension, sizeof(extension)))
			return 0;
		/* A routing header hides the last destination; a fragment may lack the ports. */
		if (next == IPPROTO_ROUTING || next == IPPROTO_FRAGMENT)
			return 0;
		offset += next == IPPROTO_AH ? (extension[1] + 2) * 4 : (extension[1] + 1) * 8;
		offset = forget(offset, skb->len);
		next = extension[0];
	}
	return 0;
}

/* Whether a packet can be read. What of it cannot counts as anything that a rule names. */
ALWAYS_INLINE bool read_packet(struct __sk_buff *skb, struct egress_attempt *attempt,
			       struct address *source, __u32 *transport)
{
	struct egress_ipv4 ipv4;
	struct egress_ipv6 ipv6;
	__u8 version = 0;

	*transport = 0;
	if (bpf_skb_load_bytes(skb, 0, &version, sizeof(version)))
		return false;
	if (version >> 4 == 4) {
		if (bpf_skb_load_bytes(skb, 0, &ipv4, sizeof(ipv4)))
			return false;
		*source = map_ipv4(ipv4.source);
		attempt->destination = map_ipv4(ipv4.destination);
		attempt->protocol = ipv4.protocol;
		if (!(ipv4.fragment & bpf_htons(0x1fff)))
			*transport = (ipv4.version_length & 0x0f) * 4;
		return true;
	}
	if (bpf_skb_load_bytes(skb, 0, &ipv6, sizeof(ipv6)))
		return false;
	*source = ipv6.source;
	attempt->destination = ipv6.destination;
	*transport = read_ipv6_chain(skb, ipv6.next_header, &attempt->protocol);
	attempt->is_any_protocol = !*transport;
	return true;
}

/* What the verifier knows of packets that differ: it would follow all that comes later once for
 * each of them. */
ALWAYS_INLINE void forget_packet(struct egress_attempt *attempt, struct address *source,
				 __u64 state)
{
	attempt->port = forget(attempt->port, state);
	attempt->is_any_port = forget(attempt->is_any_port, state) & 1;
	attempt->is_any_protocol = forget(attempt->is_any_protocol, state) & 1;
	attempt->protocol = forget(attempt->protocol, state);
	for (int i = 0; i < 4; i++)
		source->word[i] = forget(source->word[i], state);
}

/* Whether the host listens on this TCP port of a packet's source. */
ALWAYS_INLINE bool has_listener(struct __sk_buff *skb, struct address *local, __be16 port)
{
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *found;
	bool is_listener;

	if (!(local->word[0] | local->word[1]) && local->word[2] == bpf_htonl(0xffff)) {
		tuple.ipv4.daddr = local->word[3];
		tuple.ipv4.dport = port;
		found = bpf_skc_lookup_tcp(skb, &tuple, sizeof(tuple.ipv4), -1, 0);
	} else {
		__builtin_memcpy(tuple.ipv6.daddr, local, sizeof(tuple.ipv6.daddr));
		tuple.ipv6.dport = port;
		found = bpf_skc_lookup_tcp(skb, &tuple, sizeof(tuple.ipv6), -1, 0);
	}
	if (!found)
		return false;
	is_listener = found->state == STATE_LISTEN;
	bpf_sk_release(found);
	return is_listener;
}

/*
 * Whether a TCP segment belongs to a connection that the peer opened. That is decided by its first
 * segment, which an accepted socket sends while its listener exists, and then remembered. A
 * listener itself answers SYNs.
 */
ALWAYS_INLINE bool is_accepted(struct __sk_buff *skb, struct bpf_sock *sk,
			       struct egress_socket *socket, struct address *local, __be16 port)
{
	if (sk->state == STATE_LISTEN)
		return true;
	if (socket && socket->is_accepted)
		return true;
	if (!has_listener(skb, local, port))
		return false;
	if (socket)
		socket->is_accepted = true;
	return true;
}

int egress_packet(struct __sk_buff *skb)
{
	__u64 state = current_state(), found, now_ns;
	struct egress_attempt attempt = {};
	struct bpf_sock *sk = skb->sk;
	struct egress_socket *socket;
	struct egress_rules *rules;
	struct address source = {};
	__u32 transport, only = 0;
	struct config *node;
	bool is_segment;
	__be16 ports[2] = {};
	__u8 flags = 0;

	if (!state || !sk)
		return PACKET_PASS;
	attempt.policies = policies_of(skb, state);
	if (!attempt.policies)
		return PACKET_PASS;
	node = config.lookup(&only);
	sk = bpf_sk_fullsock(sk);
	rules = rules_of(state);
	if (!node || !sk || !rules)
		return PACKET_PASS;
#if HAS_PACKET_NETNS
	if (node->node_netns && bpf_get_netns_cookie(skb) != node->node_netns)
		return PACKET_PASS;
#endif
	if (!read_packet(skb, &attempt, &source, &transport))
		return PACKET_PASS;
	transport = forget(transport, state) & 0x7fff;
	is_segment = sk->type == SOCK_STREAM && attempt.protocol == IPPROTO_TCP &&
		     !bpf_skb_load_bytes(skb, transport + TCP_FLAGS_OFFSET, &flags, sizeof(flags));
	if (transport && !bpf_skb_load_bytes(skb, transport, ports, sizeof(ports)))
		attempt.port = bpf_ntohs(ports[1]);
	else
		attempt.is_any_port = true;
	forget_packet(&attempt, &source, state);
	is_segment = forget(is_segment, state) & 1;
	found = find_policy(rules, &attempt, state);
	if (!found)
		return PACKET_PASS;
	attempt.cgroup = bpf_skb_cgroup_id(skb);
	now_ns = bpf_ktime_get_ns();
	if (is_exempt(node, attempt.cgroup, now_ns))
		return PACKET_PASS;
	socket = egress_sockets.sk_storage_get(sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (is_segment && (flags & (TCP_SYN | TCP_ACK)) != TCP_SYN &&
	    is_accepted(skb, sk, socket, &source, ports[0]))
		return PACKET_PASS;
	/* In audit a connection counts once, and what a hook has counted does not count again. */
	if (socket && !is_enforced(rules, found)) {
		if (socket->counted == found)
			return PACKET_PASS;
		if (is_segment)
			socket->counted = found;
	}
	return record_attempt(rules, &attempt, found, now_ns, false) ? PACKET_DROP : PACKET_PASS;
}
