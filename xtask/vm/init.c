/*
 * init.c: process 1 of the machines that `cargo xtask vm` boots.
 *
 * Mounts what a program that loads BPF expects, runs /run-test with its own arguments (what follows "--" on
 * the kernel's command line) and its output on the console, writes how it ended as a line "omnitap-vm: exit N", and powers the machine off.
 */
#define _GNU_SOURCE
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

static void mount_at(const char *type, const char *folder)
{
	mkdir(folder, 0755);
	if (mount(type, folder, type, 0, NULL))
		printf("omnitap-vm: no %s on %s\n", type, folder);
}

static void loopback_up(void)
{
	struct ifreq request = { .ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING };
	int fd = socket(AF_INET, SOCK_DGRAM, 0);

	if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &request))
		printf("omnitap-vm: no loopback interface\n");
	close(fd);
}

int main(int argc, char **argv)
{
	char *const envp[] = { "PATH=/usr/bin:/bin", "HOME=/root", "OMNITAP_SENDER=/sender",
			       "OMNITAP_SEGMENTS=/segments", "OMNITAP_SERVER=/server", NULL };
	int status = 0;
	pid_t test;

	(void)argc;
	mount_at("proc", "/proc");
	mount_at("sysfs", "/sys");
	mount_at("tmpfs", "/tmp");
	mount_at("tmpfs", "/dev/shm");
	mount_at("debugfs", "/sys/kernel/debug");
	mount_at("tracefs", "/sys/kernel/tracing");
	mount_at("bpf", "/sys/fs/bpf");
	loopback_up();
	setvbuf(stdout, NULL, _IONBF, 0);

	test = fork();
	if (test == 0) {
		argv[0] = "/run-test";
		execve(argv[0], argv, envp);
		perror("omnitap-vm: /run-test");
		_exit(127);
	}
	/* Orphans come here too. */
	for (pid_t ended; (ended = wait(&status)) != test && ended > 0;)
		;
	printf("\nomnitap-vm: exit %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
	tcdrain(1);
	sync();
	reboot(RB_POWER_OFF);
	for (;;)
		pause();
}
