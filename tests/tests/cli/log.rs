//! The log of a store that nobody reads, or somebody too late: that is no reason for a client to wait.

use std::time::{Duration, Instant};

use statehouse_tests::{Admin, Lines, Server};

/// Lines that found no room so far.
fn dropped(server: &Server) -> u64 {
    let (status, page) = Admin::of(server).ask("GET", "/metrics", b"");
    assert_eq!(status, 200, "{page}");
    let lost = |line: &str| {
        line.strip_prefix("statehouse_log_dropped_total ")?
            .parse()
            .ok()
    };
    page.lines().find_map(lost).unwrap()
}

/// Asks until the pipe is full, and so is all that may wait behind it.
fn fill(server: &Server) {
    // It stands in each line.
    let mut store = server.store(&"x".repeat(200));
    let end = Instant::now() + Duration::from_secs(120);
    while dropped(server) == 0 {
        let asked = [(); 500].map(|()| {
            let request = store.command(&["GET", "key"]);
            (store.client.start(request.publish()), request)
        });
        for (id, request) in asked {
            assert_eq!(store.finish(&request, id).payload(), b"$-1\r\n");
        }
        assert!(Instant::now() < end, "the log takes everything");
    }
}

#[test]
fn requests_are_answered_where_nobody_reads_the_log_and_what_was_dropped_is_told_later() {
    let (mut server, unread) = Server::unheard("", &["--log-filter", "debug"]);
    assert_eq!(dropped(&server), 0);
    fill(&server);
    let mut store = server.store("client");
    store.set("key", "value");
    assert_eq!(store.get("key").as_deref(), Some(&b"value"[..]));

    let log = Lines::follow(unread);
    let told = log.wait(Duration::from_secs(10), |line| {
        line.contains("log lines were dropped")
    });
    let told = told.expect("a line about those that are missing");
    let (_, number) = told.split_once(" dropped=").expect("how many");
    assert!(number.parse::<u64>().unwrap() > 0, "{told}");
    store.set("key", "other");
    server.signal("TERM");
    assert!(server.wait(Duration::from_secs(10)).success());
    // The last words are there.
    log.wait(Duration::from_secs(10), |_| false);
    let last = log.all().pop().unwrap();
    assert!(last.contains("stopped"), "{last}");
}

#[test]
fn an_end_does_not_wait_for_somebody_to_read_the_log() {
    let (mut server, _unread) = Server::unheard("", &["--log-filter", "debug"]);
    fill(&server);
    server.signal("TERM");
    assert!(server.wait(Duration::from_secs(10)).success());
}
