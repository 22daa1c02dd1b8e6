//! The memory of the machine, or of this process's control groups if that is less. Default
//! limits are fractions of it; if the system reports none, they are the largest defaults.

use std::fs;
use std::path::Path;

/// Memory that this process may use, in bytes, if known.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memory(Option<u64>);

impl Memory {
    /// The memory of this machine, or of its most limited control group.
    pub(super) fn here() -> Self {
        let machine = fs::read_to_string("/proc/meminfo");
        let groups = fs::read_to_string("/proc/self/cgroup");
        let machine = machine.ok().and_then(|text| total(&text));
        let group = groups
            .ok()
            .and_then(|text| least(Path::new("/sys/fs/cgroup"), &text));
        Self(machine.into_iter().chain(group).min().map(addressable))
    }

    #[cfg(test)]
    pub(super) fn of(bytes: u64) -> Self {
        Self(Some(bytes))
    }

    /// The amount in bytes, or none if the system does not report it.
    pub(super) fn bytes(self) -> Option<u64> {
        self.0
    }

    /// `thirty_seconds` thirty-seconds of the memory, at most `most` bytes. If the memory is
    /// unknown, `most`.
    pub(super) fn part(self, thirty_seconds: u64, most: u64) -> u64 {
        self.0.map_or(most, |bytes| {
            (bytes / 32).saturating_mul(thirty_seconds).min(most)
        })
    }

    /// Like [`Self::part`], for limits that are a `usize`.
    pub(super) fn usize_part(self, thirty_seconds: u64, most: usize) -> usize {
        usize::try_from(self.part(thirty_seconds, most as u64)).unwrap_or(most)
    }
}

/// What a process can address of this memory. A 32-bit system leaves it 2 to 4 GiB, for programs and
/// reservations too.
fn addressable(bytes: u64) -> u64 {
    bytes.min(isize::MAX as u64)
}

/// The line `MemTotal` of /proc/meminfo, which counts in KiB (proc(5)).
fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The lowest limit among the groups in /proc/self/cgroup (cgroups(7)) and their ancestors.
fn least(root: &Path, groups: &str) -> Option<u64> {
    let bounds = groups.lines().filter_map(|line| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let (root, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            _ if controllers.split(',').any(|it| it == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes")
            }
            _ => return None,
        };
        let group = root.join(path.trim_start_matches('/'));
        let above = group.ancestors().take_while(|it| it.starts_with(&root));
        let texts = above.filter_map(|it| fs::read_to_string(it.join(file)).ok());
        texts.filter_map(|it| it.trim().parse().ok()).min()
    });
    bounds.min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_a_fraction_of_memory_up_to_the_maximum() {
        let gateway = Memory::of(256 << 20);
        assert_eq!(gateway.part(12, 512 << 20), 96 << 20);
        assert_eq!(gateway.part(12, 10), 10);
        assert_eq!(Memory(None).part(32, 512 << 20), 512 << 20);
    }

    #[test]
    fn total_memory_is_parsed() {
        let text = "MemTotal:         250000 kB\nMemFree:           1000 kB\n";
        assert_eq!(total(text), Some(250_000 * 1024));
        assert_eq!(total("MemFree: 1 kB\n"), None);
        let here = Memory::here().bytes();
        assert!(here.is_some_and(|bytes| bytes > 1 << 20), "{here:?}");
    }

    #[test]
    fn the_lowest_limit_of_all_ancestor_groups_applies() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let write = |group: &str, file: &str, text: &str| {
            fs::create_dir_all(root.join(group)).unwrap();
            fs::write(root.join(group).join(file), text).unwrap();
        };
        write("system.slice/store.service", "memory.max", "max\n");
        write("system.slice", "memory.max", "300\n");
        write("", "memory.max", "900\n");
        let in_one = "0::/system.slice/store.service\n";
        assert_eq!(least(root, in_one), Some(300));
        write("system.slice/store.service", "memory.max", "200\n");
        assert_eq!(least(root, in_one), Some(200));
        // Control groups v1, next to other controllers.
        write("memory/store", "memory.limit_in_bytes", "100\n");
        let in_several = "7:pids:/store\n6:cpu,memory:/store\n";
        assert_eq!(least(root, in_several), Some(100));
        assert_eq!(least(root, "7:pids:/store\n"), None);
    }
}
