/*
 * segments.c: hands segments of shared memory on by the file protocol of vLLM-Omni's SharedMemoryConnector.
 *
 *   segments
 *       Reads one order a line from standard input and answers each with a line of numbers:
 *           put NAME SIZE         -> TID BEFORE AFTER   (CLOCK_MONOTONIC in ns, around lock and unlock)
 *           get NAME              -> TID BEFORE AFTER   (around open and unlock), or "0 0 0": not there yet
 *           getheld NAME          -> as get, of a process that knows that the segment is there: no open first
 *           cleanup NAME          -> TID BEFORE AFTER   (around open and removal)
 *           poll NAME COUNT       -> TID BEFORE AFTER   opens in a row that must fail
 *           segment NAME SIZE     -> TID BEFORE AFTER   made, sized and removed without a lock
 *           lock COUNT            -> TID BEFORE AFTER   of a file of no segment, both ways
 *           badname               -> TID BEFORE AFTER   a removal whose name can't be read
 *           threads COUNT HOPS SIZE
 *               COUNT pairs of threads; each pair passes HOPS segments "tPAIR_HOP" of SIZE + HOP bytes on. A
 *               line for each put and get, "put|get NAME TID BEFORE AFTER", then "done".
 *           bench COUNT           -> nanoseconds of CPU time of COUNT failed opens
 *           hops COUNT SIZE       -> nanoseconds of CPU time of COUNT puts and gets in turn
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct answer {
	long tid;
	unsigned long long before, after;
};

static void fail(const char *what)
{
	fprintf(stderr, "segments: %s: %s\n", what, strerror(errno));
	exit(1);
}

static unsigned long long now(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static unsigned long long monotonic(void)
{
	return now(CLOCK_MONOTONIC);
}

static struct answer since(unsigned long long before)
{
	return (struct answer){ syscall(SYS_gettid), before, monotonic() };
}

/* Names of a segment and its lock file. */
static void names(const char *key, char *name, char *lock)
{
	snprintf(name, 300, "/%s", key);
	snprintf(lock, 400, "/dev/shm/shm_%s_lockfile.lock", key);
}

static struct answer put(const char *key, size_t size)
{
	char name[300], lock[400];
	unsigned long long before;
	int file, fd, old;
	void *map;

	names(key, name, lock);
	file = open(lock, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
	before = monotonic();
	if (file < 0 || flock(file, LOCK_EX))
		fail("lock of put");
	fd = shm_open(name, O_CREAT | O_EXCL | O_RDWR, 0600);
	if (fd < 0 && errno == EEXIST) {
		old = shm_open(name, O_RDWR, 0600);
		close(old);
		shm_unlink(name);
		fd = shm_open(name, O_CREAT | O_EXCL | O_RDWR, 0600);
	}
	if (fd < 0 || ftruncate(fd, size))
		fail("put");
	map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (map == MAP_FAILED)
		fail("map of put");
	memset(map, 7, size);
	munmap(map, size);
	close(fd);
	flock(file, LOCK_UN);
	close(file);
	return since(before);
}

static struct answer get(const char *key, int opens_first)
{
	static __thread unsigned char sum;
	char name[300], lock[400];
	unsigned long long before = monotonic();
	struct answer answer;
	struct stat stat;
	int file, fd;
	unsigned char *map;

	names(key, name, lock);
	if (opens_first) {
		fd = shm_open(name, O_RDWR, 0600);
		if (fd < 0)
			return (struct answer){ 0, 0, 0 };
		if (fstat(fd, &stat))
			fail("stat");
		close(fd);
		if (stat.st_size == 0)
			return (struct answer){ 0, 0, 0 };
	}
	file = open(lock, O_RDWR | O_CLOEXEC);
	if (file < 0)
		fail("lock file of get");
	if (flock(file, LOCK_EX | LOCK_NB)) {
		close(file);
		return (struct answer){ 0, 0, 0 };
	}
	fd = shm_open(name, O_RDWR, 0600);
	if (fd < 0 || fstat(fd, &stat))
		fail("get");
	map = mmap(NULL, stat.st_size, PROT_READ, MAP_SHARED, fd, 0);
	if (map == MAP_FAILED)
		fail("map of get");
	for (off_t at = 0; at < stat.st_size; at++)
		sum += map[at];
	munmap(map, stat.st_size);
	close(fd);
	shm_unlink(name);
	flock(file, LOCK_UN);
	answer = since(before);
	close(file);
	unlink(lock);
	return answer;
}

static struct answer cleanup(const char *key)
{
	char name[300], lock[400];
	unsigned long long before = monotonic();
	int fd;

	names(key, name, lock);
	fd = shm_open(name, O_RDWR, 0600);
	if (fd < 0)
		fail("cleanup");
	close(fd);
	shm_unlink(name);
	unlink(lock);
	return since(before);
}

static struct answer poll_for(const char *key, long count)
{
	char name[300], lock[400];
	unsigned long long before = monotonic();

	names(key, name, lock);
	for (long i = 0; i < count; i++)
		if (shm_open(name, O_RDWR, 0600) >= 0)
			fail("a segment that should not be there");
	return since(before);
}

static struct answer segment(const char *key, size_t size)
{
	char name[300], lock[400];
	unsigned long long before = monotonic();
	int fd;

	names(key, name, lock);
	fd = shm_open(name, O_CREAT | O_EXCL | O_RDWR, 0600);
	if (fd < 0 || ftruncate(fd, size) || ftruncate(fd, size + 1))
		fail("segment");
	close(fd);
	shm_unlink(name);
	return since(before);
}

static struct answer lock_file(long count)
{
	unsigned long long before = monotonic();
	int file = open("/dev/shm", O_RDONLY | O_CLOEXEC), other = open("/dev/shm", O_RDONLY | O_CLOEXEC);

	for (long i = 0; i < count; i++) {
		if (flock(file, i % 2 ? LOCK_EX : LOCK_EX | LOCK_NB) || !flock(other, LOCK_SH | LOCK_NB) ||
		    flock(file, LOCK_UN) || flock(file, LOCK_SH) || flock(file, LOCK_UN))
			fail("lock");
	}
	close(file);
	close(other);
	return since(before);
}

struct pair {
	pthread_t putter, getter;
	long number, hops;
	size_t size;
};

static pthread_mutex_t output = PTHREAD_MUTEX_INITIALIZER;

static void tell(const char *what, const char *key, struct answer answer)
{
	pthread_mutex_lock(&output);
	printf("%s %s %ld %llu %llu\n", what, key, answer.tid, answer.before, answer.after);
	pthread_mutex_unlock(&output);
}

/* With the process, as others may do the same beside it. */
static void thread_key(char *key, size_t room, long thread, long hop)
{
	snprintf(key, room, "p%d-t%ld_%ld", (int)getpid(), thread, hop);
}

static void *put_all(void *of)
{
	struct pair *pair = of;
	char key[64];

	for (long hop = 0; hop < pair->hops; hop++) {
		thread_key(key, sizeof key, pair->number, hop);
		tell("put", key, put(key, pair->size + hop));
	}
	return NULL;
}

static void *get_all(void *of)
{
	const struct timespec pause = { 0, 1000000 };
	struct pair *pair = of;
	struct answer answer;
	char key[64];

	for (long hop = 0; hop < pair->hops; hop++) {
		thread_key(key, sizeof key, pair->number, hop);
		while ((answer = get(key, 1)).tid == 0)
			nanosleep(&pause, NULL);
		tell("get", key, answer);
	}
	return NULL;
}

static void threads(long count, long hops, size_t size)
{
	struct pair *pairs = calloc(count, sizeof *pairs);

	for (long i = 0; i < count; i++) {
		pairs[i].number = i;
		pairs[i].hops = hops;
		pairs[i].size = size;
		if (pthread_create(&pairs[i].getter, NULL, get_all, &pairs[i]) ||
		    pthread_create(&pairs[i].putter, NULL, put_all, &pairs[i]))
			fail("thread");
	}
	for (long i = 0; i < count; i++) {
		pthread_join(pairs[i].putter, NULL);
		pthread_join(pairs[i].getter, NULL);
	}
	free(pairs);
	puts("done");
}

int main(void)
{
	char line[512], key[280];
	long count, size, hops;
	struct answer answer;
	unsigned long long start;

	setvbuf(stdout, NULL, _IOLBF, 0);
	while (fgets(line, sizeof line, stdin)) {
		if (sscanf(line, "put %279s %ld", key, &size) == 2) {
			answer = put(key, size);
		} else if (sscanf(line, "getheld %279s", key) == 1) {
			answer = get(key, 0);
		} else if (sscanf(line, "get %279s", key) == 1) {
			answer = get(key, 1);
		} else if (sscanf(line, "cleanup %279s", key) == 1) {
			answer = cleanup(key);
		} else if (sscanf(line, "poll %279s %ld", key, &count) == 2) {
			answer = poll_for(key, count);
		} else if (sscanf(line, "segment %279s %ld", key, &size) == 2) {
			answer = segment(key, size);
		} else if (sscanf(line, "lock %ld", &count) == 1) {
			answer = lock_file(count);
		} else if (strcmp(line, "badname\n") == 0) {
			/* A page that was never touched: the kernel can't read it without a fault. */
			char *name = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

			start = monotonic();
			shm_unlink(name);
			answer = since(start);
		} else if (sscanf(line, "threads %ld %ld %ld", &count, &hops, &size) == 3) {
			threads(count, hops, size);
			continue;
		} else if (sscanf(line, "bench %ld", &count) == 1) {
			start = now(CLOCK_PROCESS_CPUTIME_ID);
			poll_for("not_there", count);
			printf("%llu\n", now(CLOCK_PROCESS_CPUTIME_ID) - start);
			continue;
		} else if (sscanf(line, "hops %ld %ld", &count, &size) == 2) {
			thread_key(key, sizeof key, 0, 0);
			start = now(CLOCK_PROCESS_CPUTIME_ID);
			for (long i = 0; i < count; i++) {
				put(key, size);
				get(key, 1);
			}
			printf("%llu\n", now(CLOCK_PROCESS_CPUTIME_ID) - start);
			continue;
		} else {
			errno = EINVAL;
			fail(line);
		}
		printf("%ld %llu %llu\n", answer.tid, answer.before, answer.after);
	}
	return 0;
}
