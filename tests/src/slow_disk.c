/* Delays each fdatasync of a process by this number of microseconds. Follows injected.c. */
int fdatasync(int file) {
    if (number && *number > 0)
        usleep((useconds_t)*number);
    return (int)syscall(SYS_fdatasync, file);
}
