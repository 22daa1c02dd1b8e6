/* Shifts the wall clock of a process by this number of seconds. Follows injected.c. */
int clock_gettime(clockid_t id, struct timespec *time) {
    if (syscall(SYS_clock_gettime, id, time))
        return -1;
    if (number && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        time->tv_sec += *number;
    return 0;
}
