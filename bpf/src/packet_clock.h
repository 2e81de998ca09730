/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#ifndef PODGATE_PACKET_CLOCK_H
#define PODGATE_PACKET_CLOCK_H

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

/*
 * The time of this packet, in a tc program: each CPU reads the clock once for a tick. The tick that
 * moves the coarse clock moves jiffies a moment before, and these cost one load. So the time may be
 * late by two ticks. No other tc program runs on this CPU at the same time.
 */
ALWAYS_INLINE __u64 packet_time_ns(struct packet *packet)
{
	__u32 only = 0;
	struct clock_reading *last;
	__u64 jiffies;

	if (packet->now_ns)
		return packet->now_ns;
	last = clock_readings.lookup(&only);
	if (!last)
		return read_clock_ns();
	jiffies = bpf_jiffies64();
	if (last->jiffies != jiffies) {
		last->now_ns = read_clock_ns();
		last->jiffies = jiffies;
	}
	packet->now_ns = last->now_ns;
	return packet->now_ns;
}

#endif
