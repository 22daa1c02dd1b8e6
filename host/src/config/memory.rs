//! How much memory there is, which default bounds are parts of.
//!
//! What enters: what the system says of the machine, and of the control groups that this process is in. What leaves: parts of
//! it, in bytes. Where the system says nothing, memory is no bound.

use std::fs;
use std::path::Path;

/// Memory that this process may take, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memory(Option<u64>);

impl Memory {
    /// That of this machine, or of the control group with the least.
    pub(super) fn here() -> Self {
        let machine = fs::read_to_string("/proc/meminfo");
        let groups = fs::read_to_string("/proc/self/cgroup");
        let machine = machine.ok().and_then(|text| total(&text));
        let group = groups
            .ok()
            .and_then(|text| least(Path::new("/sys/fs/cgroup"), &text));
        Self(machine.into_iter().chain(group).min())
    }

    /// So much.
    #[cfg(test)]
    pub(super) fn of(bytes: u64) -> Self {
        Self(Some(bytes))
    }

    /// It; none where the system does not say.
    pub(super) fn bytes(self) -> Option<u64> {
        self.0
    }

    /// So many thirty-second parts of it, and no more than `most` bytes.
    pub(super) fn part(self, thirty_seconds: u64, most: u64) -> u64 {
        self.0.map_or(most, |bytes| {
            (bytes / 32).saturating_mul(thirty_seconds).min(most)
        })
    }
}

/// The line `MemTotal` of /proc/meminfo, which counts in KiB (proc(5)).
fn total(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The least bound of the groups that /proc/self/cgroup names (cgroups(7)), and of those above them.
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
    fn a_part_is_of_what_there_is_and_never_more_than_fits_any_machine() {
        let gateway = Memory::of(256 << 20);
        assert_eq!(gateway.part(12, 512 << 20), 96 << 20);
        assert_eq!(gateway.part(12, 10), 10);
        assert_eq!(Memory(None).part(32, 512 << 20), 512 << 20);
    }

    #[test]
    fn the_machine_says_how_much_it_has() {
        let text = "MemTotal:         250000 kB\nMemFree:           1000 kB\n";
        assert_eq!(total(text), Some(250_000 * 1024));
        assert_eq!(total("MemFree: 1 kB\n"), None);
        let here = Memory::here().bytes();
        assert!(here.is_some_and(|bytes| bytes > 1 << 20), "{here:?}");
    }

    #[test]
    fn the_least_of_all_groups_above_counts() {
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
        // The first version, beside other controllers.
        write("memory/store", "memory.limit_in_bytes", "100\n");
        let in_several = "7:pids:/store\n6:cpu,memory:/store\n";
        assert_eq!(least(root, in_several), Some(100));
        assert_eq!(least(root, "7:pids:/store\n"), None);
    }
}
