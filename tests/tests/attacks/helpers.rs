//! Tests the helpers of the attacks on an idle, a stopped and a killed server.

use std::{thread, time::Duration};

use statehouse_tests::{Server, Victim, attack};

#[test]
fn victim_of_an_idle_server_has_no_failures() {
    let server = Server::start();
    let victim = Victim::start(server.address());
    let calm = victim.undisturbed(Duration::from_millis(300));
    assert_eq!(calm.failures(), 0, "{calm}");
    assert!(calm.count() >= 3, "{calm}");
    assert!(
        calm.p50() <= calm.p99() && calm.p99() <= calm.max(),
        "{calm}"
    );
}

#[test]
fn victim_of_a_stopped_server_counts_the_stall() {
    let stall = Duration::from_millis(500);
    let server = Server::start();
    let victim = Victim::start(server.address());
    let (during, ()) = victim.during(|| {
        server.signal("STOP");
        thread::sleep(stall);
        server.signal("CONT");
    });
    assert_eq!(during.failures(), 0, "{during}");
    assert!(
        during.max() >= stall - Duration::from_millis(50),
        "{during}"
    );
    assert!(
        during.count() >= 50,
        "a stall counts as many requests: {during}"
    );
}

#[test]
fn victim_of_a_killed_server_counts_failures_and_returns() {
    let mut server = Server::restartable(&[]);
    let victim = Victim::start(server.address());
    let (during, restart) = victim.during(|| attack::restart(&mut server));
    assert!(during.failures() > 0, "{during}");
    assert!(restart > Duration::ZERO);
    let after = victim.undisturbed(Duration::from_millis(300));
    assert!(after.count() > 0, "{after}");
    assert_eq!(after.failures(), 0, "{after}");
}

#[test]
fn limited_server_is_measured_and_restarts_in_its_limit() {
    let Some(mut server) = Server::limited(512) else {
        return;
    };
    server.store("client").set("key", "value");
    for _ in 0..2 {
        let cgroup = server.cgroup().unwrap();
        assert_eq!(cgroup.oom_kills(), 0);
        let peak_kib = cgroup.peak_kib();
        assert!(peak_kib > 0 && peak_kib <= 512 * 1024, "{peak_kib} KiB");
        assert!(server.memory_kib() <= server.memory_peak_kib());
        attack::restart(&mut server);
    }
    assert_eq!(server.store("client").get("key"), Some(b"value".to_vec()));
}

#[test]
fn process_beyond_the_limit_is_killed_and_counted() {
    let Some(cgroup) = statehouse_tests::Cgroup::with_limit(16) else {
        return;
    };
    // `tail` keeps the last line, and there is no other.
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "head -c 67108864 /dev/zero | tail"]);
    let status = cgroup.enter(&shell).status().unwrap();
    assert!(!status.success());
    // The kernel may kill the shell as well.
    assert!(cgroup.oom_kills() >= 1);
    assert!(cgroup.peak_kib() <= 16 * 1024);
}
