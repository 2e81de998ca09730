/* SPDX-License-Identifier: Apache-2.0 */
#ifndef PODGATE_CNI_PROBLEM_H
#define PODGATE_CNI_PROBLEM_H

#include <stdbool.h>

/* Note what went wrong, one sentence without a full stop; always false, to be returned. */
bool failed(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* What was noted last. */
const char *problem(void);

#endif
