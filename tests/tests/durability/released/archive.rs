//! The archive of a released program: packed, unpacked and made.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::{Value, json};
use statehouse_tests::{Hlc, WallClock, command::finish, run};
use tempfile::TempDir;

use super::{attached, cluster, embedded, fixtures};

/// The unpacked archive of a program.
pub(super) struct Archive {
    directory: TempDir,
    /// What the clients of the program saw.
    pub(super) expected: Value,
}

impl Archive {
    /// Unpacks the archive of a version.
    pub(super) fn of(version: &str) -> Archive {
        let directory = tempfile::tempdir().unwrap();
        let mut tar = Command::new("tar");
        tar.arg("xJf").arg(file(&fixtures(), version));
        tar.arg("-C").arg(directory.path());
        finish(tar, b"").code(0);
        let expected = fs::read(directory.path().join("expected.json")).unwrap();
        let expected: Value = serde_json::from_slice(&expected).unwrap();
        assert_eq!(expected["version"], version);
        Archive {
            directory,
            expected,
        }
    }

    /// Runs every kind of store with the program under test.
    pub(super) fn make() -> Archive {
        let directory = tempfile::tempdir().unwrap();
        let version = run(&["-V"], b"").code(0).text();
        let mut expected = json!({
            "version": version.split_whitespace().nth(1).unwrap(),
            "embedded": embedded::make(directory.path()),
            "attached": attached::make(directory.path()),
            "cluster": cluster::make(directory.path()),
        });
        // Sessions expire after a week, so the archive is opened at this time.
        expected["now_ms"] = Hlc::now(0).wall_ms.into();
        let text = serde_json::to_vec_pretty(&expected).unwrap();
        fs::write(directory.path().join("expected.json"), text).unwrap();
        Archive {
            directory,
            expected,
        }
    }

    /// Writes the archive to a directory, under the name of its version.
    pub(super) fn pack(&self, to: &Path) {
        let version = self.expected["version"].as_str().unwrap();
        let mut tar = Command::new("tar");
        // The same files give the same archive, and holes in files take no room after unpacking.
        tar.args(["--sort=name", "--owner=0", "--group=0", "--sparse", "-cJf"]);
        tar.arg(file(to, version)).arg("-C").arg(self.path("."));
        let names = fs::read_dir(self.path(".")).unwrap();
        let mut names: Vec<_> = names.map(|it| it.unwrap().file_name()).collect();
        names.sort();
        tar.env("XZ_OPT", "-9e").args(names);
        finish(tar, b"").code(0);
    }

    /// The path of a file or directory.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A copy of a data directory, in a new directory.
    pub(super) fn copy(&self, name: &str) -> (TempDir, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let copy = directory.path().join("data");
        copy_all(&self.path(name), &copy);
        (directory, copy)
    }

    /// The wall clock at the time when the archive was made.
    pub(super) fn clock(&self) -> WallClock {
        let clock = WallClock::right();
        clock.set(self.age_ms() / -1000);
        clock
    }

    /// How long ago the archive was made.
    pub(super) fn age_ms(&self) -> i64 {
        let made_ms = self.expected["now_ms"].as_i64().unwrap();
        i64::try_from(Hlc::now(0).wall_ms).unwrap() - made_ms
    }
}

fn file(directory: &Path, version: &str) -> PathBuf {
    directory.join(format!("statehouse-{version}.tar.xz"))
}

/// What is not copied: the address and the secret of a running server, and compiled policies, which
/// fit one version of the engine only.
const OMITTED: [&str; 2] = ["admin", "code"];

/// Copies a data directory of a server that has ended.
pub(super) fn copy_all(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    fs::set_permissions(to, fs::metadata(from).unwrap().permissions()).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        let kind = entry.file_type().unwrap();
        if OMITTED.iter().any(|name| entry.file_name() == *name) {
            continue;
        } else if kind.is_dir() {
            copy_all(&entry.path(), &target);
        } else if kind.is_file() {
            let mut copy = Command::new("cp");
            copy.arg("--sparse=always").arg(entry.path()).arg(&target);
            finish(copy, b"").code(0);
        }
    }
}
