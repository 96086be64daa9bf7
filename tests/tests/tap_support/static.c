/* Sends frames of constant memory (the third layout of zmq_msg_t) through a libzmq linked into the executable. */
#include <stdio.h>
#include <stdlib.h>
#include <zmq.h>

static char constant[300];

int main(void) {
    void *context = zmq_ctx_new();
    void *pull = zmq_socket(context, ZMQ_PULL), *push = zmq_socket(context, ZMQ_PUSH);
    if (zmq_bind(pull, "inproc://frames") || zmq_connect(push, "inproc://frames")) return 1;
    for (int i = 0; i < 300; i++) constant[i] = (char)(i * 7);
    char line[64];
    puts("ready");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        zmq_msg_t message, received;
        int size = atoi(line);
        if (size > 300) return 2;
        zmq_msg_init_data(&message, constant, size, NULL, NULL);
        if (zmq_msg_send(&message, push, 0) < 0) return 3;
        zmq_msg_init(&received);
        if (zmq_msg_recv(&received, pull, 0) < 0) return 4;
        zmq_msg_close(&received);
        puts("ok");
        fflush(stdout);
    }
    return 0;
}
