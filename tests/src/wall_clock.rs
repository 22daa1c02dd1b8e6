//! A wall clock of one process that a test can set. A library that is loaded before the C library
//! shifts CLOCK_REALTIME; the monotonic clocks must stay right, as they do on a machine whose clock
//! is set.
//!
//! libfaketime does not fit: with right monotonic clocks its `clock_nanosleep` refuses absolute
//! times, and each process that is killed leaves files in `/dev/shm`.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::PathBuf,
    process::Command,
};

use tempfile::TempDir;

/// The library.
const SOURCE: &str = include_str!("wall_clock.c");

/// The wall clock of a process and its restarts.
pub struct WallClock {
    directory: TempDir,
}

impl WallClock {
    /// Compiles the library with the C compiler that links Rust programs. The clock is right.
    pub fn right() -> WallClock {
        let clock = WallClock {
            directory: tempfile::tempdir().unwrap(),
        };
        let source = clock.path("wall_clock.c");
        fs::write(&source, SOURCE).unwrap();
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .args([clock.path("wall_clock.so"), source])
            .output()
            .unwrap_or_else(|error| panic!("cannot run the C compiler cc: {error}"));
        let said = String::from_utf8_lossy(&built.stderr);
        assert!(built.status.success(), "the library was not built: {said}");
        fs::write(clock.path("offset"), [0; 8]).unwrap();
        clock
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The environment of the process.
    pub fn environment(&self) -> [(&'static str, String); 2] {
        let text = |name| self.path(name).into_os_string().into_string().unwrap();
        [
            ("LD_PRELOAD", text("wall_clock.so")),
            ("WALL_CLOCK_OFFSET", text("offset")),
        ]
    }

    /// Sets the clock this many seconds ahead, or behind if negative.
    pub fn set(&self, offset_s: i64) {
        // In place: the process has mapped the file.
        let file = File::options().write(true).open(self.path("offset"));
        let written = file.unwrap().write_all_at(&offset_s.to_ne_bytes(), 0);
        written.unwrap();
    }
}
