//! Helpers for commands that read the data directory of a running or stopped server.

use std::{
    fs,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use statehouse_tests::{Ran, Server, run_in};

/// Runs a command in a directory, and asserts that it does not panic.
pub(crate) fn run_checked(directory: &Path, arguments: &[&str]) -> Ran {
    let ran = run_in(directory, arguments, b"");
    assert!(!ran.stderr.contains("panicked"), "{ran:#?}");
    ran
}

pub(crate) fn data(server: &Server) -> PathBuf {
    server.directory().join("statehouse-data")
}

/// The newest segment of the log.
pub(crate) fn log(directory: &Path) -> PathBuf {
    files(directory, "log").pop().unwrap()
}

/// Files of one kind, oldest first.
pub(crate) fn files(directory: &Path, kind: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|it| it == kind))
        .collect();
    found.sort();
    found
}

/// The offset of the first occurrence of these bytes in a file.
pub(crate) fn find(path: &Path, needle: &[u8]) -> u64 {
    let content = fs::read(path).unwrap();
    let at = content.windows(needle.len()).position(|it| it == needle);
    at.unwrap_or_else(|| panic!("not in {}", path.display())) as u64
}

/// Flips one bit of the byte at this offset.
pub(crate) fn flip(path: &Path, at: u64) {
    let file = fs::File::options()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
}
