/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#ifndef PODGATE_CLOCK_H
#define PODGATE_CLOCK_H

/*
 * CLOCK_MONOTONIC, late by up to one tick (1 to 10 ms): exact enough here, at a fifth of the cost.
 * Before Linux 5.11 there is only the exact clock.
 */
ALWAYS_INLINE __u64 read_clock_ns(void)
{
#if COARSE_CLOCK
	return bpf_ktime_get_coarse_ns();
#else
	return bpf_ktime_get_ns();
#endif
}

/* The time of this packet, read once. */
ALWAYS_INLINE __u64 packet_time_ns(struct packet *packet)
{
	if (!packet->now_ns)
		packet->now_ns = read_clock_ns();
	return packet->now_ns;
}

/* 0 if `then_ns` is from a clock that is slightly ahead of this one. */
ALWAYS_INLINE __u64 age_ns(__u64 now_ns, __u64 then_ns)
{
	__s64 age_ns = now_ns - then_ns;

	return age_ns > 0 ? age_ns : 0;
}

#endif
