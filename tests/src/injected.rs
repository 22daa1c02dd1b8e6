//! A library that is loaded into a process before the C library, and a number with which a test
//! controls it.

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::PathBuf,
    process::Command,
};

use tempfile::TempDir;

/// A compiled library and its number, for a process and its restarts.
pub struct Injected {
    directory: TempDir,
}

impl Injected {
    /// Compiles the library with the C compiler that links Rust programs. Its source follows
    /// `injected.c`, which declares `number`; that is 0 at first.
    pub fn build(source: &str) -> Injected {
        let injected = Injected {
            directory: tempfile::tempdir().unwrap(),
        };
        let file = injected.path("library.c");
        fs::write(&file, [include_str!("injected.c"), source].concat()).unwrap();
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .args([injected.path("library.so"), file])
            .output()
            .unwrap_or_else(|error| panic!("cannot run the C compiler cc: {error}"));
        let said = String::from_utf8_lossy(&built.stderr);
        assert!(built.status.success(), "the library was not built: {said}");
        fs::write(injected.path("number"), [0; 8]).unwrap();
        injected
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub fn environment(&self) -> [(&'static str, String); 2] {
        let text = |name| self.path(name).into_os_string().into_string().unwrap();
        [
            ("LD_PRELOAD", text("library.so")),
            ("INJECTED_NUMBER", text("number")),
        ]
    }

    pub fn set(&self, number: i64) {
        // In place: the process has mapped the file.
        let file = File::options().write(true).open(self.path("number"));
        let written = file.unwrap().write_all_at(&number.to_ne_bytes(), 0);
        written.unwrap();
    }
}
