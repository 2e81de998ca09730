/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Telling of single refusals. So many in a tenth of a second for each CPU and no more: a flood of a
 * million packets a second costs one lookup each, and the reader nothing. What is not told is
 * counted; the aggregate of callers misses nobody.
 */
#ifndef PODGATE_EVENTS_H
#define PODGATE_EVENTS_H

/* Whether one more may be told now; if not, that is counted. */
ALWAYS_INLINE bool consume_event_budget(__u64 now_ns)
{
	__u32 only = 0;
	struct event_budget *budget = event_budget.lookup(&only);

	if (!budget)
		return false;
	if (age_ns(now_ns, budget->since_ns) >= EVENT_WINDOW_NS) {
		budget->since_ns = now_ns;
		budget->remaining = EVENTS_PER_WINDOW;
	}
	if (!budget->remaining) {
		budget->suppressed++;
		return false;
	}
	budget->remaining--;
	return true;
}

/* The ring had no room. */
ALWAYS_INLINE void count_suppressed_event(void)
{
	__u32 only = 0;
	struct event_budget *budget = event_budget.lookup(&only);

	if (budget)
		budget->suppressed++;
}

/* The running task, where it is the sender's by its cgroup. */
ALWAYS_INLINE void set_event_process(struct drop_event *event)
{
	if (!event->cgroup || bpf_get_current_cgroup_id() != event->cgroup)
		return;
	event->pid = bpf_get_current_pid_tgid() >> 32;
	bpf_get_current_comm(&event->process_name, sizeof(event->process_name));
}

#endif
