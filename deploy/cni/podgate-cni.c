// SPDX-License-Identifier: Apache-2.0
/*
 * A chained CNI plugin that gates a pod before ADD returns, so before any of its containers runs,
 * whether or not the agent is there. docs/cni.md says what it does in which case; the protocol is
 * the CNI specification's, 0.3.1 to 1.1.0.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gate.h"
#include "json.h"
#include "problem.h"

#define NEWEST "1.1.0"
static const char *const versions[] = {"0.3.1", "0.4.0", "1.0.0", NEWEST};
#define VERSION_COUNT (sizeof(versions) / sizeof(versions[0]))

/* The specification's codes; from 100 on they are the plugin's own. */
enum code {
	CODE_VERSION = 1,
	CODE_ENVIRONMENT = 4,
	CODE_INPUT = 5,
	CODE_JSON = 6,
	CODE_CONFIGURATION = 7,
	CODE_LATER = 11,
	CODE_UNAVAILABLE = 50,
	CODE_NOT_GATED = 100,
};

/* A result has some KiB, with the configuration of every plugin before; Go's have no limit. */
#define INPUT_BYTES (1 << 20)
#define STATE_BYTES 4096

/* Attaching takes 10 ms a program, and longer only while somebody holds RTNL. */
#define LIMIT_SECONDS 20

/* An agent of another version says which programs it uses before it removes the old ones. */
#define STATE_ATTEMPTS 5
#define STATE_PAUSE_US 100000

struct call {
	const char *command;
	const char *version; /* one of `versions` */
	struct json configuration;
	struct json previous;
	bool is_strict;
	char bpffs[PATH_MAX / 2];
	char run_directory[PATH_MAX / 2];
};

static char input[INPUT_BYTES + 1];
static bool never_fails;

static void put_text(const char *text)
{
	putchar('"');
	for (; *text; text++) {
		if (*text == '"' || *text == '\\')
			putchar('\\');
		putchar(*text < 0x20 || *text > 0x7e ? '?' : *text);
	}
	putchar('"');
}

/* Say what is wrong in the protocol's way, and end. */
static void __attribute__((noreturn)) end(const char *version, enum code code, const char *message,
					  const char *details)
{
	alarm(0);
	fprintf(stderr, "podgate-cni: %s%s%s\n", message, *details ? ": " : "", details);
	if (never_fails)
		exit(EXIT_SUCCESS);
	printf("{\"cniVersion\": \"%s\", \"code\": %d, \"msg\": ", version, code);
	put_text(message);
	if (*details) {
		printf(", \"details\": ");
		put_text(details);
	}
	printf("}\n");
	exit(EXIT_FAILURE);
}

static void end_late(int number)
{
	static const char answer[] =
		"{\"cniVersion\": \"" NEWEST "\", \"code\": 11, \"msg\": "
		"\"podgate-cni did not come to its end in time; try again\"}\n";

	(void)number;
	if (never_fails)
		_exit(EXIT_SUCCESS);
	_exit(write(STDOUT_FILENO, answer, sizeof(answer) - 1) < 0 ? 2 : EXIT_FAILURE);
}

/* Up to `room` bytes; -1 with errno (EFBIG: there are more). */
static ssize_t read_all(int descriptor, char *buffer, size_t room)
{
	size_t size = 0;

	for (;;) {
		char beyond;
		ssize_t more = size < room ? read(descriptor, buffer + size, room - size)
					   : read(descriptor, &beyond, 1);

		if (more > 0 && size == room) {
			errno = EFBIG;
			return -1;
		}
		if (more == 0)
			return (ssize_t)size;
		if (more > 0)
			size += (size_t)more;
		else if (errno != EINTR)
			return -1;
	}
}

static const char *known_version(struct json configuration)
{
	char wanted[16];

	if (json_text(json_member(configuration, "cniVersion"), wanted, sizeof(wanted)))
		for (size_t i = 0; i < VERSION_COUNT; i++)
			if (!strcmp(versions[i], wanted))
				return versions[i];
	return NULL;
}

static void read_path(struct json configuration, const char *name, char *path, size_t size,
		      const char *otherwise)
{
	struct json value = json_member(configuration, name);

	if (!value.at)
		snprintf(path, size, "%s", otherwise);
	else if (!json_text(value, path, size) || *path != '/')
		end(NEWEST, CODE_CONFIGURATION,
		    "this field of podgate-cni must be an absolute path", name);
}

static void read_call(struct call *call)
{
	ssize_t size = read_all(STDIN_FILENO, input, INPUT_BYTES);

	if (size < 0)
		end(NEWEST, CODE_INPUT, "the configuration cannot be read", strerror(errno));
	if (!json_check(input, (size_t)size, &call->configuration))
		end(NEWEST, CODE_JSON, "the configuration is not JSON", "");
	if (!json_is_object(call->configuration))
		end(NEWEST, CODE_JSON, "the configuration is not a JSON object", "");
	call->version = known_version(call->configuration);
	if (!call->version)
		end(NEWEST, CODE_VERSION, "podgate-cni speaks CNI 0.3.1 to " NEWEST,
		    "the configuration's cniVersion is another");
	call->previous = json_member(call->configuration, "prevResult");
	call->is_strict = json_is_true(json_member(call->configuration, "strictStart"));
	read_path(call->configuration, "bpffs", call->bpffs, sizeof(call->bpffs), "/sys/fs/bpf");
	read_path(call->configuration, "runDirectory", call->run_directory,
		  sizeof(call->run_directory), "/run/podgate");
}

static const char *need_variable(const struct call *call, const char *name)
{
	const char *value = getenv(name);

	if (!value || !*value)
		end(call->version, CODE_ENVIRONMENT, "this environment variable is missing", name);
	return value;
}

static bool read_state_text(const struct call *call, char *text, struct json *state)
{
	char path[PATH_MAX];
	int file;
	ssize_t size;

	snprintf(path, sizeof(path), "%s/cni.json", call->run_directory);
	file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	if (file < 0)
		return failed("the agent has not been here since the node started: %s (%s)", path,
			      strerror(errno));
	size = read_all(file, text, STATE_BYTES);
	close(file);
	return (size >= 0 && json_check(text, (size_t)size, state) && json_is_object(*state)) ||
	       failed("%s is not what the agent writes", path);
}

/* What the agent wants of new pods. */
static bool read_state(const struct call *call, struct wanted *wanted)
{
	static const char *const modes[] = {
		[MODE_OFF] = "off",
		[MODE_AUDIT] = "audit",
		[MODE_ENFORCE] = "enforce",
		[MODE_STRICT] = "strict",
	};
	char text[STATE_BYTES], mode[16], attachment[16];
	struct json state;
	unsigned int schema;

	if (!read_state_text(call, text, &state))
		return false;
	if (!json_number(json_member(state, "schema"), &schema) || schema != PODGATE_SCHEMA)
		return failed("podgate-cni is of another version than the agent; "
			      "run 'podgate cni install' of the agent's");
	if (!json_text(json_member(state, "programs"), wanted->programs,
		       sizeof(wanted->programs)) ||
	    strspn(wanted->programs, "0123456789abcdef") != strlen(wanted->programs) ||
	    !json_text(json_member(state, "attachment"), attachment, sizeof(attachment)) ||
	    !json_text(json_member(state, "mode"), mode, sizeof(mode)))
		return failed("%s/cni.json lacks what the agent writes", call->run_directory);
	wanted->is_tcx = !strcmp(attachment, "tcx");
	for (wanted->mode = MODE_OFF; wanted->mode <= MODE_STRICT; wanted->mode++)
		if (!strcmp(modes[wanted->mode], mode))
			return true;
	return failed("%s/cni.json names the mode %s, which is not known", call->run_directory,
		      mode);
}

/* Whether new pods can be gated, if they are to be at all. */
static bool get_ready(const struct call *call, struct wanted *wanted, struct installation *at)
{
	for (int attempt = 1; attempt <= STATE_ATTEMPTS; attempt++) {
		if (!read_state(call, wanted))
			return false;
		if (wanted->mode == MODE_OFF)
			return true;
		if (!open_installation(at, call->bpffs))
			return false;
		if (open_programs(at, wanted))
			return true;
		usleep(STATE_PAUSE_US);
	}
	return false;
}

/* Other containers' runtimes may use the same networks; the kubelet's say whose pod it is. */
static bool is_kubernetes_pod(void)
{
	const char *arguments = getenv("CNI_ARGS");
	const char *found = arguments ? strstr(arguments, "K8S_POD_NAME=") : NULL;

	return found && (found == arguments || found[-1] == ';');
}

static void pass_on(const struct call *call)
{
	const char *members = call->previous.at + 1;
	int size = (int)(call->previous.end - members);

	alarm(0);
	putchar('{');
	/* The specification wants a version in every result, and libcni's have it. */
	if (!json_member(call->previous, "cniVersion").at)
		printf("\"cniVersion\": \"%s\"%s", call->version,
		       members[strspn(members, " \t\r\n")] == '}' ? "" : ", ");
	printf("%.*s\n", size, members);
}

static int add(const struct call *call)
{
	const char *netns = need_variable(call, "CNI_NETNS");
	struct installation at;
	struct wanted wanted;
	struct pod pod;

	need_variable(call, "CNI_CONTAINERID");
	need_variable(call, "CNI_IFNAME");
	if (!json_is_object(call->previous))
		end(call->version, CODE_CONFIGURATION,
		    "podgate-cni gates what other plugins made: it must come after them in a chain",
		    "there is no prevResult");
	if (!is_kubernetes_pod()) {
		pass_on(call);
		return EXIT_SUCCESS;
	}
	if (!get_ready(call, &wanted, &at) ||
	    (wanted.mode != MODE_OFF &&
	     (!open_pod(&pod, netns) || !gate_pod(&at, &pod, &wanted)))) {
		if (call->is_strict)
			end(call->version, CODE_LATER, "the pod cannot be gated yet", problem());
		fprintf(stderr, "podgate-cni: the pod starts without a gate: %s\n", problem());
	}
	pass_on(call);
	return EXIT_SUCCESS;
}

static int delete(const struct call *call)
{
	const char *netns = getenv("CNI_NETNS"), *name = getenv("CNI_IFNAME");
	struct installation at;
	struct pod pod;

	if (!open_installation(&at, call->bpffs))
		return EXIT_SUCCESS; /* nothing is pinned, so nothing is left */
	/* A namespace that is gone has taken its interfaces along. */
	if (netns && *netns && name && (!open_pod(&pod, netns) || !release_pod(&at, &pod, name)))
		fprintf(stderr, "podgate-cni: %s\n", problem());
	sweep(&at);
	return EXIT_SUCCESS;
}

static int check(const struct call *call)
{
	const char *netns = need_variable(call, "CNI_NETNS");
	struct installation at;
	struct wanted wanted;
	struct pod pod;

	need_variable(call, "CNI_CONTAINERID");
	need_variable(call, "CNI_IFNAME");
	if (!json_is_object(call->previous))
		end(call->version, CODE_CONFIGURATION, "a CHECK comes with a prevResult", "");
	if (!get_ready(call, &wanted, &at)) {
		if (call->is_strict)
			end(call->version, CODE_LATER, "gates cannot be looked at", problem());
		return EXIT_SUCCESS;
	}
	if (wanted.mode == MODE_OFF || !is_kubernetes_pod())
		return EXIT_SUCCESS;
	if (!open_pod(&pod, netns) || !check_pod(&at, &pod))
		end(call->version, CODE_NOT_GATED, "the pod's gate is not whole", problem());
	return EXIT_SUCCESS;
}

static int collect(const struct call *call)
{
	struct installation at;

	if (open_installation(&at, call->bpffs))
		sweep(&at);
	return EXIT_SUCCESS;
}

static int status(const struct call *call)
{
	struct installation at;
	struct wanted wanted;

	if (call->is_strict && !get_ready(call, &wanted, &at))
		end(call->version, CODE_UNAVAILABLE, "pods cannot be gated yet", problem());
	return EXIT_SUCCESS;
}

/* The version that was asked for, whichever it is; older runtimes send nothing at all. */
static int version(void)
{
	ssize_t size = read_all(STDIN_FILENO, input, INPUT_BYTES);
	struct json asked;
	char text[16];

	if (size < 0 || !json_check(input, (size_t)size, &asked) ||
	    !json_text(json_member(asked, "cniVersion"), text, sizeof(text)))
		strcpy(text, NEWEST);
	printf("{\"cniVersion\": ");
	put_text(text);
	printf(", \"supportedVersions\": [");
	for (size_t i = 0; i < VERSION_COUNT; i++)
		printf("%s\"%s\"", i ? ", " : "", versions[i]);
	printf("]}\n");
	return EXIT_SUCCESS;
}

int main(void)
{
	static const struct {
		const char *name;
		int (*run)(const struct call *call);
	} commands[] = {
		{"ADD", add},	 {"DEL", delete},    {"CHECK", check},
		{"GC", collect}, {"STATUS", status},
	};
	struct call call = {.command = getenv("CNI_COMMAND")};

	if (!call.command)
		end(NEWEST, CODE_ENVIRONMENT,
		    "this is a CNI plugin, which a container runtime calls",
		    "CNI_COMMAND is missing");
	never_fails = !strcmp(call.command, "DEL");
	signal(SIGALRM, end_late);
	alarm(LIMIT_SECONDS);
	if (!strcmp(call.command, "VERSION"))
		return version();
	for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++)
		if (!strcmp(call.command, commands[i].name)) {
			read_call(&call);
			return commands[i].run(&call);
		}
	end(NEWEST, CODE_ENVIRONMENT, "this CNI_COMMAND is not known", call.command);
}
