//! Start on unusual data directories. The server must refuse an unusable or damaged directory with
//! an error text, and must accept one that only a crash has touched.

use std::{
    fs::{self, File},
    net::TcpListener,
    os::unix::fs::{FileExt, PermissionsExt},
    path::{Path, PathBuf},
};

use statehouse_tests::{Ran, Server, files::of_kind, run_in};

/// The segments of the log, oldest first.
fn segments(server: &Server) -> Vec<PathBuf> {
    of_kind(&server.data_directory(), "log")
}

/// Starts the server, which must exit in time and without a panic.
fn refuses(server: &Server) -> Ran {
    serve_in(server.directory(), "statehouse-data")
}

fn serve_in(directory: &Path, data: &str) -> Ran {
    let arguments = ["serve", "--listen", "127.0.0.1:0", "--data", data];
    let ran = run_in(directory, &arguments).code(2);
    assert!(!ran.text().contains("ready"), "{ran:?}");
    assert!(!ran.stderr.contains("panicked"), "{ran:?}");
    ran
}

#[test]
fn directory_in_use_is_refused_until_its_process_ends() {
    let mut server = Server::restartable(&[]);
    let mut store = server.store("client");
    let version = store.set("key", "value");
    refuses(&server)
        .says("statehouse-data")
        .says("in use by another process");
    // The first process continues, and even a kill releases the directory.
    assert_eq!(store.ask(&["GET", "key"]).version(), Some(version));
    server.kill_and_restart();
}

#[test]
fn unwritable_directory_is_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("a file"), "").unwrap();
    serve_in(directory.path(), "a file").says("a file");
    serve_in(directory.path(), "a file/below").says("a file");
    // Not even root can write here.
    serve_in(directory.path(), "/proc/statehouse-data").says("/proc/statehouse-data");
    let closed = directory.path().join("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o500)).unwrap();
    // Permissions do not stop root.
    if File::create(closed.join("probe")).is_err() {
        serve_in(directory.path(), "closed").says("closed");
    }
}

/// Regression: systemd repeats such a start every second, and each one wrote segments of the log.
#[test]
fn start_without_an_address_for_operators_writes_no_log() {
    let directory = tempfile::tempdir().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for option in ["--admin", "--metrics"] {
        let serve = ["serve", "--listen", "127.0.0.1:0", option, &address];
        run_in(directory.path(), &serve).fails(3, &address);
    }
    let files = fs::read_dir(directory.path().join("statehouse-data")).unwrap();
    let names: Vec<_> = files.map(|it| it.unwrap().file_name()).collect();
    assert_eq!(names, ["lock"]);
}

/// The server creates a missing directory with its parents. Other users must not be able to read
/// it.
#[test]
fn missing_directory_is_created_for_its_user_only() {
    let mut server = Server::restartable(&[("data", "not/yet/there")]);
    server.store("client").set("key", "value");
    let created = server.directory().join("not/yet/there");
    assert_eq!(
        fs::metadata(&created).unwrap().permissions().mode() & 0o077,
        0
    );
    server.kill_and_restart();
    assert_eq!(server.store("client").get("key"), Some(b"value".to_vec()));
}

/// Durable data that has changed since is damage and no torn write. The server must not guess or
/// drop anything.
#[test]
fn flipped_byte_in_the_log_is_refused_with_its_file() {
    let mut server = Server::restartable(&[]);
    let mut store = server.store("client");
    for n in 0..100 {
        store.set(format!("key {n}"), "a value that stands in the log");
    }
    server.kill();
    let path = segments(&server).remove(0);
    let log = fs::read(&path).unwrap();
    let needle = b"a value that stands in the log";
    let found: Vec<usize> = log
        .windows(needle.len())
        .enumerate()
        .filter_map(|(at, window)| (window == needle).then_some(at))
        .collect();
    assert!(found.len() >= 100, "{} values in the log", found.len());
    let file = File::options().write(true).open(&path).unwrap();
    for at in [found[0], found[found.len() / 2]] {
        file.write_all_at(&[log[at] ^ 0x40], at as u64).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap();
        let ran = refuses(&server).says("statehouse-data").says(name);
        assert!(ran.stderr.len() > 60, "no explanation: {ran:?}");
        file.write_all_at(&[log[at]], at as u64).unwrap();
    }
    // The refused starts changed nothing, so the repaired directory is complete.
    server.restart();
    let mut store = server.store("client");
    for n in 0..100 {
        assert_eq!(store.get(format!("key {n}")).unwrap(), needle);
    }
}

/// A write that a power cut tore was never acknowledged. The server drops it and logs that.
#[test]
fn torn_tail_of_the_log_is_dropped_and_logged() {
    let mut server = Server::restartable(&[]);
    let mut store = server.store("client");
    let version = store.set("kept", "value");
    store.set("torn", "a value that stands in the log");
    server.kill();
    let path = segments(&server).pop().unwrap();
    let log = fs::read(&path).unwrap();
    let needle = b"a value that stands in the log";
    let at = log.windows(needle.len()).position(|w| w == needle).unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    // Zeroes the rest, as in a segment that was not written to yet.
    file.write_all_at(&vec![0; log.len() - at - 7], (at + 7) as u64)
        .unwrap();
    server.restart();
    server.wait_for_log("dropped a write that was never acknowledged");
    let mut store = server.store("client");
    assert_eq!(store.ask(&["GET", "kept"]).version(), Some(version));
    assert_eq!(store.get("torn"), None);
    store.set("torn", "again");
    server.kill_and_restart();
    assert_eq!(server.store("client").get("torn"), Some(b"again".to_vec()));
}

/// The server must not take a log without its beginning for a new directory.
#[test]
fn missing_segment_is_refused() {
    let mut server = Server::restartable(&[]);
    let mut store = server.store("client");
    let large = vec![b'x'; 900_000];
    for n in 0..12 {
        store.set(format!("key {n}"), &large);
    }
    server.kill();
    let all = segments(&server);
    assert!(all.len() >= 3, "{all:?}");
    for missing in [&all[0], &all[1]] {
        let aside = server.directory().join("aside");
        fs::rename(missing, &aside).unwrap();
        let ran = refuses(&server).says("statehouse-data");
        assert!(ran.stderr.len() > 60, "no explanation: {ran:?}");
        fs::rename(&aside, missing).unwrap();
    }
    server.restart();
    let mut store = server.store("client");
    for n in 0..12 {
        assert_eq!(store.get(format!("key {n}")).unwrap(), large);
    }
}
