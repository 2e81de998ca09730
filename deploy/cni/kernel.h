/* SPDX-License-Identifier: Apache-2.0 */
/* bpf(2): pinned maps, and programs attached by tcx links. */
#ifndef PODGATE_CNI_KERNEL_H
#define PODGATE_CNI_KERNEL_H

#include <linux/types.h>
#include <stdbool.h>

/* The expected shape of a pinned map; sizes in bytes. */
struct map_shape {
	const char *name;
	__u32 type;
	__u32 key_size;
	__u32 value_size;
	__u32 max_entries;
	__u32 flags;
};

/* -1 with errno. */
int open_pin(const char *path);
int pin(int descriptor, const char *path);

/* A descriptor; -1 with an error set, also for a map of another shape. */
int open_map(const char *path, const struct map_shape *shape);

/* Of a map that has no name yet; -1 with errno. */
int create_map(const struct map_shape *shape);

/* These are 0, or -1 with errno. `insert` does not replace: EEXIST. */
int map_get(int map, const void *key, void *value);
int map_insert(int map, const void *key, const void *value);
int map_set(int map, const void *key, const void *value);
int map_delete(int map, const void *key);
int map_next(int map, const void *key, void *next); /* key: NULL for the first */

/* Wait until all running programs have ended: see bpf/rcu.py. */
void wait_for_programs(void);

/* Attach before all other programs; the link, or -1 with errno (EEXIST: already attached). */
int attach_first(int program, int ifindex, bool is_egress);
int detach_link(int link);

/* The interface of a tcx link; 0 if it is deleted, -1 for another kind of link. */
int link_ifindex(int link);

#endif
