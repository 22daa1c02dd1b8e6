//! Tests notifications to a service manager over a socket like that of systemd.

use std::os::unix::net::UnixDatagram;
use std::process::Command;
use std::time::{Duration, Instant};

use statehouse_tests::{Background, Server, binary, client::PATIENCE};

/// Waits for a notification that contains this line. Returns the notification.
fn wait_for(manager: &UnixDatagram, line: &str) -> String {
    let begun = Instant::now();
    while begun.elapsed() < PATIENCE {
        let mut datagram = [0; 1000];
        let length = manager.recv(&mut datagram).expect("no notification");
        let received = String::from_utf8_lossy(&datagram[..length]).into_owned();
        if received.lines().any(|it| it == line) {
            return received;
        }
    }
    panic!("no notification contains {line}");
}

#[test]
fn service_manager_is_notified_of_start_watchdog_and_stop() {
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
        let notification = wait_for(&manager, "WATCHDOG=1");
        let status = "STATUS=0 keys, 0 requests";
        assert!(notification.contains(status), "{notification}");
    }
    assert!(
        first.elapsed() > Duration::from_millis(150),
        "more than two notifications in an interval"
    );
    server.signal("TERM");
    wait_for(&manager, "STOPPING=1");
}

/// A standby is ready while it waits, so a service manager would kill it without these
/// notifications.
#[test]
fn waiting_standby_notifies_the_watchdog() {
    let active = Server::start();
    let path = active.directory().join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = Command::new(binary::statehouse());
    command
        .args(["serve", "--broker", "mqtt://127.0.0.1:1", "--standby"])
        .current_dir(active.directory())
        .env("NOTIFY_SOCKET", &path)
        .env("WATCHDOG_USEC", "30000000");
    let _standby = Background::start(&mut command);
    assert!(wait_for(&manager, "READY=1").contains("standby: "));
    for _ in 0..3 {
        wait_for(&manager, "WATCHDOG=1");
    }
}

#[test]
fn missing_service_manager_does_not_prevent_the_start() {
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new(binary::statehouse());
    command
        .args(["serve", "--listen", "127.0.0.1:0"])
        .env("NOTIFY_SOCKET", directory.path().join("nowhere"));
    let server = Server::spawn(command, directory);
    server.wait_for_log("NOTIFY_SOCKET");
}
