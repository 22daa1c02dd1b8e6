//! Data of earlier versions. The server must open it with all its contents.
//!
//! `tests/fixtures/before-crates.tar.gz` holds a data directory after `kill -9`, and a backup. Both
//! were written by the program of 22 November 2026.

use std::{fs, path::Path, process::Command};

use statehouse_tests::{Client, Server, run_in, store::Store};

const FIXTURE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/before-crates.tar.gz");
const GREETING: &str = "001795387407240:00001:StateStore";

/// Unpacks `data` and `backup.state`.
fn unpack(directory: &Path) {
    let mut tar = Command::new("tar");
    let status = tar
        .args(["xzf", FIXTURE, "-C"])
        .arg(directory)
        .status()
        .unwrap();
    assert!(status.success());
}

/// Starts a server on this data directory. The fixture may be newer than the clock of this machine,
/// so the server accepts that clock.
fn serve(data: &Path) -> Server {
    let mut server = Server::restartable(&[("accept_clock", "true")]);
    server.kill();
    let own = server.data_directory();
    fs::remove_dir_all(&own).unwrap();
    fs::rename(data, own).unwrap();
    server.restart();
    server
}

fn assert_keys(store: &mut Store, late: Option<&str>) {
    for number in (1..=40).filter(|number| *number != 7) {
        let value = format!("value {number}").into_bytes();
        assert_eq!(store.get(format!("sensor/{number}")), Some(value));
    }
    assert_eq!(store.get("sensor/7"), None);
    assert_eq!(store.get("large"), Some(vec![b'z'; 100_000]));
    let greeting = store.ask(&["GET", "greeting"]);
    assert_eq!(greeting.version().unwrap().to_string(), GREETING);
    assert_eq!(store.get("late/3"), late.map(|late| late.into()));
    // The fencing token of the lock protects the key for as long as it exists.
    let without_token = store.ask(&["SET", "guarded", "second"]);
    assert!(
        without_token.text().starts_with("-ERR"),
        "{}",
        without_token.text()
    );
}

fn assert_retained(client: &mut Client) {
    client.subscribe("shop/open", 1);
    assert_eq!(client.take_publish("shop/open").payload, b"yes");
}

#[test]
fn data_directory_of_an_earlier_version_opens_unchanged() {
    let directory = tempfile::tempdir().unwrap();
    unpack(directory.path());
    let history = ["history", "greeting", "--data", "data"];
    let history = run_in(directory.path(), &history).code(0);
    history.prints(&["2 changes of greeting"]);
    run_in(directory.path(), &["doctor", "data"]).code(0);
    let server = serve(&directory.path().join("data"));
    let mut store = server.store("reader");
    assert_keys(&mut store, Some("after the backup"));
    assert_retained(&mut store.client);
}

#[test]
fn backup_of_an_earlier_version_restores_unchanged() {
    let directory = tempfile::tempdir().unwrap();
    unpack(directory.path());
    let restore = ["restore", "backup.state", "--data", "restored"];
    run_in(directory.path(), &restore).code(0);
    let server = serve(&directory.path().join("restored"));
    let mut store = server.store("reader");
    assert_keys(&mut store, None);
    assert_retained(&mut store.client);
}
