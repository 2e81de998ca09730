/* SPDX-License-Identifier: Apache-2.0 */
#ifndef PODGATE_CNI_PROBLEM_H
#define PODGATE_CNI_PROBLEM_H

#include <stdbool.h>

/* Set the error, one sentence without a full stop. Always false, for use in return. */
bool set_error(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The last error. */
const char *last_error(void);

#endif
