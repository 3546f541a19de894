/* A disk that fails: loaded with LD_PRELOAD, it spoils reads of files under FAULT_UNDER.
 * FAULT_KIND: eio, eintr, short or stall; from the FAULT_FIRST-th read on, FAULT_TIMES of them (0: all that follow). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int calls;

/* 'o' (eio), 'n' (eintr), 's', or 0 where the read is to go well. */
static char fault(int fd) {
    const char *under = getenv("FAULT_UNDER"), *kind = getenv("FAULT_KIND");
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = under && kind ? readlink(link, path, sizeof path - 1) : -1;
    if (length < 0 || strncmp(path, under, strlen(under)) != 0) return 0;
    int call = __sync_add_and_fetch(&calls, 1), first = atoi(getenv("FAULT_FIRST")), times = atoi(getenv("FAULT_TIMES"));
    if (call < first || (times && call >= first + times)) return 0;
    if (!strcmp(kind, "stall")) sleep(600);
    return kind[0] == 'e' ? kind[2] : kind[0];
}

#define SPOIL(fd) \
    char wrong = fault(fd); \
    if (wrong == 'o') { errno = EIO; return -1; } \
    if (wrong == 'n') { errno = EINTR; return -1; } \
    int some = wrong == 's';
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t read(int fd, void *to, size_t size) {
    SPOIL(fd) return REAL(read)(fd, to, some ? size / 3 + 1 : size);
}
ssize_t pread(int fd, void *to, size_t size, off_t at) {
    SPOIL(fd) return REAL(pread)(fd, to, some ? size / 3 + 1 : size, at);
}
ssize_t pread64(int fd, void *to, size_t size, off64_t at) {
    SPOIL(fd) return REAL(pread64)(fd, to, some ? size / 3 + 1 : size, at);
}
static ssize_t first_part(int fd, const struct iovec *to, off_t at) {
    return REAL(pread)(fd, to->iov_base, to->iov_len / 3 + 1 > to->iov_len ? to->iov_len : to->iov_len / 3 + 1, at);
}
ssize_t preadv(int fd, const struct iovec *to, int count, off_t at) {
    SPOIL(fd) return some ? first_part(fd, to, at) : REAL(preadv)(fd, to, count, at);
}
ssize_t preadv64(int fd, const struct iovec *to, int count, off64_t at) {
    SPOIL(fd) return some ? first_part(fd, to, at) : REAL(preadv64)(fd, to, count, at);
}
ssize_t preadv2(int fd, const struct iovec *to, int count, off_t at, int flags) {
    SPOIL(fd) return some ? first_part(fd, to, at) : REAL(preadv2)(fd, to, count, at, flags);
}
ssize_t preadv64v2(int fd, const struct iovec *to, int count, off64_t at, int flags) {
    SPOIL(fd) return some ? first_part(fd, to, at) : REAL(preadv64v2)(fd, to, count, at, flags);
}
