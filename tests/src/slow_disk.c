/* Delays each fdatasync of a process by the number of microseconds in the file $SLOW_DISK_DELAY. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static const volatile int64_t *delay_us;

__attribute__((constructor)) static void map_delay(void) {
    const char *path = getenv("SLOW_DISK_DELAY");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        abort();
    void *mapped = mmap(NULL, sizeof *delay_us, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED)
        abort();
    delay_us = mapped;
}

int fdatasync(int file) {
    if (delay_us && *delay_us > 0)
        usleep((useconds_t)*delay_us);
    return (int)syscall(SYS_fdatasync, file);
}
