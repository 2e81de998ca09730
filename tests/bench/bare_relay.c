/* As bare_relay.py: ADDRESS HOST PORT. Ends at the first error. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

static struct sockaddr_in at(const char *address, const char *port)
{
	struct sockaddr_in found = {.sin_family = AF_INET, .sin_port = htons(atoi(port))};

	if (inet_pton(AF_INET, address, &found.sin_addr) != 1)
		exit(1);
	return found;
}

static void copy(int from, int to)
{
	char bytes[4096];
	ssize_t length = read(from, bytes, sizeof(bytes));

	if (length < 0 || write(to, bytes, length) != length)
		exit(1);
}

int main(int count, char **values)
{
	struct sockaddr_in own, host;
	int listener, client, pod;

	if (count != 4)
		return 1;
	own = at(values[1], values[3]);
	host = at(values[2], values[3]);
	listener = socket(AF_INET, SOCK_STREAM, 0);
	if (bind(listener, (struct sockaddr *)&own, sizeof(own)) || listen(listener, 128))
		return 1;
	puts("ready");
	fflush(stdout);
	while ((client = accept(listener, NULL, NULL)) >= 0) {
		pod = socket(AF_INET, SOCK_STREAM, 0);
		if (connect(pod, (struct sockaddr *)&host, sizeof(host)))
			return 1;
		copy(client, pod);
		copy(pod, client);
		close(pod);
		close(client);
	}
	return 1;
}
