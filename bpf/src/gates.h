/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Finding a gate's configuration, and the pod's addresses in it.
 */
#ifndef PODGATE_GATES_H
#define PODGATE_GATES_H

/* The current version of a slot's configuration. */
ALWAYS_INLINE struct gate *gate_in_slot(__u32 slot)
{
	struct gate_slot *found = gates.lookup(&slot);

	return found ? &found->versions[found->current & 1] : 0;
}

/*
 * The gate of an interface; NULL if it has none. Nearly all gates are in the slot that follows from
 * the ifindex, which costs an index into an array; the others are found in a hash.
 */
ALWAYS_INLINE struct gate *find_gate(__u32 ifindex)
{
	struct gate *gate;
	__u32 *slot;

	if (!ifindex)
		return 0;
	gate = gate_in_slot(FIRST_SLOT + ifindex % MAX_GATES);
	if (gate && gate->ifindex == ifindex)
		return gate;
	slot = gate_slots.lookup(&ifindex);
	if (!slot)
		return 0;
	gate = gate_in_slot(*slot);
	return gate && gate->ifindex == ifindex ? gate : 0;
}

/* Whether the gate lists the address as the pod's. address: aligned to 8 bytes. */
ALWAYS_INLINE bool is_listed(struct gate *gate, struct address *address)
{
	__u64 *listed, *wanted = (__u64 *)address;
	struct gate_address key;

	for (int i = 0; i < GATE_ADDRESSES; i++) {
		listed = (__u64 *)&gate->addresses[i];
		if (i < gate->address_count && !((listed[0] ^ wanted[0]) | (listed[1] ^ wanted[1])))
			return true;
	}
	if (!(gate->flags & GATE_HAS_MORE_ADDRESSES))
		return false;
	key.address = *address;
	key.ifindex = gate->ifindex;
	return gate_addresses.lookup(&key);
}

#endif
