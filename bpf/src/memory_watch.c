/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Compares words of the kernel's memory with what is expected of them, for one process that is
 * woken by a change alone. Attached to a software clock: each run is in the timer's interrupt.
 */
#include "abi.h"

BPF_ARRAY(words, struct watched_words, 1);
/* A byte for each time that words differed. */
BPF_RINGBUF_OUTPUT(word_changes, 1);

/* See kernel_memory.h. */
static long (*probe_read_kernel)(void *to, __u32 bytes,
				 const void *from) = (void *)BPF_FUNC_probe_read_kernel;

/* context: struct bpf_perf_event_data, of which nothing is read. */
int compare_words(void *context)
{
	__u32 only = 0;
	struct watched_words *watched = words.lookup(&only);
	__u8 change = 0;
	__u64 count, i, differences = 0;

	if (!watched)
		return 0;
	__sync_fetch_and_add(&watched->comparisons, 1);
	count = watched->count;
	for (i = 0; i < MAX_WATCHED_WORDS && i < count; i++) {
		struct watched_word *word = &watched->words[i];

		/*
		 * Keeps the compiler from counting down to 0: the verifier of kernels before 6.8
		 * (d028f87517d6) does not see that such a loop ends.
		 */
		asm volatile("" : "+r"(i));
		/* The kernel clears what it cannot read. */
		probe_read_kernel(&word->found, sizeof(word->found), (void *)word->address);
		/* No branch: the verifier would follow both sides for each word. */
		differences |= word->found ^ word->expected;
	}
	if (differences) {
		watched->count = 0;
		word_changes.ringbuf_output(&change, sizeof(change), 0);
	}
	return 0;
}
