/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A reader of JSON (RFC 8259) for bytes that other plugins wrote: the text is checked once, as a
 * whole, and then read in place. Nothing is allocated.
 */
#ifndef PODGATE_CNI_JSON_H
#define PODGATE_CNI_JSON_H

#include <stdbool.h>
#include <stddef.h>

/* One value within a checked text, without the space around it; `at` is NULL where there is none.
 */
struct json {
	const char *at;
	const char *end;
};

/* Check that the text is one value, in UTF-8 and at most 64 levels deep. */
bool json_check(const char *text, size_t size, struct json *value);

bool json_is_object(struct json value);
bool json_is_true(struct json value);

/* The member of this name, the last if there are several (as Go has it); none for other values. */
struct json json_member(struct json object, const char *name);

/* A whole number from 0 to 9 digits. */
bool json_number(struct json value, unsigned int *number);

/*
 * Decode a string into `text`, with a NUL behind. False for other values, for what does not fit,
 * holds a NUL itself, or half a surrogate pair.
 */
bool json_text(struct json value, char *text, size_t size);

#endif
