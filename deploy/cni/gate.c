// SPDX-License-Identifier: Apache-2.0
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/bpf.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "gate.h"
#include "kernel.h"
#include "netlink.h"
#include "problem.h"

/* PODGATE_SCHEMA is SCHEMA of bpf/abi.py, defined by build.sh. */
#define TEXT_OF(number) #number
#define AS_TEXT(number) TEXT_OF(number)
#define DIRECTORY	"podgate/v" AS_TEXT(PODGATE_SCHEMA)
#define EGRESS		"gate_egress"
#define INGRESS		"gate_ingress"
#define MOVING		"-moving"
#define SEVERAL		0 /* the interface of an address that several pods have */
#define LAST_PORT	65535
#define LOCK_SECONDS	5
#define TRIES_A_SECOND	100

/* The kernel copies a value for each CPU that is possible; NR_CPUS is not larger (CONFIG_MAXSMP).
 */
#define MAX_CPUS 8192

static const struct map_shape slots_shape = {
	"gate_slots", BPF_MAP_TYPE_HASH, 4, 4, MAX_GATES, BPF_F_NO_PREALLOC,
};
static const struct map_shape gates_shape = {
	"gates", BPF_MAP_TYPE_ARRAY, 4, sizeof(struct gate_slot), SLOT_COUNT, 0,
};
static const struct map_shape counters_shape = {
	"counters", BPF_MAP_TYPE_ARRAY, 4, sizeof(struct counters), SLOT_COUNT, 0,
};
static const struct map_shape frequent_counts_shape = {
	"frequent_counts",
	BPF_MAP_TYPE_PERCPU_ARRAY,
	4,
	sizeof(struct frequent_counts),
	SLOT_COUNT,
	0,
};
static const struct map_shape more_rules_shape = {
	"more_rules",  BPF_MAP_TYPE_HASH, sizeof(struct more_rules_key), sizeof(struct more_rules),
	2 * MAX_GATES, BPF_F_NO_PREALLOC,
};
static const struct map_shape more_addresses_shape = {
	"gate_addresses",   BPF_MAP_TYPE_HASH, sizeof(struct gate_address), 4,
	MAX_MORE_ADDRESSES, BPF_F_NO_PREALLOC,
};
static const struct map_shape addresses_shape = {
	"addresses", BPF_MAP_TYPE_HASH, sizeof(struct address), 4, MAX_ADDRESSES, BPF_F_NO_PREALLOC,
};
static const struct map_shape replies_shape = {
	"replies", BPF_MAP_TYPE_HASH_OF_MAPS, 4, 4, MAX_GATES, 0,
};
static const struct map_shape reply_table_shape = {
	"reply_table", BPF_MAP_TYPE_ARRAY, 4, sizeof(struct reply_set), REPLY_SETS, 0,
};

static int open_shared_map(const char *bpffs, const struct map_shape *shape)
{
	char path[PATH_MAX];

	snprintf(path, sizeof(path), "%s/" DIRECTORY "/maps/%s", bpffs, shape->name);
	return open_map(path, shape);
}

bool open_installation(struct installation *opened, const char *bpffs)
{
	opened->bpffs = bpffs;
	opened->egress = opened->ingress = -1;
	return (opened->gates = open_shared_map(bpffs, &gates_shape)) >= 0 &&
	       (opened->slots = open_shared_map(bpffs, &slots_shape)) >= 0 &&
	       (opened->counters = open_shared_map(bpffs, &counters_shape)) >= 0 &&
	       (opened->frequent_counts = open_shared_map(bpffs, &frequent_counts_shape)) >= 0 &&
	       (opened->more_rules = open_shared_map(bpffs, &more_rules_shape)) >= 0 &&
	       (opened->more_addresses = open_shared_map(bpffs, &more_addresses_shape)) >= 0 &&
	       (opened->addresses = open_shared_map(bpffs, &addresses_shape)) >= 0 &&
	       (opened->replies = open_shared_map(bpffs, &replies_shape)) >= 0;
}

static int open_program(const char *bpffs, const char *directory, const char *name)
{
	char path[PATH_MAX];
	int program;

	snprintf(path, sizeof(path), "%s/" DIRECTORY "/progs/%s/%s", bpffs, directory, name);
	program = open_pin(path);
	if (program < 0)
		set_error("%s cannot be opened (%s)", path, strerror(errno));
	return program;
}

bool open_programs(struct installation *opened, const struct gate_options *options)
{
	const char *directory = options->programs;

	return (opened->egress = open_program(opened->bpffs, directory, EGRESS)) >= 0 &&
	       (opened->ingress = open_program(opened->bpffs, directory, INGRESS)) >= 0;
}

static bool is_own_netns(int netns)
{
	struct stat own, other;

	return !stat("/proc/self/ns/net", &own) && !fstat(netns, &other) &&
	       own.st_dev == other.st_dev && own.st_ino == other.st_ino;
}

bool open_pod_netns(struct pod_netns *opened, const char *netns)
{
	opened->netns = open(netns, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	if (opened->netns < 0)
		return set_error("%s cannot be opened (%s)", netns, strerror(errno));
	if (is_own_netns(opened->netns))
		return set_error("%s is the host's network namespace", netns);
	return (opened->netlink = netlink_open()) >= 0;
}

/* A netlink socket created in the pod's namespace; -1 with an error set. */
static int netlink_in(int netns)
{
	int own = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
	int netlink;

	if (own < 0 || setns(netns, CLONE_NEWNET)) {
		set_error("cannot enter the pod's network namespace (%s)", strerror(errno));
		if (own >= 0)
			close(own);
		return -1;
	}
	netlink = netlink_open();
	if (setns(own, CLONE_NEWNET))
		abort(); /* all that follows would happen in the pod */
	close(own);
	return netlink;
}

/*
 * The host's ends of the pod's veths. Checked from both ends, as agent/linux/pod_network.py does:
 * names prove nothing, and a veth within the pod may have an ifindex that another interface has on
 * the host.
 */
static bool find_host_links(const struct pod_netns *pod, int inside, struct links *own)
{
	struct links links = {.count = 0};
	int nsid;

	own->count = 0;
	if (!read_links(inside, &links))
		return false;
	for (size_t i = 0; i < links.count; i++) {
		const struct link *link = &links.all[i];
		struct link peer;

		if (!link->is_veth || !link->peer || !read_link(pod->netlink, link->peer, &peer))
			continue;
		if (peer.is_veth && peer.peer == link->ifindex)
			own->all[own->count++] = peer;
	}
	/* By reading the peers the kernel has assigned an nsid to the pod's namespace. */
	if (!read_nsid(pod->netlink, pod->netns, &nsid))
		return false;
	for (size_t i = 0; i < own->count;)
		if (nsid < 0 || own->all[i].peer_nsid != nsid)
			own->all[i] = own->all[--own->count];
		else
			i++;
	return true;
}

static void link_path(char path[PATH_MAX], const struct installation *at, bool is_egress,
		      int ifindex)
{
	snprintf(path, PATH_MAX, "%s/" DIRECTORY "/links/%s-%d", at->bpffs,
		 is_egress ? EGRESS : INGRESS, ifindex);
}

/* The interface of a pinned link; 0 if it is deleted, -1 if there is no such pin. */
static int pinned_ifindex(const char *path)
{
	int link = open_pin(path);
	int ifindex;

	if (link < 0)
		return -1;
	ifindex = link_ifindex(link);
	close(link);
	return ifindex;
}

/*
 * The agent may do the same at the same time. The link that is pinned stays; the other ends with
 * its descriptor, and at each moment one of them enforces.
 */
static bool attach_link(const struct installation *at, int ifindex, bool is_egress)
{
	int link = attach_first(is_egress ? at->egress : at->ingress, ifindex, is_egress);
	char path[PATH_MAX];
	int error;

	if (link < 0)
		return errno == EEXIST || set_error("cannot attach the gate to interface %d (%s)",
						    ifindex, strerror(errno));
	link_path(path, at, is_egress, ifindex);
	error = pin(link, path) ? errno : 0;
	if (error == EEXIST && pinned_ifindex(path) == ifindex) {
		error = 0;
	} else if (error == EEXIST) {
		unlink(path);
		error = pin(link, path) ? errno : 0;
	}
	close(link);
	return !error || set_error("%s cannot be pinned (%s)", path, strerror(error));
}

static bool attach(const struct installation *at, const struct pod_netns *pod,
		   const struct gate_options *options, int ifindex, bool is_egress)
{
	if (options->is_tcx)
		return attach_link(at, ifindex, is_egress);
	return add_filter(pod->netlink, ifindex, is_egress, is_egress ? at->egress : at->ingress,
			  is_egress ? DIRECTORY "/" EGRESS : DIRECTORY "/" INGRESS);
}

static bool is_attached(const struct installation *at, const struct pod_netns *pod, int ifindex,
			bool is_egress)
{
	char path[PATH_MAX];

	link_path(path, at, is_egress, ifindex);
	return pinned_ifindex(path) == ifindex || has_filter(pod->netlink, ifindex, is_egress);
}

static void detach(const struct installation *at, const struct pod_netns *pod, int ifindex,
		   bool is_egress)
{
	char path[PATH_MAX];

	link_path(path, at, is_egress, ifindex);
	for (int is_moving = 0; is_moving < 2; is_moving++) {
		int link;

		if (is_moving)
			strncat(path, MOVING, PATH_MAX - strlen(path) - 1);
		link = open_pin(path);
		if (link < 0)
			continue;
		if (link_ifindex(link) == ifindex)
			detach_link(link);
		close(link);
		unlink(path);
	}
	delete_filter(pod->netlink, ifindex, is_egress);
}

/* Excludes the agent and other calls from the maps of gates; as GateTable of bpf/gate_table.py. A
 * process that is stopped or frozen keeps its lock. */
static int lock_gates(const struct installation *at)
{
	const struct timespec pause = {.tv_nsec = 1000 * 1000 * 1000 / TRIES_A_SECOND};
	char path[PATH_MAX];
	int lock;

	snprintf(path, sizeof(path), "%s/" DIRECTORY "/maps", at->bpffs);
	lock = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (lock < 0) {
		set_error("%s cannot be opened (%s)", path, strerror(errno));
		return -1;
	}
	for (int tries = 0; tries < LOCK_SECONDS * TRIES_A_SECOND; tries++) {
		if (!flock(lock, LOCK_EX | LOCK_NB))
			return lock;
		nanosleep(&pause, NULL);
	}
	set_error("another process has kept %s locked for more than %d s; it may be stopped or "
		  "frozen: let it continue, or end it (/proc/locks)",
		  path, LOCK_SECONDS);
	close(lock);
	return -1;
}

/* The configuration of an interface; false if it has none. */
static bool read_gate(const struct installation *at, __u32 ifindex, struct gate *gate)
{
	struct gate_slot found;
	__u32 slot;

	if (map_get(at->slots, &ifindex, &slot) || map_get(at->gates, &slot, &found))
		return false;
	*gate = found.versions[found.current & 1];
	return gate->ifindex == ifindex;
}

/* A claimed address counts in the pod's own gate only. */
static bool owns_address(const struct installation *at, const struct gate *gate,
			 const struct address *address)
{
	struct gate_address key = {*address, gate->ifindex};
	__u32 is_claimed;

	for (int i = 0; i + gate->claimed_count < gate->address_count && i < GATE_ADDRESSES; i++)
		if (!memcmp(&gate->addresses[i], address, sizeof(*address)))
			return true;
	return gate->flags & GATE_HAS_MORE_ADDRESSES &&
	       !map_get(at->more_addresses, &key, &is_claimed) && !is_claimed;
}

static bool link_exists(__u32 ifindex)
{
	char name[IF_NAMESIZE];

	return if_indextoname(ifindex, name) || errno != ENXIO;
}

/* Write the interface of an address, as bpf/addresses.py does. */
static void publish_address(const struct installation *at, const struct address *address)
{
	__u32 owners = 0, owner = 0, ifindex;
	struct gate gate;
	bool is_first = true;

	/* If an entry is deleted meanwhile the walk starts again, so it is limited. */
	for (int i = 0; i < 2 * MAX_GATES; i++, is_first = false) {
		if (map_next(at->slots, is_first ? NULL : &ifindex, &ifindex))
			break;
		if (!read_gate(at, ifindex, &gate) || !owns_address(at, &gate, address) ||
		    owner == ifindex || !link_exists(ifindex))
			continue;
		owner = ifindex;
		owners++;
	}
	if (owners > 1)
		owner = SEVERAL;
	if (owners)
		map_set(at->addresses, address,
			&owner); /* a full map is no error: the gate still enforces */
	else
		map_delete(at->addresses, address);
}

/* The addresses of a gate, also those that are not in its struct. */
static void read_gate_addresses(const struct installation *at, const struct gate *gate,
				struct addresses *found)
{
	struct gate_address key;
	bool is_first = true;

	found->count = 0;
	while (found->count < gate->address_count && found->count < GATE_ADDRESSES) {
		found->all[found->count] = gate->addresses[found->count];
		found->count++;
	}
	if (!(gate->flags & GATE_HAS_MORE_ADDRESSES))
		return;
	for (int i = 0; i < 2 * MAX_MORE_ADDRESSES; i++, is_first = false) {
		if (map_next(at->more_addresses, is_first ? NULL : &key, &key) ||
		    found->count == POD_ADDRESSES)
			break;
		if (key.ifindex == gate->ifindex)
			found->all[found->count++] = key.address;
	}
}

static void delete_entries(const struct installation *at, __u32 ifindex)
{
	static const struct gate_slot empty;
	static struct addresses own;
	struct gate gate = {0};
	int lock = lock_gates(at);
	__u32 slot;

	if (lock < 0)
		return;
	if (read_gate(at, ifindex, &gate))
		read_gate_addresses(at, &gate, &own);
	else
		own.count = 0;
	for (size_t i = 0; i < own.count; i++) {
		struct gate_address key = {own.all[i], ifindex};

		map_delete(at->more_addresses, &key);
	}
	for (__u32 version = 0; version < 2; version++) {
		struct more_rules_key key = {ifindex, version};

		map_delete(at->more_rules, &key);
	}
	if (!map_get(at->slots, &ifindex, &slot)) {
		map_set(at->gates, &slot, &empty);
		map_delete(at->slots, &ifindex);
	}
	close(lock);
	map_delete(at->replies, &ifindex);
	for (size_t i = 0; i < own.count; i++)
		publish_address(at, &own.all[i]);
}

/* The slot in which programs look first, or else the last free one; 0 with an error set. */
static __u32 find_free_slot(const struct installation *at, __u32 ifindex)
{
	static bool is_taken[SLOT_COUNT];
	__u32 first = FIRST_SLOT + ifindex % MAX_GATES, other, slot;
	bool is_first = true;

	memset(is_taken, 0, sizeof(is_taken));
	for (int i = 0; i < MAX_GATES; i++, is_first = false) {
		if (map_next(at->slots, is_first ? NULL : &other, &other))
			break;
		if (!map_get(at->slots, &other, &slot) && slot < SLOT_COUNT)
			is_taken[slot] = true;
	}
	if (!is_taken[first])
		return first;
	for (slot = SLOT_COUNT - 1; slot >= FIRST_SLOT; slot--)
		if (!is_taken[slot])
			return slot;
	set_error("map gates is full");
	return 0;
}

/* Write a new gate's configuration; the lock is held. */
static bool insert_gate(const struct installation *at, __u32 ifindex, struct gate *gate,
			const struct addresses *addresses)
{
	static const struct counters zeros;
	static struct frequent_counts zeros_of_cpus[MAX_CPUS];
	struct gate_slot value = {0};
	__u32 own = 0;

	gate->ifindex = ifindex;
	gate->slot = find_free_slot(at, ifindex);
	if (!gate->slot)
		return false;
	for (size_t i = GATE_ADDRESSES; i < addresses->count && i < POD_ADDRESSES; i++) {
		struct gate_address key = {addresses->all[i], ifindex};

		/* More addresses than have room: all behind the interface are the pod's. */
		if (map_set(at->more_addresses, &key, &own))
			gate->flags |= GATE_ANY_ADDRESS;
	}
	value.versions[0] = *gate;
	return (!map_set(at->counters, &gate->slot, &zeros) &&
		!map_set(at->frequent_counts, &gate->slot, zeros_of_cpus) &&
		!map_set(at->gates, &gate->slot, &value) &&
		!map_insert(at->slots, &ifindex, &gate->slot)) ||
	       set_error("the gate's configuration cannot be written (%s)", strerror(errno));
}

/* Write a gate's configuration, unless the agent has written one; is_new: whether it had not. */
static bool ensure_gate(const struct installation *at, __u32 ifindex, struct gate *gate,
			const struct addresses *addresses, bool *is_new)
{
	int lock = lock_gates(at);
	__u32 slot;
	bool is_done;

	if (lock < 0)
		return false;
	*is_new = map_get(at->slots, &ifindex, &slot);
	is_done = !*is_new || insert_gate(at, ifindex, gate, addresses);
	close(lock);
	return is_done;
}

static bool create_reply_table(const struct installation *at, __u32 ifindex)
{
	int table = create_map(&reply_table_shape);
	bool is_done;

	if (table < 0)
		return set_error("cannot create the reply table (%s)", strerror(errno));
	is_done = !map_insert(at->replies, &ifindex, &table) || errno == EEXIST ||
		  set_error("map replies is full (%s)", strerror(errno));
	close(table);
	return is_done;
}

static bool gate_interface(const struct installation *at, const struct pod_netns *pod,
			   const struct gate_options *options, __u32 ifindex, struct gate *gate,
			   const struct addresses *addresses)
{
	bool is_new;

	if (!ensure_gate(at, ifindex, gate, addresses, &is_new))
		return false;
	if (!attach(at, pod, options, (int)ifindex, true)) {
		if (is_new)
			delete_entries(at, ifindex);
		return false;
	}
	/* An agent that has just started may have removed the entry, which had no gate yet. */
	if (!ensure_gate(at, ifindex, gate, addresses, &is_new))
		return false;
	for (size_t i = 0; i < addresses->count && i < POD_ADDRESSES; i++)
		publish_address(at, &addresses->all[i]);
	/* Enforcement first; then replies from the host may pass. */
	return create_reply_table(at, ifindex) && attach(at, pod, options, (int)ifindex, false);
}

bool gate_pod(const struct installation *at, const struct pod_netns *pod,
	      const struct gate_options *options)
{
	int inside = netlink_in(pod->netns);
	static struct addresses addresses;
	struct gate gate = {.mode = options->mode};
	struct links own;
	bool is_read;

	if (inside < 0)
		return false;
	is_read = find_host_links(pod, inside, &own) && read_addresses(inside, &addresses);
	close(inside);
	if (!is_read)
		return false;
	if (!own.count)
		return set_error(
			"no veth pair between host and pod; other interfaces are not gated");
	gate.address_count = addresses.count < GATE_ADDRESSES ? addresses.count : GATE_ADDRESSES;
	if (addresses.count > GATE_ADDRESSES)
		gate.flags |= GATE_HAS_MORE_ADDRESSES;
	if (addresses.count > POD_ADDRESSES)
		gate.flags |= GATE_ANY_ADDRESS;
	memcpy(gate.addresses, addresses.all, sizeof(gate.addresses));
	/* As `_ANY_TCP_PORT` of agent/kubelet/admitted_ports.py: the pod's ports are unknown. */
	gate.rule_count = 1;
	gate.rules[0].source_kind = SOURCE_KUBELET;
	gate.rules[0].protocol = IPPROTO_TCP;
	gate.rules[0].last_port = LAST_PORT;
	wait_for_programs();
	for (size_t i = 0; i < own.count; i++)
		if (!gate_interface(at, pod, options, (__u32)own.all[i].ifindex, &gate, &addresses))
			return false;
	return true;
}

bool check_pod(const struct installation *at, const struct pod_netns *pod)
{
	int inside = netlink_in(pod->netns);
	struct links own;
	bool is_read;

	if (inside < 0)
		return false;
	is_read = find_host_links(pod, inside, &own);
	close(inside);
	for (size_t i = 0; is_read && i < own.count; i++) {
		__u32 ifindex = (__u32)own.all[i].ifindex;
		struct gate gate;
		bool has_entry = read_gate(at, ifindex, &gate);

		if (has_entry && !is_attached(at, pod, (int)ifindex, true))
			return set_error("the gate of interface %u is not attached", ifindex);
		if (!has_entry && is_attached(at, pod, (int)ifindex, true))
			return set_error("the gate of interface %u has no configuration", ifindex);
	}
	return is_read;
}

static int index_of(int netlink, const char *name)
{
	struct ifreq request = {.ifr_ifindex = 0};

	strncpy(request.ifr_name, name, sizeof(request.ifr_name) - 1);
	return ioctl(netlink, SIOCGIFINDEX, &request) ? 0 : request.ifr_ifindex;
}

bool release_pod(const struct installation *at, const struct pod_netns *pod, const char *name)
{
	int inside = netlink_in(pod->netns);
	struct links own;
	int peer;
	bool is_read;

	if (inside < 0)
		return false;
	peer = index_of(inside, name);
	is_read = find_host_links(pod, inside, &own);
	close(inside);
	for (size_t i = 0; is_read && i < own.count; i++) {
		if (own.all[i].peer != peer)
			continue;
		/* Egress first: while it enforces, ingress must record the pod's flows. */
		detach(at, pod, own.all[i].ifindex, true);
		detach(at, pod, own.all[i].ifindex, false);
		wait_for_programs();
		delete_entries(at, (__u32)own.all[i].ifindex);
	}
	return is_read;
}

/* Unpin links of deleted interfaces. */
static void remove_stale_links(const struct installation *at)
{
	char directory[PATH_MAX], path[PATH_MAX];
	struct dirent *entry;
	DIR *listing;

	snprintf(directory, sizeof(directory), "%s/" DIRECTORY "/links", at->bpffs);
	listing = opendir(directory);
	while (listing && (entry = readdir(listing))) {
		if (strncmp(entry->d_name, EGRESS "-", strlen(EGRESS "-")) &&
		    strncmp(entry->d_name, INGRESS "-", strlen(INGRESS "-")))
			continue;
		if (snprintf(path, sizeof(path), "%s/%s", directory, entry->d_name) < PATH_MAX &&
		    pinned_ifindex(path) == 0)
			unlink(path);
	}
	if (listing)
		closedir(listing);
}

void remove_stale(const struct installation *at)
{
	static __u32 gone[MAX_GATES];
	size_t count = 0;
	__u32 ifindex;
	bool is_first = true;

	remove_stale_links(at);
	for (int i = 0; i < MAX_GATES; i++, is_first = false) {
		if (map_next(at->slots, is_first ? NULL : &ifindex, &ifindex))
			break;
		if (!link_exists(ifindex))
			gone[count++] = ifindex;
	}
	while (count)
		delete_entries(at, gone[--count]);
}
