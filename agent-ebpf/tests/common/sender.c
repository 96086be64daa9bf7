/*
 * sender.c: hands frames to the real zmq_msg_send of libzmq, as told.
 *
 *   sender
 *       Reads one frame a line from standard input, "SOCKET KIND SIZE MORE", and sends each at once.
 *       SOCKET: 0 or 1. MORE: 0 or 1. KIND, by what libzmq makes of it:
 *           i   zmq_msg_init_size: the bytes in the message, or behind its content header
 *           d   zmq_msg_init_data with a free function: a pointer in a content header
 *           c   zmq_msg_init_data without one: a constant
 *           z   a message received over TCP and passed on: two calls, the first on a socket of its own
 *           x   a message whose type byte was overwritten (the send fails)
 *           u   a content pointer that leads nowhere (its copy is not sent but only shown to the probe)
 *       Byte J of frame N, from 0, is (131 N + 7 J + 13 (J / 256)) mod 256.
 *   sender bench SIZE
 *       Reads a number of calls a line, makes that many on a socket without a peer (each ends with EAGAIN and
 *       leaves the message whole), and answers with the nanoseconds of CPU time that they took.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <zmq.h>

static void fail(const char *what)
{
	fprintf(stderr, "sender: %s: %s\n", what, zmq_strerror(zmq_errno()));
	exit(1);
}

static void *open_socket(void *context, int type)
{
	void *socket = zmq_socket(context, type);
	int unlimited = 0;

	if (!socket || zmq_setsockopt(socket, ZMQ_SNDHWM, &unlimited, sizeof unlimited) ||
	    zmq_setsockopt(socket, ZMQ_RCVHWM, &unlimited, sizeof unlimited))
		fail("socket");
	return socket;
}

/* A PUSH socket whose PULL keeps all that comes. */
static void *open_push(void *context, const char *address)
{
	void *pull = open_socket(context, ZMQ_PULL), *push = open_socket(context, ZMQ_PUSH);

	if (zmq_bind(pull, address) || zmq_connect(push, address))
		fail(address);
	return push;
}

static unsigned char *fill(unsigned char *to, size_t size, unsigned frame)
{
	for (size_t j = 0; j < size; j++)
		to[j] = (unsigned char)(131 * frame + 7 * j + 13 * (j / 256));
	return to;
}

static void release(void *data, void *hint)
{
	(void)hint;
	free(data);
}

static unsigned char *alloc(size_t size)
{
	unsigned char *data = malloc(size ? size : 1);

	if (!data)
		fail("malloc");
	return data;
}

static int frames(void *context)
{
	void *push[2] = { open_push(context, "inproc://0"), open_push(context, "inproc://1") };
	void *relay_in = open_socket(context, ZMQ_PULL), *relay_out = open_socket(context, ZMQ_PUSH);
	char address[64], kind;
	size_t address_size = sizeof address, size;
	unsigned socket, more;

	if (zmq_bind(relay_in, "tcp://127.0.0.1:*") ||
	    zmq_getsockopt(relay_in, ZMQ_LAST_ENDPOINT, address, &address_size) ||
	    zmq_connect(relay_out, address))
		fail("relay");
	for (unsigned frame = 0; scanf("%u %c %zu %u", &socket, &kind, &size, &more) == 4; frame++) {
		void *to = push[socket & 1];
		int flags = more ? ZMQ_SNDMORE : 0, sent;
		zmq_msg_t message;

		if (kind == 'd' || kind == 'c') {
			if (zmq_msg_init_data(&message, fill(alloc(size), size, frame), size,
					      kind == 'd' ? release : NULL, NULL))
				fail("zmq_msg_init_data");
		} else {
			if (zmq_msg_init_size(&message, size))
				fail("zmq_msg_init_size");
			fill(zmq_msg_data(&message), size, frame);
		}
		if (kind == 'z') {
			if (zmq_msg_send(&message, relay_out, 0) < 0 || zmq_msg_recv(&message, relay_in, 0) < 0)
				fail("relay");
		}
		if (kind == 'x' || kind == 'u') {
			zmq_msg_t whole;

			memcpy(&whole, &message, sizeof whole);
			if (kind == 'x')
				((unsigned char *)&message)[42] = 77;
			else
				memset((unsigned char *)&message + 8, 0, 8);
			/* Without a socket libzmq refuses the call before it looks at the message. */
			if (zmq_msg_send(&message, NULL, flags) >= 0)
				fail("a send without a socket worked");
			zmq_msg_close(&whole);
			continue;
		}
		sent = zmq_msg_send(&message, to, flags);
		if (sent < 0 || (size_t)sent != size)
			fail("zmq_msg_send");
	}
	return 0;
}

static int bench(void *context, size_t size)
{
	void *lonely = zmq_socket(context, ZMQ_PUSH);
	unsigned long calls;
	zmq_msg_t message;

	if (!lonely || zmq_msg_init_size(&message, size))
		fail("bench");
	fill(zmq_msg_data(&message), size, 0);
	while (scanf("%lu", &calls) == 1) {
		struct timespec a, b;

		clock_gettime(CLOCK_THREAD_CPUTIME_ID, &a);
		for (unsigned long i = 0; i < calls; i++)
			if (zmq_msg_send(&message, lonely, ZMQ_DONTWAIT) >= 0)
				fail("a send without a peer worked");
		clock_gettime(CLOCK_THREAD_CPUTIME_ID, &b);
		printf("%lld\n", (b.tv_sec - a.tv_sec) * 1000000000LL + (b.tv_nsec - a.tv_nsec));
		fflush(stdout);
	}
	return 0;
}

int main(int argc, char **argv)
{
	void *context = zmq_ctx_new();

	if (argc == 3 && !strcmp(argv[1], "bench"))
		return bench(context, strtoul(argv[2], NULL, 10));
	if (argc != 1) {
		fprintf(stderr, "usage: sender [bench SIZE]\n");
		return 2;
	}
	/* The sockets keep what was sent: leave without the wait for it. */
	exit(frames(context));
}
