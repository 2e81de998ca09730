/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Service translation at the socket: a process that connects or sends to a service's address is
 * connected to one of its endpoints from the start, so no packet is translated. For the sockets of
 * all network namespaces below the cgroup, pods' and host's, and before all other hooks, which then
 * see the endpoint.
 *
 * A service is one entry, replaced as a whole, which names a set of endpoints. A set is written
 * before the entry that names it, never changed, and removed some time after the last such entry.
 * bpf/services/ has the twins of these declarations.
 */
#include "abi.h"
#include "addresses.h"
#include "protocols.h"
#include "sockets.h"

#define ECONNREFUSED 111

#define MAX_SERVICES   131072
#define MAX_ENDPOINTS  1048576
#define MAX_AFFINITIES 131072
#define MAX_UDP_FLOWS  65536

/* A set that is replaced while it is read is read again, up to three times. */
#define ATTEMPTS 4

/* Address and port of a service or an endpoint. */
struct service_address {
	struct address address;
	__be16 port;
	__u8 protocol; /* IPPROTO_TCP or IPPROTO_UDP */
	__u8 pad;
};

struct service {
	__u64 id; /* the same for all addresses of one port of a service */
	__u32 set;
	__u32 endpoint_count;
	__u32 affinity_seconds; /* 0: none */
	__u32 pad;
};

struct endpoint_key {
	__u32 set;
	__u32 number;
};

struct member_key {
	__u32 set;
	struct service_address place;
};

/*
 * A client with affinity: a network namespace, which kube-proxy sees as one client address, the
 * pod's or the host's.
 */
struct client_key {
	__u64 service;
	__u64 netns;
};

struct affinity {
	struct service_address place;
	__u32 pad;
	__u64 used_ns; /* CLOCK_MONOTONIC */
};

/* The service and the endpoint of a connected socket. */
struct peer {
	struct service_address service;
	struct service_address endpoint;
};

/* One direction of a flow of a socket that sends without being connected. */
struct udp_flow_key {
	__u64 socket;
	struct service_address place; /* the service; of a reply the endpoint */
	__u32 is_reply;
};

enum translation {
	OUTCOME_NO_SERVICE,
	OUTCOME_TRANSLATED,
	OUTCOME_REJECTED,
};

BPF_F_TABLE("hash", struct service_address, struct service, services, MAX_SERVICES,
	    BPF_F_NO_PREALLOC);
BPF_F_TABLE("hash", struct endpoint_key, struct service_address, service_endpoints, MAX_ENDPOINTS,
	    BPF_F_NO_PREALLOC);
/* Members of the sets of UDP services, and of services with affinity. */
BPF_F_TABLE("hash", struct member_key, __u32, service_members, MAX_ENDPOINTS, BPF_F_NO_PREALLOC);
BPF_TABLE("lru_hash", struct client_key, struct affinity, service_affinities, MAX_AFFINITIES);
BPF_TABLE("lru_hash", struct udp_flow_key, struct service_address, service_udp_flows,
	  MAX_UDP_FLOWS);
BPF_SK_STORAGE(service_peers, struct peer);

ALWAYS_INLINE bool is_same_address_port(struct service_address *one, struct service_address *other)
{
	return one->port == other->port && one->protocol == other->protocol &&
	       is_same_address(&one->address, &other->address);
}

/* 0 for protocols that services do not translate. */
ALWAYS_INLINE __u8 service_protocol(struct bpf_sock_addr *context)
{
	if (is_tcp(context))
		return IPPROTO_TCP;
	if (context->type == SOCK_DGRAM && context->protocol == IPPROTO_UDP)
		return IPPROTO_UDP;
	return 0;
}

ALWAYS_INLINE bool is_member(__u32 set, struct service_address *place)
{
	struct member_key key = {.set = set, .place = *place};

	return service_members.lookup(&key);
}

/* The client's previous endpoint, if its affinity has not expired and it is still in the set. */
ALWAYS_INLINE bool find_affinity(struct service *service, struct client_key *client,
				 struct service_address *chosen, __u64 now_ns)
{
	struct affinity *affinity = service_affinities.lookup(client);
	__u64 age;

	if (!affinity)
		return false;
	age = now_ns > affinity->used_ns ? now_ns - affinity->used_ns : 0;
	if (age > service->affinity_seconds * 1000000000ULL)
		return false;
	*chosen = affinity->place;
	return is_member(service->set, chosen);
}

/* A random endpoint of the set. False if the set was removed meanwhile. */
ALWAYS_INLINE bool pick_endpoint(struct service *service, struct service_address *chosen)
{
	struct endpoint_key key = {.set = service->set};
	struct service_address *found;

	key.number = bpf_get_prandom_u32() % service->endpoint_count;
	found = service_endpoints.lookup(&key);
	if (!found)
		return false;
	*chosen = *found;
	return true;
}

/*
 * Replaces a service's address by an endpoint's. udp_flow: of an unconnected socket, which keeps
 * its endpoint; otherwise NULL.
 *
 * The memory of a replaced entry may be reused while it is read here, so the entry is read again
 * and must name the same set: two entries name one set only if their values are equal.
 */
ALWAYS_INLINE enum translation translate(struct bpf_sock_addr *context,
					 struct service_address *place,
					 struct udp_flow_key *udp_flow)
{
	__u64 now_ns = 0;

#pragma clang loop unroll(disable)
	for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
		struct service *found = services.lookup(place);
		struct client_key client = {};
		struct service_address *before = 0;
		struct service service;
		struct service_address chosen = {};
		bool is_chosen = false;

		if (!found)
			return OUTCOME_NO_SERVICE;
		service = *found;
		if (service.endpoint_count) {
			if (udp_flow) {
				before = service_udp_flows.lookup(udp_flow);
				if (before) {
					chosen = *before;
					is_chosen = is_member(service.set, &chosen);
				}
			}
			if (!is_chosen && service.affinity_seconds) {
				client.service = service.id;
				client.netns = bpf_get_netns_cookie(context);
				now_ns = bpf_ktime_get_ns();
				is_chosen = find_affinity(&service, &client, &chosen, now_ns);
			}
			if (!is_chosen && !pick_endpoint(&service, &chosen))
				continue;
		}
		found = services.lookup(place);
		if (!found)
			return OUTCOME_NO_SERVICE;
		if (found->set != service.set)
			continue;
		if (!service.endpoint_count)
			return OUTCOME_REJECTED;
		if (client.service) {
			struct affinity affinity = {.place = chosen, .used_ns = now_ns};

			service_affinities.update(&client, &affinity);
		}
		*place = chosen;
		return OUTCOME_TRANSLATED;
	}
	return OUTCOME_REJECTED;
}

/* connect: one endpoint for the connection's life; getpeername shows the service. */
ALWAYS_INLINE enum translation translate_connect(struct bpf_sock_addr *context,
						 struct service_address *place)
{
	struct peer peer = {.service = *place};
	struct bpf_sock *sk = context->sk;
	enum translation outcome;
	struct peer *kept;

	if (!place->protocol || !sk)
		return OUTCOME_NO_SERVICE;
	outcome = translate(context, place, 0);
	if (outcome != OUTCOME_TRANSLATED) {
		service_peers.sk_storage_delete(sk);
		return outcome;
	}
	peer.endpoint = *place;
	kept = service_peers.sk_storage_get(sk, &peer, BPF_SK_STORAGE_GET_F_CREATE);
	if (kept)
		*kept = peer;
	return outcome;
}

/* sendmsg: the same endpoint for each datagram, as connection tracking has it with kube-proxy. */
ALWAYS_INLINE enum translation translate_sendmsg(struct bpf_sock_addr *context,
						 struct service_address *place)
{
	struct udp_flow_key udp_flow = {.place = *place};
	struct service_address service = *place;
	enum translation outcome;

	if (place->protocol != IPPROTO_UDP)
		return OUTCOME_NO_SERVICE;
	udp_flow.socket = bpf_get_socket_cookie(context);
	outcome = translate(context, place, &udp_flow);
	if (outcome != OUTCOME_TRANSLATED)
		return outcome;
	service_udp_flows.update(&udp_flow, place);
	udp_flow.place = *place;
	udp_flow.is_reply = 1;
	service_udp_flows.update(&udp_flow, &service);
	return outcome;
}

/* The service that a peer's address belongs to, for this socket; false if to none. */
ALWAYS_INLINE bool find_service(struct bpf_sock_addr *context, struct service_address *place,
				bool is_datagram)
{
	struct udp_flow_key udp_flow = {.place = *place, .is_reply = 1};
	struct bpf_sock *sk = context->sk;
	struct service_address *found;
	struct peer *peer;

	if (!sk)
		return false;
	peer = service_peers.sk_storage_get(sk, 0, 0);
	if (peer && is_same_address_port(&peer->endpoint, place)) {
		*place = peer->service;
		return true;
	}
	if (!is_datagram)
		return false;
	udp_flow.socket = bpf_get_socket_cookie(context);
	found = service_udp_flows.lookup(&udp_flow);
	if (!found)
		return false;
	*place = *found;
	return true;
}

ALWAYS_INLINE struct service_address address4(struct bpf_sock_addr *context)
{
	struct service_address place = {.address = map_ipv4(context->user_ip4),
					.port = context->user_port,
					.protocol = service_protocol(context)};

	return place;
}

ALWAYS_INLINE struct service_address address6(struct bpf_sock_addr *context)
{
	struct service_address place = {.address = ipv6_destination(context),
					.port = context->user_port,
					.protocol = service_protocol(context)};

	return place;
}

ALWAYS_INLINE void write4(struct bpf_sock_addr *context, struct service_address *place)
{
	context->user_ip4 = place->address.word[3];
	context->user_port = place->port;
}

ALWAYS_INLINE void write6(struct bpf_sock_addr *context, struct service_address *place)
{
	write_ipv6(context, &place->address);
	context->user_port = place->port;
}

/* As kube-proxy rejects what comes to a service without endpoints; EPERM before Linux 5.18. */
ALWAYS_INLINE int reject(void)
{
#if HAS_SET_RETVAL
	bpf_set_retval(-ECONNREFUSED);
#endif
	return SOCKET_REJECT;
}

int service_connect4(struct bpf_sock_addr *context)
{
	struct service_address place = address4(context);
	enum translation outcome = translate_connect(context, &place);

	if (outcome == OUTCOME_REJECTED)
		return reject();
	if (outcome == OUTCOME_TRANSLATED)
		write4(context, &place);
	return SOCKET_ALLOW;
}

int service_connect6(struct bpf_sock_addr *context)
{
	struct service_address place = address6(context);
	enum translation outcome = translate_connect(context, &place);

	if (outcome == OUTCOME_REJECTED)
		return reject();
	if (outcome == OUTCOME_TRANSLATED)
		write6(context, &place);
	return SOCKET_ALLOW;
}

int service_sendmsg4(struct bpf_sock_addr *context)
{
	struct service_address place = address4(context);
	enum translation outcome = translate_sendmsg(context, &place);

	if (outcome == OUTCOME_REJECTED)
		return reject();
	if (outcome == OUTCOME_TRANSLATED)
		write4(context, &place);
	return SOCKET_ALLOW;
}

int service_sendmsg6(struct bpf_sock_addr *context)
{
	struct service_address place = address6(context);
	enum translation outcome = translate_sendmsg(context, &place);

	if (outcome == OUTCOME_REJECTED)
		return reject();
	if (outcome == OUTCOME_TRANSLATED)
		write6(context, &place);
	return SOCKET_ALLOW;
}

int service_recvmsg4(struct bpf_sock_addr *context)
{
	struct service_address place = address4(context);

	if (find_service(context, &place, true))
		write4(context, &place);
	return SOCKET_ALLOW;
}

int service_recvmsg6(struct bpf_sock_addr *context)
{
	struct service_address place = address6(context);

	if (find_service(context, &place, true))
		write6(context, &place);
	return SOCKET_ALLOW;
}

int service_getpeername4(struct bpf_sock_addr *context)
{
	struct service_address place = address4(context);

	if (find_service(context, &place, false))
		write4(context, &place);
	return SOCKET_ALLOW;
}

int service_getpeername6(struct bpf_sock_addr *context)
{
	struct service_address place = address6(context);

	if (find_service(context, &place, false))
		write6(context, &place);
	return SOCKET_ALLOW;
}
