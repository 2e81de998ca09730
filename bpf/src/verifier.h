/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Arithmetic that keeps the verifier's work small: it follows both sides of each branch, and what
 * comes later once for each combination of values that it knows.
 */
#ifndef PODGATE_VERIFIER_H
#define PODGATE_VERIFIER_H

#include "addresses.h"

/* 1 for 0, otherwise 0; without a branch, since the verifier follows both sides of each one. */
ALWAYS_INLINE __u64 is_zero(__u64 value)
{
	return ~(value | -value) >> 63;
}

/*
 * `value`, which the verifier no longer knows, so that it follows the paths on which the values
 * differ as one from here on. scalar: anything of which it knows nothing, such as a time.
 */
ALWAYS_INLINE __u64 forget(__u64 value, __u64 scalar)
{
	__u64 both = value ^ scalar;

	asm volatile("" : "+r"(both));
	return both ^ scalar;
}

#endif
