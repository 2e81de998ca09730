// SPDX-License-Identifier: Apache-2.0
#include <stdint.h>
#include <string.h>

#include "json.h"

#define MAX_DEPTH 64
#define MAX_NAME  64

struct reader {
	const char *at;
	const char *end;
	int depth;
};

static bool read_value(struct reader *reader);

static bool is_at(const struct reader *reader, char expected)
{
	return reader->at < reader->end && *reader->at == expected;
}

static bool accept(struct reader *reader, char expected)
{
	if (!is_at(reader, expected))
		return false;
	reader->at++;
	return true;
}

static bool is_digit(char byte)
{
	return byte >= '0' && byte <= '9';
}

static void skip_space(struct reader *reader)
{
	while (reader->at < reader->end && strchr(" \t\r\n", *reader->at) && *reader->at)
		reader->at++;
}

static bool read_word(struct reader *reader, const char *word)
{
	size_t size = strlen(word);

	if ((size_t)(reader->end - reader->at) < size || memcmp(reader->at, word, size))
		return false;
	reader->at += size;
	return true;
}

static bool read_digits(struct reader *reader)
{
	const char *start = reader->at;

	while (reader->at < reader->end && is_digit(*reader->at))
		reader->at++;
	return reader->at > start;
}

static bool read_number(struct reader *reader)
{
	accept(reader, '-');
	if (!accept(reader, '0') && !read_digits(reader))
		return false;
	if (accept(reader, '.') && !read_digits(reader))
		return false;
	if (accept(reader, 'e') || accept(reader, 'E')) {
		if (!accept(reader, '+'))
			accept(reader, '-');
		return read_digits(reader);
	}
	return true;
}

static int hex_digit(char byte)
{
	if (is_digit(byte))
		return byte - '0';
	byte |= 0x20;
	return byte >= 'a' && byte <= 'f' ? byte - 'a' + 10 : -1;
}

static bool read_hex(struct reader *reader, uint32_t *unit)
{
	*unit = 0;
	for (int i = 0; i < 4; i++) {
		int digit = reader->at < reader->end ? hex_digit(*reader->at) : -1;

		if (digit < 0)
			return false;
		*unit = *unit << 4 | (uint32_t)digit;
		reader->at++;
	}
	return true;
}

/* One character in UTF-8 (RFC 3629): no overlong forms, no surrogates, nothing above U+10FFFF. */
static bool read_utf8(struct reader *reader, uint32_t *character)
{
	static const uint32_t smallest[] = {0, 0x80, 0x800, 0x10000};
	unsigned char first = (unsigned char)*reader->at++;
	int rest = first < 0x80 ? 0 : first >> 5 == 6 ? 1 : first >> 4 == 14 ? 2 : 3;

	if (rest == 3 && first >> 3 != 30)
		return false;
	*character = rest ? first & (0x3fu >> rest) : first;
	for (int i = 0; i < rest; i++) {
		if (reader->at == reader->end || ((unsigned char)*reader->at & 0xc0) != 0x80)
			return false;
		*character = *character << 6 | ((unsigned char)*reader->at++ & 0x3f);
	}
	return *character >= smallest[rest] && *character <= 0x10ffff &&
	       *character >> 11 != 0xd800 >> 11;
}

/* A character of a string; `\u` may give a surrogate, which is two halves of one. */
static bool read_character(struct reader *reader, uint32_t *character)
{
	static const char names[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
	const char *found;

	if ((unsigned char)*reader->at < 0x20)
		return false;
	if (!accept(reader, '\\'))
		return read_utf8(reader, character);
	if (accept(reader, 'u'))
		return read_hex(reader, character);
	if (reader->at == reader->end || !*reader->at || !(found = strchr(names, *reader->at)))
		return false;
	reader->at++;
	*character = (unsigned char)meanings[found - names];
	return true;
}

static bool read_string(struct reader *reader)
{
	uint32_t character;

	if (!accept(reader, '"'))
		return false;
	while (reader->at < reader->end && !is_at(reader, '"'))
		if (!read_character(reader, &character))
			return false;
	return accept(reader, '"');
}

/* What is between the brackets of an array or the braces of an object. */
static bool read_members(struct reader *reader, char close, bool have_names)
{
	skip_space(reader);
	if (accept(reader, close))
		return true;
	do {
		skip_space(reader);
		if (have_names) {
			if (!read_string(reader))
				return false;
			skip_space(reader);
			if (!accept(reader, ':'))
				return false;
		}
		if (!read_value(reader))
			return false;
	} while (accept(reader, ','));
	return accept(reader, close);
}

/* A value and the space on both sides of it. */
static bool read_value(struct reader *reader)
{
	bool is_read;

	if (++reader->depth > MAX_DEPTH)
		return false;
	skip_space(reader);
	if (accept(reader, '{'))
		is_read = read_members(reader, '}', true);
	else if (accept(reader, '['))
		is_read = read_members(reader, ']', false);
	else if (is_at(reader, '"'))
		is_read = read_string(reader);
	else
		is_read = read_word(reader, "true") || read_word(reader, "false") ||
			  read_word(reader, "null") || read_number(reader);
	skip_space(reader);
	reader->depth--;
	return is_read;
}

static struct json trim(const char *start, const char *end)
{
	struct reader reader = {start, end, 0};

	skip_space(&reader);
	while (end > reader.at && strchr(" \t\r\n", end[-1]))
		end--;
	return (struct json){reader.at, end};
}

bool json_check(const char *text, size_t size, struct json *value)
{
	struct reader reader = {text, text + size, 0};

	if (!read_value(&reader) || reader.at != reader.end)
		return false;
	*value = trim(text, text + size);
	return true;
}

bool json_is_object(struct json value)
{
	return value.at && *value.at == '{';
}

bool json_is_true(struct json value)
{
	return value.at && *value.at == 't';
}

struct json json_member(struct json object, const char *name)
{
	struct reader reader = {object.at, object.end, 0};
	struct json found = {NULL, NULL};

	if (!json_is_object(object))
		return found;
	do {
		char own[MAX_NAME];
		const char *start;
		bool is_it;

		reader.at++; /* the brace or the comma */
		skip_space(&reader);
		start = reader.at;
		if (!read_string(&reader)) /* an empty object */
			break;
		is_it = json_text((struct json){start, reader.at}, own, sizeof(own)) &&
			!strcmp(own, name);
		skip_space(&reader);
		reader.at++; /* the colon */
		start = reader.at;
		read_value(&reader);
		if (is_it)
			found = trim(start, reader.at);
	} while (is_at(&reader, ','));
	return found;
}

bool json_number(struct json value, unsigned int *number)
{
	if (!value.at || value.end - value.at > 9)
		return false;
	*number = 0;
	for (const char *digit = value.at; digit < value.end; digit++) {
		if (!is_digit(*digit))
			return false;
		*number = *number * 10 + (unsigned int)(*digit - '0');
	}
	return true;
}

static size_t encode(uint32_t character, char *bytes)
{
	size_t rest = character < 0x80 ? 0 : character < 0x800 ? 1 : character < 0x10000 ? 2 : 3;
	static const unsigned char leads[] = {0, 0xc0, 0xe0, 0xf0};

	for (size_t i = rest; i > 0; i--, character >>= 6)
		bytes[i] = (char)(0x80 | (character & 0x3f));
	bytes[0] = (char)(leads[rest] | character);
	return rest + 1;
}

bool json_text(struct json value, char *text, size_t size)
{
	struct reader reader = {value.at, value.end, 0};
	size_t length = 0;

	if (!value.at || !accept(&reader, '"'))
		return false;
	while (!is_at(&reader, '"')) {
		uint32_t character, low;
		char bytes[4];
		size_t more;

		read_character(&reader, &character);
		if (character >> 10 == 0xd800 >> 10) {
			if (!read_word(&reader, "\\u") || !read_hex(&reader, &low) ||
			    low >> 10 != 0xdc00 >> 10)
				return false;
			character = 0x10000 + ((character & 0x3ff) << 10 | (low & 0x3ff));
		}
		more = encode(character, bytes);
		if (!character || character >> 11 == 0xd800 >> 11 || length + more >= size)
			return false;
		memcpy(text + length, bytes, more);
		length += more;
	}
	text[length] = '\0';
	return true;
}
