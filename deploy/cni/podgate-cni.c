// SPDX-License-Identifier: Apache-2.0
/*
 * A chained CNI plugin that attaches a pod's gate before ADD returns, so before any of its
 * containers runs, with or without a running agent. docs/cni.md describes each case; the protocol
 * is the CNI specification's, 0.3.0 to 1.1.0.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "gate.h"
#include "json.h"
#include "problem.h"

#define NEWEST "1.1.0"
static const char *const versions[] = {"0.3.0", "0.3.1", "0.4.0", "1.0.0", NEWEST};
#define VERSION_COUNT (sizeof(versions) / sizeof(versions[0]))

/* The specification's codes; from 100 on they are the plugin's own. */
enum code {
	CODE_VERSION = 1,
	CODE_ENVIRONMENT = 4,
	CODE_INPUT = 5,
	CODE_JSON = 6,
	CODE_CONFIGURATION = 7,
	CODE_TRY_AGAIN = 11,
	CODE_UNAVAILABLE = 50,
	CODE_NOT_GATED = 100,
};

/* A result has some KiB, with the configuration of every plugin before; Go's have no limit. */
#define INPUT_BYTES (1 << 20)
/* MAX_NAMESPACES of agent/cni/state.py fit. */
#define STATE_BYTES (1 << 20)

/* A namespace's name is a DNS label (RFC 1123). */
#define NAMESPACE_BYTES 64

/* Attaching takes 10 ms a program, and longer only while another process holds RTNL. */
#define LIMIT_SECONDS 20

/* An agent of another version writes its programs' directory before it removes the old ones. */
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

static char input[INPUT_BYTES + 1], state_text[STATE_BYTES];
static bool never_fails;

static void put_text(FILE *out, const char *text)
{
	putc('"', out);
	for (; *text; text++) {
		if (*text == '"' || *text == '\\')
			putc('\\', out);
		putc(*text < 0x20 || *text > 0x7e ? '?' : *text, out);
	}
	putc('"', out);
}

/* Report an error as the protocol specifies, and exit. */
static void __attribute__((noreturn)) fail(const char *version, enum code code, const char *message,
					   const char *details)
{
	alarm(0);
	fprintf(stderr, "podgate-cni: %s%s%s\n", message, *details ? ": " : "", details);
	if (never_fails)
		exit(EXIT_SUCCESS);
	printf("{\"cniVersion\": \"%s\", \"code\": %d, \"msg\": ", version, code);
	put_text(stdout, message);
	if (*details) {
		printf(", \"details\": ");
		put_text(stdout, details);
	}
	printf("}\n");
	exit(EXIT_FAILURE);
}

static void fail_timeout(int number)
{
	static const char answer[] = "{\"cniVersion\": \"" NEWEST "\", \"code\": 11, \"msg\": "
				     "\"podgate-cni timed out; try again\"}\n";

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

static const char *supported_version(struct json configuration)
{
	char requested[16];

	if (json_text(json_member(configuration, "cniVersion"), requested, sizeof(requested)))
		for (size_t i = 0; i < VERSION_COUNT; i++)
			if (!strcmp(versions[i], requested))
				return versions[i];
	return NULL;
}

static void read_path(struct json configuration, const char *name, char *path, size_t size,
		      const char *fallback)
{
	struct json value = json_member(configuration, name);

	if (!value.at)
		snprintf(path, size, "%s", fallback);
	else if (!json_text(value, path, size) || *path != '/')
		fail(NEWEST, CODE_CONFIGURATION,
		     "this field of podgate-cni must be an absolute path", name);
}

static void read_call(struct call *call)
{
	ssize_t size = read_all(STDIN_FILENO, input, INPUT_BYTES);

	if (size < 0)
		fail(NEWEST, CODE_INPUT, "the configuration cannot be read", strerror(errno));
	if (!json_check(input, (size_t)size, &call->configuration))
		fail(NEWEST, CODE_JSON, "the configuration is not JSON", "");
	if (!json_is_object(call->configuration))
		fail(NEWEST, CODE_JSON, "the configuration is not a JSON object", "");
	call->version = supported_version(call->configuration);
	if (!call->version)
		fail(NEWEST, CODE_VERSION, "podgate-cni supports CNI 0.3.0 to " NEWEST,
		     "the configuration has another cniVersion");
	call->previous = json_member(call->configuration, "prevResult");
	call->is_strict = json_is_true(json_member(call->configuration, "strictStart"));
	read_path(call->configuration, "bpffs", call->bpffs, sizeof(call->bpffs), "/sys/fs/bpf");
	read_path(call->configuration, "runDirectory", call->run_directory,
		  sizeof(call->run_directory), "/run/podgate");
}

static const char *required_variable(const struct call *call, const char *name)
{
	const char *value = getenv(name);

	if (!value || !*value)
		fail(call->version, CODE_ENVIRONMENT, "this environment variable is missing", name);
	return value;
}

static bool read_state_text(const struct call *call, struct json *state)
{
	char path[PATH_MAX];
	int file;
	ssize_t size;

	snprintf(path, sizeof(path), "%s/cni.json", call->run_directory);
	file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
	if (file < 0)
		return set_error("the agent has not run since the node booted: %s (%s)", path,
				 strerror(errno));
	size = read_all(file, state_text, STATE_BYTES);
	close(file);
	return (size >= 0 && json_check(state_text, (size_t)size, state) &&
		json_is_object(*state)) ||
	       set_error("%s is not written by podgate", path);
}

/*
 * The value of NAME in CNI_ARGS, "NAME=value;NAME=value", and its size; NULL if there is none. The
 * runtime writes them from the kubelet's configuration of the sandbox: nothing in a pod can.
 */
static const char *find_argument(const char *name, size_t *size)
{
	const char *at = getenv("CNI_ARGS");
	size_t length = strlen(name);

	while (at && *at) {
		size_t part = strcspn(at, ";");

		if (part > length && !strncmp(at, name, length) && at[length] == '=') {
			*size = part - length - 1;
			return at + length + 1;
		}
		at += part + (at[part] == ';');
	}
	return NULL;
}

/* Other runtimes may use the same networks; the kubelet's passes the pod's name. */
static bool is_kubernetes_pod(void)
{
	size_t size;

	return find_argument("K8S_POD_NAME", &size);
}

/* The mode of pods in the calling pod's namespace, or else that of all others. */
static struct json mode_of_namespace(struct json state, struct json namespaces)
{
	char namespace[NAMESPACE_BYTES];
	struct json own = {NULL, NULL};
	size_t size;
	const char *found = find_argument("K8S_POD_NAMESPACE", &size);

	if (found && size < sizeof(namespace)) {
		memcpy(namespace, found, size);
		namespace[size] = '\0';
		own = json_member(namespaces, namespace);
	}
	return own.at ? own : json_member(state, "mode");
}

/* The agent's settings for new pods. */
static bool read_state(const struct call *call, struct gate_options *options)
{
	static const char *const modes[] = {
		[MODE_OFF] = "off",
		[MODE_AUDIT] = "audit",
		[MODE_ENFORCE] = "enforce",
		[MODE_STRICT] = "strict",
	};
	char mode[16], attachment[16];
	struct json state, namespaces;
	unsigned int schema;

	if (!read_state_text(call, &state))
		return false;
	/* Older agents write none. */
	namespaces = json_member(state, "namespaces");
	if (!json_number(json_member(state, "schema"), &schema) || schema != PODGATE_SCHEMA)
		return set_error("podgate-cni and the agent have different versions; "
				 "run the agent's 'podgate cni install'");
	if (!json_text(json_member(state, "programs"), options->programs,
		       sizeof(options->programs)) ||
	    strspn(options->programs, "0123456789abcdef") != strlen(options->programs) ||
	    (namespaces.at && !json_is_object(namespaces)) ||
	    !json_text(json_member(state, "attachment"), attachment, sizeof(attachment)) ||
	    !json_text(mode_of_namespace(state, namespaces), mode, sizeof(mode)))
		return set_error("%s/cni.json is not written by podgate", call->run_directory);
	options->is_tcx = !strcmp(attachment, "tcx");
	for (options->mode = MODE_OFF; options->mode <= MODE_STRICT; options->mode++)
		if (!strcmp(modes[options->mode], mode))
			return true;
	return set_error("unknown mode %s in %s/cni.json", mode, call->run_directory);
}

/* Whether `podgate off --node` is in force (agent/pods/off_marks.py); either mark is enough. */
static bool is_off(const struct call *call)
{
	char path[PATH_MAX];

	snprintf(path, sizeof(path), "%s/podgate/off", call->bpffs);
	if (!access(path, F_OK))
		return true;
	snprintf(path, sizeof(path), "%s/off", call->run_directory);
	return !access(path, F_OK);
}

/* Read the settings and open the pinned objects; false if new pods cannot be gated. */
static bool prepare(const struct call *call, struct gate_options *options, struct installation *at)
{
	if (is_off(call)) {
		options->mode = MODE_OFF;
		return true;
	}
	for (int attempt = 1; attempt <= STATE_ATTEMPTS; attempt++) {
		if (!read_state(call, options))
			return false;
		if (options->mode == MODE_OFF)
			return true;
		if (!open_installation(at, call->bpffs))
			return false;
		if (open_programs(at, options))
			return true;
		usleep(STATE_PAUSE_US);
	}
	return false;
}

static void print_result(const struct call *call)
{
	const char *members = call->previous.at + 1;
	int size = (int)(call->previous.end - members);

	alarm(0);
	putchar('{');
	/* The specification requires a version in every result, as libcni writes it. */
	if (!json_member(call->previous, "cniVersion").at)
		printf("\"cniVersion\": \"%s\"%s", call->version,
		       members[strspn(members, " \t\r\n")] == '}' ? "" : ", ");
	printf("%.*s\n", size, members);
}

/*
 * Report to a running agent that the pod has its network, some milliseconds before the runtime
 * lists the sandbox. Best effort: without it the agent finds the sandbox in the runtime's list.
 */
static void announce(const struct call *call, const char *id, const char *netns)
{
	struct sockaddr_un agent = {.sun_family = AF_UNIX};
	char *text = NULL;
	size_t size;
	int sock = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	FILE *out = open_memstream(&text, &size);

	if (sock >= 0 && out &&
	    (size_t)snprintf(agent.sun_path, sizeof(agent.sun_path), "%s/cni/added.sock",
			     call->run_directory) < sizeof(agent.sun_path)) {
		fprintf(out, "{\"sandbox\": ");
		put_text(out, id);
		fprintf(out, ", \"netns\": ");
		put_text(out, netns);
		fprintf(out, ", \"args\": ");
		put_text(out, getenv("CNI_ARGS"));
		fprintf(out, ", \"result\": %.*s}", (int)(call->previous.end - call->previous.at),
			call->previous.at);
		if (!fflush(out))
			sendto(sock, text, size, MSG_DONTWAIT | MSG_NOSIGNAL,
			       (struct sockaddr *)&agent, sizeof(agent));
	}
	if (out)
		fclose(out);
	free(text);
	if (sock >= 0)
		close(sock);
}

static int add(const struct call *call)
{
	const char *id = required_variable(call, "CNI_CONTAINERID");
	const char *netns = required_variable(call, "CNI_NETNS");
	struct installation at;
	struct gate_options options;
	struct pod_netns pod;

	required_variable(call, "CNI_IFNAME");
	if (!json_is_object(call->previous))
		fail(call->version, CODE_CONFIGURATION,
		     "podgate-cni gates the interfaces of other plugins: put it after them in the "
		     "chain",
		     "there is no prevResult");
	if (!is_kubernetes_pod()) {
		print_result(call);
		return EXIT_SUCCESS;
	}
	if (!prepare(call, &options, &at) ||
	    (options.mode != MODE_OFF &&
	     (!open_pod_netns(&pod, netns) || !gate_pod(&at, &pod, &options)))) {
		if (call->is_strict)
			fail(call->version, CODE_TRY_AGAIN,
			     "the pod cannot be gated yet; try again", last_error());
		fprintf(stderr, "podgate-cni: pod starts without a gate: %s\n", last_error());
	}
	announce(call, id, netns);
	print_result(call);
	return EXIT_SUCCESS;
}

static int delete(const struct call *call)
{
	const char *netns = getenv("CNI_NETNS"), *name = getenv("CNI_IFNAME");
	struct installation at;
	struct pod_netns pod;

	if (!open_installation(&at, call->bpffs))
		return EXIT_SUCCESS; /* nothing is pinned, so there is nothing to remove */
	/* Interfaces of a deleted namespace are deleted with it. */
	if (netns && *netns && name &&
	    (!open_pod_netns(&pod, netns) || !release_pod(&at, &pod, name)))
		fprintf(stderr, "podgate-cni: %s\n", last_error());
	remove_stale(&at);
	return EXIT_SUCCESS;
}

static int check(const struct call *call)
{
	const char *netns = required_variable(call, "CNI_NETNS");
	struct installation at;
	struct gate_options options;
	struct pod_netns pod;

	required_variable(call, "CNI_CONTAINERID");
	required_variable(call, "CNI_IFNAME");
	if (!json_is_object(call->previous))
		fail(call->version, CODE_CONFIGURATION, "CHECK requires prevResult", "");
	if (!prepare(call, &options, &at)) {
		if (call->is_strict)
			fail(call->version, CODE_TRY_AGAIN, "gates cannot be checked",
			     last_error());
		return EXIT_SUCCESS;
	}
	if (options.mode == MODE_OFF || !is_kubernetes_pod())
		return EXIT_SUCCESS;
	if (!open_pod_netns(&pod, netns) || !check_pod(&at, &pod))
		fail(call->version, CODE_NOT_GATED, "the pod's gate is incomplete", last_error());
	return EXIT_SUCCESS;
}

static int garbage_collect(const struct call *call)
{
	struct installation at;

	if (open_installation(&at, call->bpffs))
		remove_stale(&at);
	return EXIT_SUCCESS;
}

static int status(const struct call *call)
{
	struct installation at;
	struct gate_options options;

	if (call->is_strict && !prepare(call, &options, &at))
		fail(call->version, CODE_UNAVAILABLE, "pods cannot be gated yet", last_error());
	return EXIT_SUCCESS;
}

/* Return the requested version, also an unsupported one; older runtimes send none. */
static int version(void)
{
	ssize_t size = read_all(STDIN_FILENO, input, INPUT_BYTES);
	struct json request;
	char text[16];

	if (size < 0 || !json_check(input, (size_t)size, &request) ||
	    !json_text(json_member(request, "cniVersion"), text, sizeof(text)))
		strcpy(text, NEWEST);
	printf("{\"cniVersion\": ");
	put_text(stdout, text);
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
		{"ADD", add},	    {"DEL", delete}, {"CHECK", check}, {"GC", garbage_collect},
		{"STATUS", status},
	};
	struct call call = {.command = getenv("CNI_COMMAND")};

	if (!call.command)
		fail(NEWEST, CODE_ENVIRONMENT,
		     "this is a CNI plugin, which a container runtime calls",
		     "CNI_COMMAND is missing");
	never_fails = !strcmp(call.command, "DEL");
	signal(SIGALRM, fail_timeout);
	alarm(LIMIT_SECONDS);
	if (!strcmp(call.command, "VERSION"))
		return version();
	for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++)
		if (!strcmp(call.command, commands[i].name)) {
			read_call(&call);
			return commands[i].run(&call);
		}
	fail(NEWEST, CODE_ENVIRONMENT, "unsupported CNI_COMMAND", call.command);
}
