/* Interposed before libc (LD_PRELOAD): counts a process's file operations below one folder and lets the n-th fail.

   The variable FILE_FAULT says which: "MARKER MASK AT CODE LASTING COUNTS". Counted are operations on paths that contain
   MARKER and whose class is in MASK. Number AT (from 1; 0: none) kills the process if CODE is 0, else it fails with this
   errno, and with LASTING so do all after it. The file COUNTS gets a byte for each. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OPEN_READ = 1, READ = 2, OPEN_WRITE = 4, WRITE = 8, RENAME = 16, REMOVE = 32 };

static char marker[PATH_MAX];
static int mask, code, lasting, counts = -1;
static long at, counted;
static pid_t owner; /* the process that the settings were read in */

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int is_armed(void) {
  if (owner == getpid()) return mask != 0;
  owner = getpid(), mask = 0, counted = 0;
  const char *text = getenv("FILE_FAULT");
  char path[PATH_MAX];
  int wanted;
  if (!text || sscanf(text, "%s %d %ld %d %d %s", marker, &wanted, &at, &code, &lasting, path) != 6) {
    owner = 0; /* it may be set later */
    return 0;
  }
  counts = REAL(open)(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  mask = wanted;
  return 1;
}

/* Whether the operation fails; sets errno. */
static int due(int kind) {
  if (!(mask & kind)) return 0;
  long number = __sync_add_and_fetch(&counted, 1);
  REAL(write)(counts, "x", 1);
  if (!at || number < at || (number > at && !lasting)) return 0;
  if (!code) kill(getpid(), SIGKILL);
  errno = code;
  return 1;
}

static int marked(const char *path) { return path && is_armed() && strstr(path, marker) != NULL; }

static int marked_fd(int fd) {
  if (fd < 0 || !is_armed()) return 0;
  char link[64], target[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  int before = errno;
  ssize_t length = readlink(link, target, sizeof target - 1);
  errno = before;
  if (length < 0) return 0;
  target[length] = 0;
  return marked(target);
}

static int marked_at(int folder, const char *path) {
  return marked(path) || (path && path[0] != '/' && folder != AT_FDCWD && marked_fd(folder));
}

#define IF_DUE(condition, kind) if ((condition) && due(kind)) return -1

#define OPEN(name)                                                              \
  int name(const char *path, int flags, ...) {                                  \
    va_list list;                                                               \
    va_start(list, flags);                                                      \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0;     \
    va_end(list);                                                               \
    int writes = flags & (O_WRONLY | O_RDWR | O_CREAT);                         \
    IF_DUE(marked(path), writes ? OPEN_WRITE : OPEN_READ);                      \
    return REAL(name)(path, flags, mode);                                       \
  }
#define OPENAT(name)                                                            \
  int name(int folder, const char *path, int flags, ...) {                      \
    va_list list;                                                               \
    va_start(list, flags);                                                      \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(list, mode_t) : 0;     \
    va_end(list);                                                               \
    int writes = flags & (O_WRONLY | O_RDWR | O_CREAT);                         \
    IF_DUE(marked_at(folder, path), writes ? OPEN_WRITE : OPEN_READ);           \
    return REAL(name)(folder, path, flags, mode);                               \
  }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

ssize_t read(int fd, void *data, size_t size) {
  IF_DUE(marked_fd(fd), READ);
  return REAL(read)(fd, data, size);
}
ssize_t write(int fd, const void *data, size_t size) {
  IF_DUE(marked_fd(fd), WRITE);
  return REAL(write)(fd, data, size);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
  IF_DUE(marked_fd(fd), WRITE);
  return REAL(writev)(fd, parts, count);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
  IF_DUE(marked_fd(fd), WRITE);
  return REAL(pwrite)(fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
  IF_DUE(marked_fd(fd), WRITE);
  return REAL(pwrite64)(fd, data, size, at);
}
int ftruncate(int fd, off_t size) {
  IF_DUE(marked_fd(fd), WRITE);
  return REAL(ftruncate)(fd, size);
}
int ftruncate64(int fd, off64_t size) {
  IF_DUE(marked_fd(fd), WRITE);
  return REAL(ftruncate64)(fd, size);
}
int fsync(int fd) {
  IF_DUE(marked_fd(fd), WRITE);
  return REAL(fsync)(fd);
}
int mkdir(const char *path, mode_t mode) {
  IF_DUE(marked(path), OPEN_WRITE);
  return REAL(mkdir)(path, mode);
}
int rename(const char *from, const char *to) {
  IF_DUE(marked(from), RENAME);
  return REAL(rename)(from, to);
}
int unlink(const char *path) {
  IF_DUE(marked(path), REMOVE);
  return REAL(unlink)(path);
}
int unlinkat(int folder, const char *path, int flags) {
  IF_DUE(marked_at(folder, path), REMOVE);
  return REAL(unlinkat)(folder, path, flags);
}
int rmdir(const char *path) {
  IF_DUE(marked(path), REMOVE);
  return REAL(rmdir)(path);
}
