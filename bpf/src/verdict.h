/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The verdict on a packet: its encoding, and how it is counted and reported.
 */
#ifndef PODGATE_VERDICT_H
#define PODGATE_VERDICT_H

#include "counting.h"

/* TCX_NEXT, which clsact reads as TC_ACT_UNSPEC: the CNI's programs that run later still decide. */
#define TCX_NEXT (-1)
#define TCX_DROP 2

/* No verdict yet: evaluate_new_flow decides. It is large, and so in each program once. */
#define NEW_FLOW (VERDICT_COUNT * REASON_SLOTS)

/*
 * As count_packet, in a tc program. No other tc program runs on this CPU at the same time, and
 * others do not write these counts.
 */
ALWAYS_INLINE void count_frequent(__u32 gate_slot, __u64 verdict_slot)
{
	struct frequent_counts *count;

	if (verdict_slot != PASS(REASON_ESTABLISHED) && verdict_slot != DROP(REASON_NODE)) {
		count_packet(gate_slot, verdict_slot);
		return;
	}
	count = frequent_counts.lookup(&gate_slot);
	if (!count)
		return;
	if (verdict_slot == PASS(REASON_ESTABLISHED))
		count->established++;
	else
		count->node++;
}

/* As consume_event_budget, in a tc program, of which only one runs on a CPU at the same time. */
ALWAYS_INLINE bool consume_packet_budget(__u64 now_ns)
{
	__u32 only = 0;
	struct event_budget *budget = packet_budget.lookup(&only);

	if (!budget)
		return false;
	begin_event_window(budget, now_ns);
	if (budget->remaining <= 0) {
		budget->suppressed++;
		return false;
	}
	budget->remaining--;
	return true;
}

ALWAYS_INLINE void emit_drop_event(struct __sk_buff *skb, struct packet *packet, __u64 verdict_slot)
{
	__u64 now_ns = packet_time_ns(packet);
	struct drop_event *event;

	if (!consume_packet_budget(now_ns))
		return;
	event = drop_events.ringbuf_reserve(sizeof(*event));
	if (!event) {
		count_suppressed_event();
		return;
	}
	__builtin_memset(event, 0, sizeof(*event));
	event->at_ns = now_ns;
	event->cgroup = packet->hairpin_cgroup;
	if (!event->cgroup)
		event->cgroup = source_cgroup(skb, false);
	event->source = packet->source;
	event->destination = packet->destination;
	event->ifindex = packet->gate_ifindex;
	event->source_port = packet->source_port;
	event->destination_port = packet->destination_port;
	event->protocol = packet->protocol;
	event->verdict = verdict_slot / REASON_SLOTS;
	event->reason = verdict_slot % REASON_SLOTS;
	if (HAS_CURRENT_TASK)
		set_event_process(event);
	drop_events.ringbuf_submit(event, 0);
}

/* No events for a bridge's flooded copies, which the pod's own gate reports, nor for path tests. */
ALWAYS_INLINE void count_drop(struct __sk_buff *skb, struct packet *packet, __u64 verdict_slot)
{
	count_frequent(packet->gate_slot, verdict_slot);
	if (!packet->is_stray && verdict_slot % REASON_SLOTS != REASON_PATH_TEST)
		emit_drop_event(skb, packet, verdict_slot);
}

#endif
