/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Drop events, a limited number per tenth of a second and CPU: in a flood of a million packets a
 * second each costs one lookup, and the reader nothing. Suppressed events are counted; the
 * aggregate in drop_sources has all drops.
 */
#ifndef PODGATE_EVENTS_H
#define PODGATE_EVENTS_H

ALWAYS_INLINE void begin_event_window(struct event_budget *budget, __u64 now_ns)
{
	if (age_ns(now_ns, budget->since_ns) >= EVENT_WINDOW_NS) {
		budget->since_ns = now_ns;
		budget->remaining = EVENTS_PER_WINDOW;
	}
}

/* Whether a cgroup program may send one more event now; otherwise it counts as suppressed. */
ALWAYS_INLINE bool consume_event_budget(__u64 now_ns)
{
	__u32 only = 0;
	struct event_budget *budget = event_budget.lookup(&only);

	if (!budget)
		return false;
	begin_event_window(budget, now_ns);
	/* These programs are preempted, also by packets: two may take the last. */
	if (budget->remaining <= 0) {
		__sync_fetch_and_add(&budget->suppressed, 1);
		return false;
	}
	__sync_fetch_and_add(&budget->remaining, -1);
	return true;
}

/* The ring was full. */
ALWAYS_INLINE void count_suppressed_event(void)
{
	__u32 only = 0;
	struct event_budget *budget = event_budget.lookup(&only);

	if (budget)
		__sync_fetch_and_add(&budget->suppressed, 1);
}

/* An empty event of a cgroup program, to be submitted; NULL if it is suppressed. */
ALWAYS_INLINE struct drop_event *reserve_event(__u64 now_ns)
{
	struct drop_event *event;

	if (!consume_event_budget(now_ns))
		return 0;
	event = drop_events.ringbuf_reserve(sizeof(*event));
	if (!event) {
		count_suppressed_event();
		return 0;
	}
	__builtin_memset(event, 0, sizeof(*event));
	event->at_ns = now_ns;
	return event;
}

/* Names the running task, if its cgroup is the source's. */
ALWAYS_INLINE void set_event_process(struct drop_event *event)
{
	if (!event->cgroup || bpf_get_current_cgroup_id() != event->cgroup)
		return;
	event->pid = bpf_get_current_pid_tgid() >> 32;
	bpf_get_current_comm(&event->process_name, sizeof(event->process_name));
}

#endif
