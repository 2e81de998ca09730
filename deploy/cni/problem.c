// SPDX-License-Identifier: Apache-2.0
#include <stdarg.h>
#include <stdio.h>

#include "problem.h"

static char sentence[512];

bool set_error(const char *format, ...)
{
	va_list values;

	va_start(values, format);
	vsnprintf(sentence, sizeof(sentence), format, values);
	va_end(values);
	return false;
}

const char *last_error(void)
{
	return sentence;
}
