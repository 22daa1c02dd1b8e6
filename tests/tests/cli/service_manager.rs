//! What a service manager is told, over a socket as systemd makes it.

use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::{Duration, Instant};

use statehouse_tests::{Server, binary, client::PATIENCE};

/// Reads until something begins with one of these lines.
fn wait_for(manager: &UnixDatagram, line: &str) -> String {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        let mut datagram = [0; 1000];
        let length = manager.recv(&mut datagram).expect("nothing was said");
        let said = String::from_utf8_lossy(&datagram[..length]).into_owned();
        if said.lines().any(|it| it == line) {
            return said;
        }
    }
    panic!("{line} was not said");
}

#[test]
fn a_service_manager_hears_that_the_store_is_ready_lives_and_stops() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = Command::new(binary::statehouse());
    command
        .args(["serve", "--listen", "127.0.0.1:0"])
        .env("NOTIFY_SOCKET", &path)
        .env("WATCHDOG_USEC", "200000");
    let server = Server::spawn(command, directory);
    assert!(wait_for(&manager, "READY=1").contains("STATUS="));
    let first = Instant::now();
    for _ in 0..4 {
        let said = wait_for(&manager, "WATCHDOG=1");
        assert!(said.contains("STATUS=0 keys, 0 requests"), "{said}");
    }
    assert!(
        first.elapsed() > Duration::from_millis(150),
        "twice in each interval, not more"
    );
    server.signal("TERM");
    wait_for(&manager, "STOPPING=1");
}

#[test]
fn a_manager_that_is_not_there_stops_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(binary::statehouse());
    command
        .args(["serve", "--listen", "127.0.0.1:0"])
        .env("NOTIFY_SOCKET", directory.path().join("nowhere"));
    let server = Server::spawn(command, directory);
    server.wait_for_log("NOTIFY_SOCKET");
}
