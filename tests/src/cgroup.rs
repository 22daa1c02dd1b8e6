//! A memory cgroup for one process: its limit, its peak, and the number of kills by the kernel.
//!
//! The cgroup is a child or a sibling of the test's own cgroup, so limits above both stay in force.
//! Drop removes the directory. All processes in it must have ended before, or the removal fails.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Duration,
};

/// Where Linux distributions mount cgroups.
const MOUNT: &str = "/sys/fs/cgroup";

/// The names of the files of one version of cgroups.
struct Files {
    limit: &'static str,
    peak: &'static str,
    events: &'static str,
    /// The file of the swap limit, and its value for a memory limit in bytes.
    swap: (&'static str, fn(u64) -> u64),
}

const V1: Files = Files {
    limit: "memory.limit_in_bytes",
    peak: "memory.max_usage_in_bytes",
    events: "memory.oom_control",
    // This file limits the sum of memory and swap.
    swap: ("memory.memsw.limit_in_bytes", |limit| limit),
};

const V2: Files = Files {
    limit: "memory.max",
    peak: "memory.peak",
    events: "memory.events",
    swap: ("memory.swap.max", |_| 0),
};

/// One memory cgroup, version 1 or 2.
pub struct Cgroup {
    directory: PathBuf,
    files: &'static Files,
}

impl Cgroup {
    /// Creates a cgroup with a limit in MiB. Prints the reason if this machine does not allow it.
    pub fn with_limit(limit_mib: u64) -> Option<Cgroup> {
        Cgroup::create(limit_mib << 20)
            .inspect_err(|error| eprintln!("no memory cgroup, so nothing is measured: {error}"))
            .ok()
    }

    fn create(limit_bytes: u64) -> io::Result<Cgroup> {
        static CREATED: AtomicU32 = AtomicU32::new(0);
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let (parent, files) = parent(Path::new(MOUNT), &own)
            .ok_or_else(|| io::Error::other("no parent has a memory controller"))?;
        let number = CREATED.fetch_add(1, Ordering::Relaxed);
        let directory = parent.join(format!("statehouse-test-{}-{number}", std::process::id()));
        let named = |error| io::Error::other(format!("{}: {error}", directory.display()));
        fs::create_dir(&directory).map_err(named)?;
        let group = Cgroup { directory, files };
        let write = |name: &str, value: u64| {
            fs::write(group.directory.join(name), value.to_string())
                .map_err(|error| io::Error::other(format!("{name}: {error}")))
        };
        write(files.limit, limit_bytes)?;
        let (swap, value) = files.swap;
        if group.directory.join(swap).exists() {
            write(swap, value(limit_bytes))?;
        }
        // Linux has `memory.peak` since 5.19.
        group.read(files.peak)?;
        Ok(group)
    }

    /// The same command inside the cgroup. The process enters the cgroup before it runs the
    /// program.
    #[must_use]
    pub fn enter(&self, command: &Command) -> Command {
        let mut inside = Command::new("sh");
        inside
            .args(["-c", "echo $$ >\"$0\" && exec \"$@\""])
            .arg(self.directory.join("cgroup.procs"))
            .arg(command.get_program())
            .args(command.get_args());
        for (name, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(name, value),
                None => inside.env_remove(name),
            };
        }
        inside
    }

    /// The peak of memory use in KiB, including the page cache.
    pub fn peak_kib(&self) -> u64 {
        self.read(self.files.peak)
            .unwrap()
            .trim()
            .parse::<u64>()
            .unwrap()
            / 1024
    }

    /// The number of processes that the kernel killed at the limit.
    pub fn oom_kills(&self) -> u64 {
        let events = self.read(self.files.events).unwrap();
        events
            .lines()
            .find_map(|line| line.strip_prefix("oom_kill "))
            .map_or(0, |count| count.parse().unwrap())
    }

    fn read(&self, name: &str) -> io::Result<String> {
        fs::read_to_string(self.directory.join(name))
            .map_err(|error| io::Error::other(format!("{name}: {error}")))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process leaves its cgroup a moment after its parent has waited for it.
        for _ in 0..100 {
            if fs::remove_dir(&self.directory).is_ok() {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        eprintln!("cannot remove the cgroup {}", self.directory.display());
    }
}

/// The cgroup in which a child with a memory limit can be created. `own` is the content of
/// `/proc/self/cgroup`.
fn parent(mount: &Path, own: &str) -> Option<(PathBuf, &'static Files)> {
    let below = |root: PathBuf, path: &str| root.join(path.trim_start_matches('/'));
    for line in own.lines() {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        if controllers.split(',').any(|it| it == "memory") {
            let root = mount.join("memory");
            let group = below(root.clone(), path);
            // In a container, the path may be a path of the host.
            return Some((if group.is_dir() { group } else { root }, &V1));
        }
    }
    // In version 2, a cgroup has either processes or limited children. So search the ancestors.
    let path = own.lines().find_map(|line| line.strip_prefix("0::"))?;
    let group = below(mount.to_owned(), path);
    let delegates_memory = |group: &Path| {
        fs::read_to_string(group.join("cgroup.subtree_control"))
            .is_ok_and(|names| names.split_whitespace().any(|it| it == "memory"))
    };
    let found = group
        .ancestors()
        .take_while(|it| it.starts_with(mount))
        .find(|it| delegates_memory(it))?;
    Some((found.to_owned(), &V2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn v1_cgroup_is_created_below_the_tests_own() {
        let mount = tempfile::tempdir().unwrap();
        fs::create_dir_all(mount.path().join("memory/a/b")).unwrap();
        let found = |own| parent(mount.path(), own).map(|(path, files)| (path, files.limit));
        let memory = mount.path().join("memory");
        assert_eq!(
            found("5:pids:/\n4:cpu,memory:/a/b\n0::/\n"),
            Some((memory.join("a/b"), V1.limit))
        );
        assert_eq!(found("4:memory:/elsewhere\n"), Some((memory, V1.limit)));
    }

    #[test]
    fn v2_cgroup_is_created_below_a_memory_controller() {
        let mount = tempfile::tempdir().unwrap();
        let service = mount.path().join("system.slice/test.service");
        fs::create_dir_all(&service).unwrap();
        fs::write(service.join("cgroup.subtree_control"), "\n").unwrap();
        let own = "0::/system.slice/test.service\n";
        assert!(parent(mount.path(), own).is_none());
        let slice = mount.path().join("system.slice");
        fs::write(slice.join("cgroup.subtree_control"), "cpu memory\n").unwrap();
        let (path, files) = parent(mount.path(), own).unwrap();
        assert_eq!((path, files.limit), (slice, V2.limit));
    }
}
