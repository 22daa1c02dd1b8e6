//! Runs commands on the data directory of a server: beside it, or after its end.

use std::{
    fs,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::Duration,
};

use serde_json::Value;
use statehouse_tests::{Ran, Server, run_in};

/// Runs a command where the server's data directory is the default.
pub(crate) fn look(server: &Server, arguments: &[&str]) -> Ran {
    look_in(server.directory(), arguments)
}

/// The same in any directory.
pub(crate) fn look_in(directory: &Path, arguments: &[&str]) -> Ran {
    let ran = run_in(directory, arguments, b"");
    assert!(!ran.stderr.contains("panicked"), "{ran:#?}");
    ran
}

/// A JSON object a line.
pub(crate) fn objects(ran: &Ran) -> Vec<Value> {
    let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|e| panic!("{line}: {e}"));
    ran.text().lines().map(parse).collect()
}

/// The one JSON object.
pub(crate) fn object(ran: &Ran) -> Value {
    let [object] = &objects(ran)[..] else {
        panic!("not one object: {ran:#?}");
    };
    object.clone()
}

/// Stops a server as an operator does.
pub(crate) fn stop(server: &mut Server) {
    server.signal("TERM");
    assert_eq!(server.wait(Duration::from_secs(20)).code(), Some(0));
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

/// Where these bytes stand in a file, the first time.
pub(crate) fn find(path: &Path, needle: &[u8]) -> u64 {
    let content = fs::read(path).unwrap();
    let at = content.windows(needle.len()).position(|it| it == needle);
    at.unwrap_or_else(|| panic!("not in {}", path.display())) as u64
}

/// Changes one bit.
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
