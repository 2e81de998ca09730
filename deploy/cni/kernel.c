// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "kernel.h"
#include "problem.h"

/* Of headers newer than Debian 12's: Linux 6.6, and 5.10 for mprog's flag. */
#define TCX_INGRESS   46
#define TCX_EGRESS    47
#define LINK_TYPE_TCX 11
#define BEFORE	      8

/* membarrier(2): MEMBARRIER_CMD_GLOBAL */
#define BARRIER_GLOBAL 1

/* EAGAIN: the verifier, or what it takes for one, was interrupted by a signal. */
#define MAX_ATTEMPTS 5

/* All of it 0: an initializer need not clear what is beyond the member that it names. */
static const union bpf_attr empty;

static int bpf(int command, union bpf_attr *attributes)
{
	long result = -1;

	for (int attempt = 0; attempt < MAX_ATTEMPTS; attempt++) {
		result = syscall(SYS_bpf, command, attributes, sizeof(*attributes));
		if (result >= 0 || errno != EAGAIN)
			break;
	}
	return (int)result;
}

static __u64 pointer_value(const void *to)
{
	return (__u64)(uintptr_t)to;
}

int open_pin(const char *path)
{
	union bpf_attr attributes = empty;

	attributes.pathname = pointer_value(path);
	return bpf(BPF_OBJ_GET, &attributes);
}

int pin(int descriptor, const char *path)
{
	union bpf_attr attributes = empty;

	attributes.pathname = pointer_value(path);
	attributes.bpf_fd = (__u32)descriptor;
	return bpf(BPF_OBJ_PIN, &attributes);
}

/* Whether a descriptor is of this kind: the description of a program reads as one of a map. */
static bool is_kind(int descriptor, const char *kind)
{
	char path[64], target[64];
	ssize_t size;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", descriptor);
	size = readlink(path, target, sizeof(target) - 1);
	if (size < 0)
		return false;
	target[size] = '\0';
	return !strcmp(target, kind);
}

static bool object_info(int descriptor, void *description, __u32 size)
{
	union bpf_attr attributes = empty;

	attributes.info.bpf_fd = (__u32)descriptor;
	attributes.info.info_len = size;
	attributes.info.info = pointer_value(description);
	return !bpf(BPF_OBJ_GET_INFO_BY_FD, &attributes);
}

static bool matches_shape(int map, const struct map_shape *shape)
{
	struct bpf_map_info found = {0};

	return is_kind(map, "anon_inode:bpf-map") && object_info(map, &found, sizeof(found)) &&
	       found.type == shape->type && found.key_size == shape->key_size &&
	       found.value_size == shape->value_size && found.max_entries == shape->max_entries &&
	       found.map_flags == shape->flags;
}

int open_map(const char *path, const struct map_shape *shape)
{
	int map = open_pin(path);

	if (map < 0) {
		set_error("%s cannot be opened (%s)", path, strerror(errno));
		return -1;
	}
	if (!matches_shape(map, shape)) {
		set_error("%s is not the map that this version uses", path);
		close(map);
		return -1;
	}
	return map;
}

int create_map(const struct map_shape *shape)
{
	union bpf_attr attributes = empty;
	struct rlimit unlimited = {RLIM_INFINITY, RLIM_INFINITY};
	int map;

	attributes.map_type = shape->type;
	attributes.key_size = shape->key_size;
	attributes.value_size = shape->value_size;
	attributes.max_entries = shape->max_entries;
	attributes.map_flags = shape->flags;
	map = bpf(BPF_MAP_CREATE, &attributes);
	/* Until Linux 5.11 (97306be45fbe) a map's memory counts as locked. */
	if (map < 0 && errno == EPERM && !setrlimit(RLIMIT_MEMLOCK, &unlimited))
		map = bpf(BPF_MAP_CREATE, &attributes);
	return map;
}

static int map_command(int command, int map, const void *key, const void *value, __u64 flags)
{
	union bpf_attr attributes = empty;

	attributes.map_fd = (__u32)map;
	attributes.key = pointer_value(key);
	attributes.value = pointer_value(value);
	attributes.flags = flags;
	return bpf(command, &attributes);
}

int map_get(int map, const void *key, void *value)
{
	return map_command(BPF_MAP_LOOKUP_ELEM, map, key, value, 0);
}

int map_insert(int map, const void *key, const void *value)
{
	return map_command(BPF_MAP_UPDATE_ELEM, map, key, value, BPF_NOEXIST);
}

int map_set(int map, const void *key, const void *value)
{
	return map_command(BPF_MAP_UPDATE_ELEM, map, key, value, BPF_ANY);
}

int map_delete(int map, const void *key)
{
	return map_command(BPF_MAP_DELETE_ELEM, map, key, NULL, 0);
}

int map_next(int map, const void *key, void *next)
{
	return map_command(BPF_MAP_GET_NEXT_KEY, map, key, next, 0);
}

void wait_for_programs(void)
{
	struct timespec instead = {.tv_nsec = 100 * 1000 * 1000};

	if (syscall(SYS_membarrier, BARRIER_GLOBAL, 0, 0))
		nanosleep(&instead, NULL);
}

int attach_first(int program, int ifindex, bool is_egress)
{
	union bpf_attr attributes = empty;

	attributes.link_create.prog_fd = (__u32)program;
	attributes.link_create.target_ifindex = (__u32)ifindex;
	attributes.link_create.attach_type = is_egress ? TCX_EGRESS : TCX_INGRESS;
	attributes.link_create.flags = BEFORE;
	return bpf(BPF_LINK_CREATE, &attributes);
}

int detach_link(int link)
{
	union bpf_attr attributes = empty;

	attributes.link_detach.link_fd = (__u32)link;
	return bpf(BPF_LINK_DETACH, &attributes);
}

int link_ifindex(int link)
{
	/* `struct bpf_link_info` with the member for tcx, which older headers lack */
	struct {
		__u32 type, id, program, pad, ifindex, attach_type;
	} found = {0};

	if (!is_kind(link, "anon_inode:bpf_link") && !is_kind(link, "anon_inode:bpf-link"))
		return -1;
	if (!object_info(link, &found, sizeof(found)) || found.type != LINK_TYPE_TCX)
		return -1;
	return (int)found.ifindex;
}
