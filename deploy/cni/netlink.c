// SPDX-License-Identifier: Apache-2.0
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_ether.h>
#include <linux/net_namespace.h>
#include <linux/pkt_cls.h>
#include <linux/pkt_sched.h>
#include <linux/rtnetlink.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "netlink.h"
#include "problem.h"

#define TIMEOUT_SECONDS 5
#define MAX_ATTEMPTS	5
#define KIND_SIZE	16 /* IFNAMSIZ, as the kernel limits it */

/* Priority and handles of bpf/clsact.py; the second is of a filter that was moved. */
#define PRIORITY 1
static const __u32 handles[] = {0x706f6467, 0x706f6468};

struct request {
	struct nlmsghdr header;
	char payload[512];
};

typedef void (*each_message)(const struct nlmsghdr *message, void *context);

static struct request request(__u16 type, __u16 flags, const void *body, size_t size)
{
	struct request made = {
		.header =
			{
				.nlmsg_len = NLMSG_LENGTH(size),
				.nlmsg_type = type,
				.nlmsg_flags = NLM_F_REQUEST | flags,
			},
	};

	memcpy(made.payload, body, size);
	return made;
}

static void add_attribute(struct request *to, __u16 type, const void *value, size_t size)
{
	char *end = (char *)to + NLMSG_ALIGN(to->header.nlmsg_len);
	struct rtattr attribute = {.rta_len = RTA_LENGTH(size), .rta_type = type};

	memcpy(end, &attribute, sizeof(attribute));
	memcpy(end + RTA_LENGTH(0), value, size);
	to->header.nlmsg_len = NLMSG_ALIGN(to->header.nlmsg_len) + RTA_SPACE(size);
}

int netlink_open(void)
{
	struct timeval timeout = {.tv_sec = TIMEOUT_SECONDS};
	int netlink = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE);

	if (netlink < 0 || setsockopt(netlink, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout)))
		set_error("cannot use rtnetlink (%s)", strerror(errno));
	return netlink;
}

/* Read until the reply is complete; 0 or an errno. EINTR: the list changed meanwhile. */
static int read_reply(int netlink, each_message each, void *context)
{
	/* The kernel makes no larger message (NLMSG_GOODSIZE, and 32 KiB for dumps). */
	static char buffer[65536] __attribute__((aligned(NLMSG_ALIGNTO)));
	bool was_interrupted = false;

	for (;;) {
		ssize_t size = recv(netlink, buffer, sizeof(buffer), 0);
		const struct nlmsghdr *message = (const struct nlmsghdr *)buffer;

		if (size < 0)
			return errno;
		for (; NLMSG_OK(message, size); message = NLMSG_NEXT(message, size)) {
			was_interrupted |= message->nlmsg_flags & NLM_F_DUMP_INTR;
			if (message->nlmsg_type == NLMSG_DONE)
				return was_interrupted ? EINTR : 0;
			if (message->nlmsg_type == NLMSG_ERROR)
				return -((const struct nlmsgerr *)NLMSG_DATA(message))->error;
			if (each)
				each(message, context);
		}
	}
}

static int dump(int netlink, const struct request *query, each_message each, void *context)
{
	struct request sent = *query;

	/* With an acknowledgement every reply has an end. */
	if ((sent.header.nlmsg_flags & NLM_F_DUMP) != NLM_F_DUMP)
		sent.header.nlmsg_flags |= NLM_F_ACK;
	if (send(netlink, &sent, sent.header.nlmsg_len, 0) < 0)
		return errno;
	return read_reply(netlink, each, context);
}

static const struct rtattr *attribute_of(const struct rtattr *first, size_t size, __u16 type)
{
	int left = (int)size;

	for (; RTA_OK(first, left); first = RTA_NEXT(first, left))
		if ((first->rta_type & NLA_TYPE_MASK) == type)
			return first;
	return NULL;
}

static int attribute_number(const struct rtattr *attribute, int fallback)
{
	int number = fallback;

	if (attribute && RTA_PAYLOAD(attribute) >= sizeof(number))
		memcpy(&number, RTA_DATA(attribute), sizeof(number));
	return number;
}

static bool is_veth(const struct rtattr *information)
{
	const struct rtattr *kind = NULL;

	if (information)
		kind = attribute_of(RTA_DATA(information), RTA_PAYLOAD(information),
				    IFLA_INFO_KIND);
	return kind && RTA_PAYLOAD(kind) >= 4 && !memcmp(RTA_DATA(kind), "veth", 4) &&
	       (RTA_PAYLOAD(kind) == 4 || !((const char *)RTA_DATA(kind))[4]);
}

static void collect_link(const struct nlmsghdr *message, void *context)
{
	const struct ifinfomsg *body = NLMSG_DATA(message);
	const struct rtattr *first = IFLA_RTA(body);
	size_t size = IFLA_PAYLOAD(message);
	struct links *found = context;

	if (message->nlmsg_type != RTM_NEWLINK || found->count == POD_LINKS)
		return;
	found->all[found->count++] = (struct link){
		.ifindex = body->ifi_index,
		.peer = attribute_number(attribute_of(first, size, IFLA_LINK), 0),
		.peer_nsid = attribute_number(attribute_of(first, size, IFLA_LINK_NETNSID), -1),
		.is_veth = is_veth(attribute_of(first, size, IFLA_LINKINFO)),
	};
}

/* `count` is that of `context`, and is reset at each attempt. */
static bool list(int netlink, const struct request *query, each_message each, void *context,
		 size_t *count)
{
	int error = EINTR;

	for (int attempt = 0; error == EINTR && attempt < MAX_ATTEMPTS; attempt++) {
		*count = 0;
		error = dump(netlink, query, each, context);
	}
	return !error || set_error("cannot list interfaces (%s)", strerror(error));
}

bool read_links(int netlink, struct links *found)
{
	struct ifinfomsg body = {.ifi_family = AF_UNSPEC};
	struct request query = request(RTM_GETLINK, NLM_F_DUMP, &body, sizeof(body));

	return list(netlink, &query, collect_link, found, &found->count);
}

bool read_link(int netlink, int ifindex, struct link *found)
{
	struct ifinfomsg body = {.ifi_family = AF_UNSPEC, .ifi_index = ifindex};
	struct request query = request(RTM_GETLINK, 0, &body, sizeof(body));
	struct links one = {.count = 0};
	int error = dump(netlink, &query, collect_link, &one);

	if (error || !one.count)
		return set_error("cannot read interface %d (%s)", ifindex, strerror(error));
	*found = one.all[0];
	return true;
}

static void collect_address(const struct nlmsghdr *message, void *context)
{
	const struct ifaddrmsg *body = NLMSG_DATA(message);
	const struct rtattr *value;
	struct addresses *found = context;
	struct address address = {{0}};
	const unsigned char *bytes;

	if (message->nlmsg_type != RTM_NEWADDR)
		return;
	/* Of a point-to-point link IFA_ADDRESS is the other end. */
	value = attribute_of(IFA_RTA(body), IFA_PAYLOAD(message), IFA_LOCAL);
	if (!value)
		value = attribute_of(IFA_RTA(body), IFA_PAYLOAD(message), IFA_ADDRESS);
	if (!value)
		return;
	bytes = RTA_DATA(value);
	if (body->ifa_family == AF_INET && RTA_PAYLOAD(value) == 4 && bytes[0] != 127) {
		address.word[2] = htonl(0xffff);
		memcpy(&address.word[3], bytes, 4);
	} else if (body->ifa_family == AF_INET6 && RTA_PAYLOAD(value) == 16 &&
		   memcmp(bytes, &in6addr_loopback, 16)) {
		memcpy(&address, bytes, 16);
	} else {
		return;
	}
	if (found->count < POD_ADDRESSES)
		found->all[found->count] = address;
	found->count++;
}

bool read_addresses(int netlink, struct addresses *found)
{
	struct ifaddrmsg body = {.ifa_family = AF_UNSPEC};
	struct request query = request(RTM_GETADDR, NLM_F_DUMP, &body, sizeof(body));

	return list(netlink, &query, collect_address, found, &found->count);
}

static void collect_nsid(const struct nlmsghdr *message, void *context)
{
	const struct rtgenmsg *body = NLMSG_DATA(message);
	const char *first = (const char *)body + NLMSG_ALIGN(sizeof(*body));

	if (message->nlmsg_type == RTM_NEWNSID)
		*(int *)context = attribute_number(
			attribute_of((const struct rtattr *)first,
				     NLMSG_PAYLOAD(message, sizeof(*body)), NETNSA_NSID),
			-1);
}

bool read_nsid(int netlink, int netns, int *nsid)
{
	struct rtgenmsg body = {.rtgen_family = AF_UNSPEC};
	struct request query = request(RTM_GETNSID, 0, &body, sizeof(body));
	int error;

	*nsid = -1;
	add_attribute(&query, NETNSA_FD, &netns, sizeof(netns));
	error = dump(netlink, &query, collect_nsid, nsid);
	return !error || set_error("the pod's network namespace has no nsid (%s)", strerror(error));
}

static struct tcmsg filter_message(int ifindex, bool is_egress, __u32 handle)
{
	return (struct tcmsg){
		.tcm_family = AF_UNSPEC,
		.tcm_ifindex = ifindex,
		.tcm_handle = handle,
		.tcm_parent =
			TC_H_MAKE(TC_H_CLSACT, is_egress ? TC_H_MIN_EGRESS : TC_H_MIN_INGRESS),
		.tcm_info = TC_H_MAKE(PRIORITY << 16, htons(ETH_P_ALL)),
	};
}

static int add_qdisc(int netlink, int ifindex)
{
	struct tcmsg body = {
		.tcm_family = AF_UNSPEC,
		.tcm_ifindex = ifindex,
		.tcm_handle = TC_H_MAKE(TC_H_CLSACT, 0),
		.tcm_parent = TC_H_CLSACT,
	};
	struct request query =
		request(RTM_NEWQDISC, NLM_F_CREATE | NLM_F_EXCL, &body, sizeof(body));

	add_attribute(&query, TCA_KIND, "clsact", sizeof("clsact"));
	return dump(netlink, &query, NULL, NULL);
}

static void collect_kind(const struct nlmsghdr *message, void *context)
{
	const struct tcmsg *body = NLMSG_DATA(message);
	const struct rtattr *kind;

	if (message->nlmsg_type != RTM_NEWQDISC)
		return;
	kind = attribute_of(TCA_RTA(body), TCA_PAYLOAD(message), TCA_KIND);
	if (kind)
		snprintf(context, KIND_SIZE, "%.*s", (int)RTA_PAYLOAD(kind),
			 (const char *)RTA_DATA(kind));
}

/* As bpf/clsact.py `_check_qdisc`: on a qdisc ingress an egress filter runs at the ingress. */
static bool check_qdisc(int netlink, int ifindex)
{
	struct tcmsg body = {
		.tcm_family = AF_UNSPEC,
		.tcm_ifindex = ifindex,
		.tcm_parent = TC_H_CLSACT,
	};
	/* It is a notification, which reaches its requester only as an echo (tc_get_qdisc). */
	struct request query = request(RTM_GETQDISC, NLM_F_ECHO, &body, sizeof(body));
	char kind[KIND_SIZE] = "";
	int error = dump(netlink, &query, collect_kind, kind);

	if (error)
		return set_error("cannot read the qdisc of interface %d (%s)", ifindex,
				 strerror(error));
	return !kind[0] || !strcmp(kind, "clsact") ||
	       set_error("interface %d has a qdisc %s where clsact is needed", ifindex, kind);
}

bool add_filter(int netlink, int ifindex, bool is_egress, int program, const char *name)
{
	struct tcmsg body = filter_message(ifindex, is_egress, handles[0]);
	struct request query =
		request(RTM_NEWTFILTER, NLM_F_CREATE | NLM_F_EXCL, &body, sizeof(body));
	__u32 flags = TCA_BPF_FLAG_ACT_DIRECT;
	int error = add_qdisc(netlink, ifindex);
	struct rtattr *options;
	char *start;

	if (error && error != EEXIST)
		return set_error("cannot attach a clsact qdisc to interface %d (%s)", ifindex,
				 strerror(error));
	if (error && !check_qdisc(netlink, ifindex))
		return false;
	add_attribute(&query, TCA_KIND, "bpf", sizeof("bpf"));
	start = (char *)&query + NLMSG_ALIGN(query.header.nlmsg_len);
	add_attribute(&query, TCA_OPTIONS, "", 0);
	add_attribute(&query, TCA_BPF_FD, &program, sizeof(program));
	add_attribute(&query, TCA_BPF_NAME, name, strlen(name) + 1);
	add_attribute(&query, TCA_BPF_FLAGS, &flags, sizeof(flags));
	options = (struct rtattr *)start;
	options->rta_len = (__u16)((char *)&query + query.header.nlmsg_len - start);
	error = dump(netlink, &query, NULL, NULL);
	return !error || error == EEXIST ||
	       set_error("cannot attach a filter to interface %d (%s)", ifindex, strerror(error));
}

bool has_filter(int netlink, int ifindex, bool is_egress)
{
	for (size_t i = 0; i < sizeof(handles) / sizeof(handles[0]); i++) {
		struct tcmsg body = filter_message(ifindex, is_egress, handles[i]);
		struct request query = request(RTM_GETTFILTER, 0, &body, sizeof(body));

		add_attribute(&query, TCA_KIND, "bpf", sizeof("bpf"));
		if (!dump(netlink, &query, NULL, NULL))
			return true;
	}
	return false;
}

void delete_filter(int netlink, int ifindex, bool is_egress)
{
	for (size_t i = 0; i < sizeof(handles) / sizeof(handles[0]); i++) {
		struct tcmsg body = filter_message(ifindex, is_egress, handles[i]);
		struct request query = request(RTM_DELTFILTER, 0, &body, sizeof(body));

		add_attribute(&query, TCA_KIND, "bpf", sizeof("bpf"));
		dump(netlink, &query, NULL, NULL); /* no error if there is none */
	}
}
