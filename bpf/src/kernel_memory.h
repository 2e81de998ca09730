/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The kernel's own structs, at offsets that user space reads from BTF.
 */
#ifndef PODGATE_KERNEL_MEMORY_H
#define PODGATE_KERNEL_MEMORY_H

#include "addresses.h"

/* Linux 5.5 has the helpers. `at`: an address in the kernel, or 0, which cannot be read. */
ALWAYS_INLINE bool read_kernel(void *to, __u32 bytes, __u64 at)
{
	return !bpf_probe_read_kernel(to, bytes, (void *)at);
}

#endif
