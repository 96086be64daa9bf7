/*
 * Calls libzmq's zmq_msg_send as fast as it can, to measure what a probe on it adds to a call.
 *
 * usage: send_loop LIBZMQ
 *
 * Each line "BYTES CALLS" on standard input gives one line with the nanoseconds of a call. The socket is a PUB
 * without subscribers: it takes a message and drops it. Calls come in bursts with pauses that are not counted, so
 * that a reader of captured frames keeps up; the median burst counts, as other work on the machine hits some.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PUB 1
/* Few enough that they stay in the cache, as a message does that was just written. */
#define BURST 100
#define CALLS_MAX 1000000

typedef struct {
    unsigned char bytes[64];
} __attribute__((aligned(8))) message;

static void *symbol(void *library, const char *name)
{
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "no %s\n", name);
        exit(1);
    }
    return found;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    void *library = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (!library) {
        fprintf(stderr, "usage: send_loop LIBZMQ: %s\n", argc == 2 ? dlerror() : "one argument");
        return 1;
    }
    void *(*ctx_new)(void) = symbol(library, "zmq_ctx_new");
    void *(*socket_new)(void *, int) = symbol(library, "zmq_socket");
    int (*bind)(void *, const char *) = symbol(library, "zmq_bind");
    int (*init_size)(message *, size_t) = symbol(library, "zmq_msg_init_size");
    void *(*data)(message *) = symbol(library, "zmq_msg_data");
    int (*send)(message *, void *, int) = symbol(library, "zmq_msg_send");

    void *socket = socket_new(ctx_new(), PUB);
    if (!socket || bind(socket, "inproc://nobody")) {
        fprintf(stderr, "no socket\n");
        return 1;
    }
    puts("ready");
    fflush(stdout);

    size_t bytes;
    long calls;
    while (scanf("%zu %ld", &bytes, &calls) == 2) {
        static message messages[BURST];
        static double bursts[CALLS_MAX / BURST];
        long done = 0, burst = 0;
        if (calls > CALLS_MAX)
            calls = CALLS_MAX;
        while (done < calls) {
            for (int i = 0; i < BURST; i++) {
                init_size(&messages[i], bytes);
                memset(data(&messages[i]), 0x90, bytes);
            }
            double start = now();
            for (int i = 0; i < BURST; i++)
                if (send(&messages[i], socket, 0) < 0) {
                    fprintf(stderr, "a send failed\n");
                    return 1;
                }
            bursts[burst++] = (now() - start) / BURST;
            done += BURST;
            nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
        }
        qsort(bursts, burst, sizeof *bursts, by_value);
        printf("%.3f\n", bursts[burst / 2]);
        fflush(stdout);
    }
    return 0;
}
