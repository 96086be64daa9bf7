/*
 * server.c: reads from and writes to connections, call by call, through libc.
 *
 *   server [threaded]
 *       Listens on a port of 127.0.0.1, which it prints as its first line, then takes one order a line from standard
 *       input and answers each with one number: what the call returned, or its error number, negative. With
 *       "threaded" a second thread sleeps, so that libc takes its other way through each call.
 *
 *           accept                -> descriptor
 *           read FD MAX           recv FD MAX
 *           write FD SEED SIZE    send FD SEED SIZE
 *           writev FD SEED SIZE.. sendmsg FD SEED SIZE..    one vector a size
 *           close FD              sysclose FD               by syscall(2)
 *           fill FD               -> bytes that fit until the next write would wait; the descriptor does not block
 *           drain FD              -> bytes read until the other side ends
 *           events COUNT          -> 0; as many writes to and reads of an eventfd
 *           pipe TEXT             -> descriptor of a pipe's reading end that holds TEXT
 *           bench WHAT FD SIZE COUNT -> nanoseconds of CPU time of COUNT calls: WHAT is "event" (reads of an eventfd
 *                                 that always has something), "wait" (reads of FD that would wait) or "null" (writes
 *                                 of SIZE to /dev/null, which FD then is)
 *
 *       Byte I of what is written with seed S is 131 S + 7 I + 13 (I / 256), as in sender.c.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MAX (8 << 20)
#define VECTORS 16

static unsigned char *buffer;

static void fail(const char *what)
{
	fprintf(stderr, "server: %s: %s\n", what, strerror(errno));
	exit(1);
}

static long result(long returned)
{
	return returned < 0 ? -errno : returned;
}

static void fill(long seed, size_t size)
{
	for (size_t i = 0; i < size; i++)
		buffer[i] = 131 * seed + 7 * i + 13 * (i / 256);
}

static int listening(void)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t size = sizeof address;
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (fd < 0 || bind(fd, (void *)&address, size) || listen(fd, 64) ||
	    getsockname(fd, (void *)&address, &size))
		fail("listen");
	printf("%d\n", ntohs(address.sin_port));
	return fd;
}

static void *sleeper(void *nothing)
{
	for (;;)
		pause();
	return nothing;
}

/* Vectors of the sizes that stand in an order, side by side in the buffer. */
static int vectors(char *sizes, struct iovec *out)
{
	unsigned char *at = buffer;
	int count = 0;

	for (char *word = strtok(sizes, " "); word && count < VECTORS; word = strtok(NULL, " ")) {
		out[count].iov_base = at;
		out[count].iov_len = strtoul(word, NULL, 10);
		at += out[count].iov_len;
		count++;
	}
	return count;
}

static long fill_up(int fd)
{
	long all = 0, n;

	fcntl(fd, F_SETFL, O_NONBLOCK);
	while ((n = write(fd, buffer, 65536)) > 0)
		all += n;
	return all;
}

static long drain(int fd)
{
	long all = 0, n;

	while ((n = read(fd, buffer, 100000)) > 0)
		all += n;
	return all;
}

static long events(long count)
{
	unsigned long long one = 1;
	int fd = eventfd(0, EFD_NONBLOCK);

	if (fd < 0)
		fail("eventfd");
	while (count-- > 0)
		if (write(fd, &one, sizeof one) != sizeof one || read(fd, &one, sizeof one) != sizeof one)
			fail("eventfd");
	close(fd);
	return 0;
}

static long piped(const char *text)
{
	int ends[2];

	if (pipe(ends) || write(ends[1], text, strlen(text)) < 0)
		fail("pipe");
	close(ends[1]);
	return ends[0];
}

static unsigned long long cpu(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static long bench(const char *what, int fd, size_t size, long count)
{
	unsigned long long start, word = 1ull << 62;

	if (!strcmp(what, "event")) {
		/* One is taken at a time, and there are enough. */
		fd = eventfd(0, EFD_SEMAPHORE | EFD_NONBLOCK);
		if (fd < 0 || write(fd, &word, sizeof word) < 0)
			fail("eventfd");
		start = cpu();
		while (count-- > 0)
			if (read(fd, &word, sizeof word) != sizeof word)
				fail("eventfd");
		start = cpu() - start;
		close(fd);
		return start;
	}
	if (!strcmp(what, "wait")) {
		fcntl(fd, F_SETFL, O_NONBLOCK);
		start = cpu();
		while (count-- > 0)
			if (read(fd, buffer, size) >= 0)
				fail("something to read");
		return cpu() - start;
	}
	int null = open("/dev/null", O_WRONLY);

	/* The connection itself goes, its number stays. */
	if (null < 0 || dup3(null, fd, 0) < 0)
		fail("/dev/null");
	close(null);
	start = cpu();
	while (count-- > 0)
		if (write(fd, buffer, size) != (ssize_t)size)
			fail("/dev/null");
	return cpu() - start;
}

int main(int argc, char **argv)
{
	static char line[4096], rest[4096];
	struct iovec parts[VECTORS];
	struct msghdr message = { .msg_iov = parts };
	char what[32];
	long a, b, c;
	int listener;

	setvbuf(stdout, NULL, _IOLBF, 0);
	signal(SIGPIPE, SIG_IGN);
	buffer = calloc(1, MAX);
	if (!buffer)
		fail("memory");
	if (argc > 1) {
		pthread_t thread;

		if (pthread_create(&thread, NULL, sleeper, NULL))
			fail("thread");
	}
	listener = listening();
	while (fgets(line, sizeof line, stdin)) {
		long out;

		rest[0] = 0;
		a = b = c = 0;
		line[strcspn(line, "\n")] = 0;
		if (!strcmp(line, "accept")) {
			out = result(accept4(listener, NULL, NULL, SOCK_CLOEXEC));
		} else if (sscanf(line, "read %ld %ld", &a, &b) == 2) {
			out = result(read(a, buffer, b));
		} else if (sscanf(line, "recv %ld %ld", &a, &b) == 2) {
			out = result(recv(a, buffer, b, 0));
		} else if (sscanf(line, "write %ld %ld %ld", &a, &b, &c) == 3) {
			fill(b, c);
			out = result(write(a, buffer, c));
		} else if (sscanf(line, "send %ld %ld %ld", &a, &b, &c) == 3) {
			fill(b, c);
			out = result(send(a, buffer, c, 0));
		} else if (sscanf(line, "writev %ld %ld %[0-9 ]", &a, &b, rest) == 3) {
			fill(b, MAX);
			out = result(writev(a, parts, vectors(rest, parts)));
		} else if (sscanf(line, "sendmsg %ld %ld %[0-9 ]", &a, &b, rest) == 3) {
			fill(b, MAX);
			message.msg_iovlen = vectors(rest, parts);
			out = result(sendmsg(a, &message, 0));
		} else if (sscanf(line, "close %ld", &a) == 1) {
			out = result(close(a));
		} else if (sscanf(line, "sysclose %ld", &a) == 1) {
			out = result(syscall(SYS_close, (int)a));
		} else if (sscanf(line, "fill %ld", &a) == 1) {
			out = fill_up(a);
		} else if (sscanf(line, "drain %ld", &a) == 1) {
			out = drain(a);
		} else if (sscanf(line, "events %ld", &a) == 1) {
			out = events(a);
		} else if (sscanf(line, "pipe %[^\n]", rest) == 1) {
			out = piped(rest);
		} else if (sscanf(line, "bench %31s %ld %ld %ld", what, &a, &b, &c) == 4) {
			out = bench(what, a, b, c);
		} else {
			fprintf(stderr, "server: no order: %s\n", line);
			return 2;
		}
		printf("%ld\n", out);
	}
	return 0;
}
