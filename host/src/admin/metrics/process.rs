//! Metrics of the process, under the names that all Prometheus clients use, and of its build.

use std::fs;
use std::time::Duration;

use super::page::Page;
use crate::build;

/// The unit of times in `/proc`, in milliseconds: user space always sees a hundredth of a second
/// (proc(5)).
const TICK_MS: u64 = 10;

/// The build, and what the system reports of the process.
pub(super) fn process(page: &mut Page) {
    let labels = vec![
        ("version", build::VERSION.to_owned()),
        ("commit", build::COMMIT.to_owned()),
        ("target", build::TARGET.to_owned()),
        ("features", build::FEATURES.clone()),
        ("arch", std::env::consts::ARCH.to_owned()),
    ];
    page.info("build", "The version of the program", labels);
    if let Some(times) = Times::read() {
        let help = "CPU time of the process in user and system mode";
        (page.counter("process_cpu_seconds", help)).time(Vec::new(), times.cpu);
        let help = "Start of the process, since 1970";
        page.seconds("process_start_time_seconds", help, times.start);
    }
    if let Some(resident_bytes) = resident_bytes() {
        let help = "Memory of the process in RAM";
        page.measure("process_resident_memory_bytes", help, resident_bytes);
    }
    if let Some(virtual_bytes) = status_bytes("VmSize:") {
        let help = "Address space of the process";
        page.measure("process_virtual_memory_bytes", help, virtual_bytes);
    }
    if let Some(open) = open_files() {
        page.measure("process_open_fds", "Open files and sockets", open);
    }
    if let Some(max) = statehouse_config::open_files_max() {
        let help = "The most files and sockets that the process may open";
        page.measure("process_max_fds", help, max);
    }
}

/// The CPU time, and the start since 1970.
struct Times {
    cpu: Duration,
    start: Duration,
}

impl Times {
    fn read() -> Option<Self> {
        let own = fs::read_to_string("/proc/self/stat").ok()?;
        let system = fs::read_to_string("/proc/stat").ok()?;
        Self::of(&own, &system)
    }

    /// The fields are counted after the name of the program, which may contain anything.
    fn of(own: &str, system: &str) -> Option<Self> {
        let boot = system
            .lines()
            .find_map(|line| line.strip_prefix("btime "))?;
        let boot = Duration::from_secs(boot.trim().parse().ok()?);
        Some(Self {
            cpu: cpu_of(own)?,
            start: boot + ticks(own, 19)?,
        })
    }
}

/// A time in a line of `/proc/self/stat`, by its number after the name of the program.
fn ticks(own: &str, field: usize) -> Option<Duration> {
    let mut fields = own.rsplit_once(')')?.1.split_whitespace();
    let ticks: u64 = fields.nth(field)?.parse().ok()?;
    ticks.checked_mul(TICK_MS).map(Duration::from_millis)
}

fn cpu_of(own: &str) -> Option<Duration> {
    Some(ticks(own, 11)? + ticks(own, 12)?)
}

/// The CPU time of the process in user and system mode.
pub(in crate::admin) fn cpu() -> Option<Duration> {
    cpu_of(&fs::read_to_string("/proc/self/stat").ok()?)
}

/// The start of the process, since 1970.
pub(in crate::admin) fn started() -> Option<Duration> {
    Times::read().map(|it| it.start)
}

pub(in crate::admin) fn resident_bytes() -> Option<u64> {
    status_bytes("VmRSS:")
}

/// Open files and sockets. Takes a microsecond for some ten of them.
pub(in crate::admin) fn open_files() -> Option<u64> {
    let open = fs::read_dir("/proc/self/fd").ok()?;
    // One of them is the directory that is being read.
    Some((open.count() as u64).saturating_sub(1))
}

fn status_bytes(name: &str) -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_after_a_name_with_spaces() {
        let own = "7 (a ) 1 2) S 1 7 7 0 -1 4194304 100 0 0 0 250 50 0 0 20 0 4 0 12345 1000 200";
        let times = Times::of(own, "cpu 1 2\nbtime 1700000000\nprocesses 3\n").unwrap();
        assert_eq!(times.cpu, Duration::from_secs(3));
        assert_eq!(times.start, Duration::from_millis(1_700_000_123_450));
        assert!(Times::of("7 (a) S 1", "btime 1\n").is_none());
    }

    /// Regression: a start more than 497 days after the boot did not fit into 32 bits of ticks.
    #[test]
    fn start_is_known_years_after_the_boot() {
        let own = "7 (a) S 1 7 7 0 -1 4194304 100 0 0 0 250 50 0 0 20 0 4 0 5000000000 1000 200";
        let times = Times::of(own, "btime 1700000000\n").unwrap();
        assert_eq!(times.start, Duration::from_secs(1_750_000_000));
    }
}
