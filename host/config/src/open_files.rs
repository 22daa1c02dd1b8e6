//! How many connections the number of files allows that the process may open. The program raises
//! that number before it reads its settings (`host/src/app/`).

use std::fs;

use super::limits::{ADMIN_ARRIVING_MAX, ADMIN_LISTENERS_MAX, HANDSHAKES_MAX, OPEN_FILES_RESERVED};

/// The number of files that this process may open (`RLIMIT_NOFILE`), or none if the system does not
/// report it.
pub fn open_files_max() -> Option<u64> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    soft_limit(&limits)
}

/// How many sockets of clients leave enough files for everything else, or none if there is no known
/// limit.
pub fn connections_for_open_files() -> Option<usize> {
    open_files_max().map(connections)
}

/// The line `Max open files` of /proc/self/limits (proc(5)): name, soft limit, hard limit, unit.
fn soft_limit(limits: &str) -> Option<u64> {
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

fn connections(files: u64) -> usize {
    let arriving = arriving(files) * ADMIN_LISTENERS_MAX;
    let others = OPEN_FILES_RESERVED + (handshakes(files) + arriving) as u64;
    let left = files.saturating_sub(others).max(files / 2);
    usize::try_from(left).unwrap_or(usize::MAX)
}

/// The most unfinished handshakes of clients: peers that are not authenticated must not use up the
/// files that the log needs.
pub fn handshakes_max() -> usize {
    open_files_max().map_or(HANDSHAKES_MAX, handshakes)
}

/// The most connections of an admin listener without a complete request.
pub fn admin_arriving_max() -> usize {
    open_files_max().map_or(ADMIN_ARRIVING_MAX, arriving)
}

fn handshakes(files: u64) -> usize {
    part(files, 8, HANDSHAKES_MAX)
}

fn arriving(files: u64) -> usize {
    part(files, 32, ADMIN_ARRIVING_MAX)
}

fn part(files: u64, parts: u64, most: usize) -> usize {
    usize::try_from(files / parts).map_or(most, |it| it.clamp(1, most))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_read() {
        let limits = "Limit                     Soft Limit           Hard Limit           Units\n\
            Max processes             95971                95971                processes\n\
            Max open files            1024                 4096                 files\n";
        assert_eq!(soft_limit(limits), Some(1024));
        let unlimited = limits.replace("1024 ", "unlimited ");
        assert_eq!(soft_limit(&unlimited), None);
        assert_eq!(soft_limit(""), None);
    }

    #[test]
    fn some_files_are_left_for_everything_else() {
        assert_eq!(connections(65_536), 64_384);
        assert_eq!(connections(4096), 2944);
        assert_eq!(connections(1024), 544);
        assert_eq!(connections(200), 100);
        for files in [40, 200, 1024, 4096, 16_384, 65_536] {
            let peers = connections(files) + handshakes(files) + 3 * arriving(files);
            let left = files - peers as u64;
            assert!(
                left >= OPEN_FILES_RESERVED.min(files / 4),
                "{files}: {left}"
            );
        }
    }
}
