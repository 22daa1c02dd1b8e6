//! Tests notifications to a service manager over a socket like that of systemd.

use std::{
    fs,
    io::Write,
    os::linux::net::SocketAddrExt,
    os::unix::net::{SocketAddr, UnixDatagram},
    path::{Path, PathBuf},
    process::{self, Command},
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{Background, Server, binary, client::PATIENCE};

/// A service manager with a socket in this directory. Returns also its path.
fn manager(directory: &Path) -> (UnixDatagram, PathBuf) {
    let path = directory.join("notify");
    let manager = UnixDatagram::bind(&path).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    (manager, path)
}

/// A store that notifies this socket.
fn serve(notify: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(binary::statehouse());
    command
        .arg("serve")
        .args(arguments)
        .env("NOTIFY_SOCKET", notify)
        .env("WATCHDOG_USEC", "200000");
    command
}

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
    let (manager, path) = manager(directory.path());
    let command = serve(&path, &["--listen", "127.0.0.1:0"]);
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

/// Regression: such a name was taken for a path.
#[test]
fn service_manager_with_an_abstract_socket_is_notified() {
    let name = format!("statehouse-notify-{}", process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let manager = UnixDatagram::bind_addr(&address).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let path = PathBuf::from(format!("@{name}"));
    let command = serve(&path, &["--listen", "127.0.0.1:0"]);
    let _server = Server::spawn(command, tempfile::tempdir().unwrap());
    assert!(wait_for(&manager, "READY=1").contains("STATUS="));
    wait_for(&manager, "WATCHDOG=1");
}

/// A store behind a broker that is down, in a directory with a file `password`.
fn attaching(directory: &Path, notify: &Path) -> Command {
    fs::write(directory.join("password"), "secret").unwrap();
    let mut command = serve(notify, &["--broker", "mqtt://store@127.0.0.1:1"]);
    command
        .args(["--broker-password-file", "password"])
        .current_dir(directory);
    command
}

/// Regression: a service manager killed a healthy store while its broker was down.
#[test]
fn store_is_started_before_its_broker_answers() {
    let directory = tempfile::tempdir().unwrap();
    let (manager, path) = manager(directory.path());
    let store = Background::start(&mut attaching(directory.path(), &path));
    for line in ["READY=1", "WATCHDOG=1"] {
        let notification = wait_for(&manager, line);
        let status = "STATUS=no connection to the broker; 0 keys, 0 requests";
        assert!(notification.contains(status), "{notification}");
    }
    assert!(!store.lines.all().contains(&"ready".to_owned()));
}

/// The same for a host of a cluster whose etcd is down.
#[test]
fn host_is_started_before_etcd_answers() {
    let directory = tempfile::tempdir().unwrap();
    let (manager, path) = manager(directory.path());
    let mut command = serve(&path, &["--listen", "127.0.0.1:0"]);
    command
        .args(["--cluster", "http://127.0.0.1:1"])
        .args(["--cluster-listen", "127.0.0.1:0"])
        .current_dir(directory.path());
    let _host = Background::start(&mut command);
    assert!(wait_for(&manager, "READY=1").contains("STATUS=waiting for etcd at "));
    for _ in 0..3 {
        wait_for(&manager, "WATCHDOG=1");
    }
}

/// A standby is ready while it waits, so a service manager would kill it without these
/// notifications. Regression: they ended with the wait, and a long recovery was killed.
#[test]
fn standby_notifies_the_watchdog_until_it_serves() {
    let mut active = Server::start();
    let (manager, path) = manager(active.directory());
    let mut command = attaching(active.directory(), &path);
    let _standby = Background::start(command.arg("--standby"));
    assert!(wait_for(&manager, "READY=1").contains("standby: "));
    for _ in 0..3 {
        wait_for(&manager, "WATCHDOG=1");
    }

    // The takeover reads this file again, and takes as long as the pipe is empty.
    let password = active.directory().join("password");
    fs::remove_file(&password).unwrap();
    let made = Command::new("mkfifo").arg(&password).status();
    assert!(made.unwrap().success());
    active.stop();
    // Returns when the standby reads the file.
    let mut pipe = fs::OpenOptions::new().write(true).open(&password).unwrap();
    manager.set_nonblocking(true).unwrap();
    while manager.recv(&mut [0; 1000]).is_ok() {}
    manager.set_nonblocking(false).unwrap();
    for _ in 0..3 {
        wait_for(&manager, "WATCHDOG=1");
    }
    fs::remove_file(&password).unwrap();
    fs::write(&password, "secret").unwrap();
    pipe.write_all(b"secret").unwrap();
    drop(pipe);
    wait_for(&manager, "READY=1");
}

/// Regression: a store stopped working when the manager did not read the notifications.
#[test]
fn manager_that_reads_late_delays_only_its_notifications() {
    let directory = tempfile::tempdir().unwrap();
    let (manager, path) = manager(directory.path());
    // A sender has room for fewer datagrams than a receiver may have.
    let fill = || {
        let sender = UnixDatagram::unbound().unwrap();
        sender.set_nonblocking(true).unwrap();
        (0..)
            .take_while(|_| sender.send_to(b"", &path).is_ok())
            .count()
    };
    while fill() > 0 {}
    let command = serve(&path, &["--listen", "127.0.0.1:0", "--threads", "1"]);
    let mut server = Server::spawn(command, directory);
    server.wait_for_log("does not read the socket that NOTIFY_SOCKET names");
    server.store("client").set("key", "value");
    assert!(wait_for(&manager, "READY=1").contains("STATUS="));
    wait_for(&manager, "WATCHDOG=1");
    while fill() > 0 {}
    server.signal("TERM");
    assert_eq!(server.wait(PATIENCE).code(), Some(0));
}

/// Regression: each notification of the watchdog logged the same failure.
#[test]
fn missing_service_manager_is_logged_once_and_delays_no_start() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("notify");
    let command = serve(&path, &["--listen", "127.0.0.1:0"]);
    let server = Server::spawn(command, directory);
    server.wait_for_log("NOTIFY_SOCKET");
    // Some notifications fail.
    thread::sleep(Duration::from_millis(500));
    let (manager, _) = manager(server.directory());
    wait_for(&manager, "WATCHDOG=1");
    let logged = server.stderr();
    let logged = logged.iter().filter(|it| it.contains("NOTIFY_SOCKET"));
    assert_eq!(logged.count(), 1);
}
