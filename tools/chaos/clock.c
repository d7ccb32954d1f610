/* The wall clock of one program, LD_PRELOADed: seconds in the file that CHAOS_CLOCK names are added to it. Waits until
 * a time of the wall clock are the kernel's and see nothing of it; neither llmserve nor Python waits so. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset_s;

__attribute__((constructor)) static void open_offset(void) {
  const char *path = getenv("CHAOS_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *found = mmap(0, sizeof *offset_s, PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (found != MAP_FAILED) offset_s = found;
}

int clock_gettime(clockid_t clock, struct timespec *found) {
  int result = (int)syscall(SYS_clock_gettime, clock, found);
  if (result == 0 && offset_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) found->tv_sec += *offset_s;
  return result;
}

int gettimeofday(struct timeval *found, void *zone) {
  struct timespec now;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &now);
  found->tv_sec = now.tv_sec;
  found->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *found) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (found) *found = now.tv_sec;
  return now.tv_sec;
}
