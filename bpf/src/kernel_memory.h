/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The kernel's own structs, at offsets that user space reads from BTF.
 */
#ifndef PODGATE_KERNEL_MEMORY_H
#define PODGATE_KERNEL_MEMORY_H

#include "addresses.h"

/*
 * Linux 5.5 has these helpers. bcc's own names for them stand for the older bpf_probe_read where
 * the compiler sees no kernel symbols, as in an image's build; tc programs may not call that one.
 */
static long (*probe_read_kernel)(void *to, __u32 bytes,
				 const void *from) = (void *)BPF_FUNC_probe_read_kernel;
static long (*probe_read_kernel_str)(void *to, __u32 bytes,
				     const void *from) = (void *)BPF_FUNC_probe_read_kernel_str;

/* at: an address in the kernel, or 0, which cannot be read. */
ALWAYS_INLINE bool read_kernel(void *to, __u32 bytes, __u64 at)
{
	return !probe_read_kernel(to, bytes, (void *)at);
}

/* As much of a string as there is room for. */
ALWAYS_INLINE bool read_kernel_string(void *to, __u32 bytes, __u64 at)
{
	return probe_read_kernel_str(to, bytes, (void *)at) >= 0;
}

#endif
