/*
 * helper_libc.c: the calls of a server as glibc makes them from 2.41 on, where one function makes the system calls of
 * all others. Named as a libc and preloaded, it takes their place.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

__attribute__((noipa)) static long make(long a, long b, long c, long d, long e, long f, long number)
{
#if defined(__x86_64__)
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;
	long result;

	__asm__ volatile("syscall"
			 : "=a"(result)
			 : "0"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	return result;
#elif defined(__aarch64__)
	register long x8 __asm__("x8") = number;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;
	register long x5 __asm__("x5") = f;

	__asm__ volatile("svc #0"
			 : "+r"(x0)
			 : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5)
			 : "memory");
	return x0;
#endif
}

__attribute__((noipa)) static long call(long a, long b, long c, long d, long e, long f, long number)
{
	long result = make(a, b, c, d, e, f, number);

	if (__builtin_expect((unsigned long)result > -4096ul, 0)) {
		errno = -result;
		return -1;
	}
	return result;
}

ssize_t read(int fd, void *to, size_t size)
{
	return call(fd, (long)to, size, 0, 0, 0, SYS_read);
}

ssize_t write(int fd, const void *from, size_t size)
{
	return call(fd, (long)from, size, 0, 0, 0, SYS_write);
}

ssize_t writev(int fd, const struct iovec *vectors, int count)
{
	return call(fd, (long)vectors, count, 0, 0, 0, SYS_writev);
}

ssize_t recv(int fd, void *to, size_t size, int flags)
{
	return call(fd, (long)to, size, flags, 0, 0, SYS_recvfrom);
}

ssize_t send(int fd, const void *from, size_t size, int flags)
{
	return call(fd, (long)from, size, flags, 0, 0, SYS_sendto);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
	return call(fd, (long)message, flags, 0, 0, 0, SYS_sendmsg);
}

int accept4(int fd, struct sockaddr *address, socklen_t *size, int flags)
{
	return call(fd, (long)address, (long)size, flags, 0, 0, SYS_accept4);
}

int close(int fd)
{
	return call(fd, 0, 0, 0, 0, 0, SYS_close);
}
