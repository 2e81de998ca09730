/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
#ifndef PODGATE_CLOCK_H
#define PODGATE_CLOCK_H

#include "addresses.h"

/* 0 if `then_ns` is from a clock that is slightly ahead of this one. */
ALWAYS_INLINE __u64 age_ns(__u64 now_ns, __u64 then_ns)
{
	__s64 age_ns = now_ns - then_ns;

	return age_ns > 0 ? age_ns : 0;
}

#endif
