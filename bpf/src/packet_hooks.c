/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Reads the words of a network namespace, and of its loopback, that are 0 while nothing is hooked
 * there. Never attached: BPF_PROG_TEST_RUN runs it once, in a thread that is in the namespace, with
 * a frame that has the offsets and gets the answer. bpf/packet_hooks.py has the twins of these
 * declarations.
 */
#define WORDS_MAX 16

/* Offsets in structs of the kernel, from its type information. */
struct hook_offsets {
	__u32 nsproxy;	/* In a task. */
	__u32 net;	/* In its nsproxy. */
	__u32 loopback; /* In the namespace. */
	__u32 state;	/* In the loopback. */
	__u32 words[WORDS_MAX];
};

struct hook_words {
	__u8 ethernet_header[14]; /* All 0. */
	__u8 netns_words; /* Of the words these come first; the others are the loopback's. */
	__u8 count;
	struct hook_offsets offsets;
	__u32 used;  /* The answer: how many words are not 0, */
	__u64 netns; /* and addresses in the kernel, 0 for what cannot be read. */
	__u64 loopback;
	__u64 state; /* Of the loopback: whether it is up. */
};

/* See kernel_memory.h. */
static long (*probe_read_kernel)(void *to, __u32 bytes,
				 const void *from) = (void *)BPF_FUNC_probe_read_kernel;

/* 0 for what cannot be read. */
static inline __attribute__((always_inline)) __u64 read_u64(__u64 at)
{
	__u64 value = 0;

	probe_read_kernel(&value, sizeof(value), (void *)at);
	return value;
}

int find_packet_hooks(struct __sk_buff *frame)
{
	void *end = (void *)(long)frame->data_end;
	struct hook_words *found = (void *)(long)frame->data;
	__u64 task = bpf_get_current_task();
	__u32 i, used = 0;

	if ((void *)(found + 1) > end)
		return 0;
	found->netns = read_u64(read_u64(task + found->offsets.nsproxy) + found->offsets.net);
	found->loopback = read_u64(found->netns + found->offsets.loopback);
	for (i = 0; i < WORDS_MAX && i < found->count; i++) {
		__u64 base = i < found->netns_words ? found->netns : found->loopback;

		used += !!read_u64(base + found->offsets.words[i]);
	}
	found->used = used;
	found->state = read_u64(found->loopback + found->offsets.state);
	return 0;
}
