/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Counters of verdicts by gate, for programs of any type.
 */
#ifndef PODGATE_COUNTING_H
#define PODGATE_COUNTING_H

#include "addresses.h"

/* Verdict and reason in one number. */
#define PASS(reason) (VERDICT_PASS * REASON_SLOTS + (reason))
#define DROP(reason) (VERDICT_DROP * REASON_SLOTS + (reason))

ALWAYS_INLINE void count_packet(__u32 gate_slot, __u64 verdict_slot)
{
	struct counters *count = counters.lookup(&gate_slot);
	__u32 counter = verdict_slot % REASON_SLOTS;

	if (verdict_slot / REASON_SLOTS == VERDICT_WOULD_DROP)
		counter += REASON_SLOTS;
	if (count)
		__sync_fetch_and_add(&count->packets[counter], 1);
}

/* A drop before an interface is chosen. */
ALWAYS_INLINE void count_host_drop(enum reason reason)
{
	count_packet(HOST_SLOT, DROP(reason));
}

#endif
