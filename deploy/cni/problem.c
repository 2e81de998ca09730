// SPDX-License-Identifier: Apache-2.0
#include <stdarg.h>
#include <stdio.h>

#include "problem.h"

static char sentence[512];

bool failed(const char *format, ...)
{
	va_list values;

	va_start(values, format);
	vsnprintf(sentence, sizeof(sentence), format, values);
	va_end(values);
	return false;
}

const char *problem(void)
{
	return sentence;
}
