//! Tests the page of metrics of a live store, with the programs that read such pages.

use std::{
    collections::BTreeSet,
    io::{Read, Write},
    net::TcpStream,
    path::Path,
    process::Command,
    thread,
    time::Duration,
};

use serde_json::Value as Json;
use statehouse_tests::{
    Admin, Background, Server, Store, command::finish, policies, prometheus::check_page,
    server::signal, wait::eventually,
};

use crate::policy;

const OPEN_METRICS: &str = "Accept: application/openmetrics-text; version=1.0.0\r\n";

/// The page in the format that the header lines ask for.
fn page(server: &Server, lines: &str) -> String {
    let (status, page) = Admin::of(server).ask_with("GET", "/metrics", lines, b"");
    assert_eq!(status, 200, "{page}");
    page
}

/// A store with one key, and the client that wrote the key.
fn busy() -> (Server, Store) {
    let server = Server::start();
    let mut store = server.store("client");
    store.set("key", "value");
    (server, store)
}

#[test]
fn promtool_accepts_the_page_in_prometheus_format() {
    let (server, _client) = busy();
    let page = page(&server, "");
    check_page(&page);
    for line in [
        "statehouse_keys 1",
        "statehouse_sessions 1",
        "statehouse_messages_in_total 1",
        "statehouse_throttled_total 0",
        "# TYPE statehouse_throttled_total counter",
        "# TYPE process_resident_memory_bytes gauge",
    ] {
        assert!(page.contains(&format!("\n{line}\n")), "{line}: {page}");
    }
    let commands = "statehouse_policy_command_requests_total{policy=\"standard\",version=\"";
    let mut commands = page.lines().filter(|line| line.starts_with(commands));
    let set = commands.find(|line| line.contains("command=\"SET\""));
    assert!(set.is_some_and(|line| line.ends_with("} 1")), "{page}");
    let times = "statehouse_request_seconds_count{command=\"SET\",outcome=\"ok\"} 1";
    assert!(page.contains(times), "{page}");
    for start in OF_EVERY_STORE {
        let is_there = page.lines().any(|line| line.starts_with(start));
        assert!(is_there, "{start}: {page}");
    }
}

/// How further lines of each durable store begin.
const OF_EVERY_STORE: [&str; 27] = [
    "statehouse_request_seconds_bucket{",
    "statehouse_policy_call_seconds_bucket{",
    "statehouse_flush_seconds_bucket{",
    "statehouse_snapshot_seconds_bucket{",
    "statehouse_notification_delay_seconds_bucket{",
    "statehouse_disk_free_bytes ",
    "statehouse_disk_room_bytes ",
    "statehouse_disk_used_bytes{part=\"log\"}",
    "statehouse_disk_used_bytes{part=\"snapshot\"}",
    "statehouse_queue_bytes{queue=\"unreleased\"}",
    "statehouse_queue_bytes{queue=\"unwritten\"}",
    "statehouse_queue_bytes{queue=\"sessions\"}",
    "statehouse_remembered 1",
    "statehouse_watches 0",
    "statehouse_memory_bytes{owner=\"table\"}",
    "statehouse_memory_bytes{owner=\"watches\"}",
    "statehouse_memory_bytes{owner=\"remembered\"}",
    "statehouse_memory_bytes{owner=\"policies\"}",
    "statehouse_memory_bytes{owner=\"sessions\"}",
    "statehouse_memory_bytes{owner=\"retained\"}",
    "process_cpu_seconds_total ",
    "process_resident_memory_bytes ",
    "process_open_fds ",
    "process_max_fds ",
    "process_start_time_seconds ",
    "statehouse_build_info{version=\"",
    "statehouse_refused_total{cause=\"malformed\"} 0",
];

#[test]
fn outcomes_failures_and_counters_of_policies_are_counted() {
    let server = Server::with("max_keys = 1\n", &[]);
    let mut store = server.store("client");
    let set = store.command(&["SET", "key", "value"]);
    let mut publish = set.publish();
    for dup in [false, true] {
        publish.dup = dup;
        let packet_id = store.client.start(publish.clone());
        assert_eq!(store.finish(&set, packet_id).text(), "+OK\\r\\n");
    }
    let full = store.ask(&["SET", "other", "value"]);
    assert_eq!(full.text(), "-ERR the quota has been exceeded\\r\\n");
    let empty = store.ask(&["SET", "", "value"]);
    assert_eq!(empty.text(), "-ERR the key length is zero\\r\\n");
    policy(&server, &["load", policies::faulty()]).code(0);
    policy(&server, &["promote", "faulty"]).code(0);
    let failed = store.ask(&["SET", "key", "panic"]);
    assert_eq!(failed.text(), "-ERR internal error\\r\\n");
    let page = page(&server, "");
    check_page(&page);
    for outcome in ["ok", "duplicate", "refused", "error", "failed"] {
        let line = format!("\",outcome=\"{outcome}\"}} 1");
        let times = "statehouse_request_seconds_count{command=\"";
        let mut lines = page.lines().filter(|it| it.starts_with(times));
        assert!(lines.any(|it| it.ends_with(&line)), "{outcome}: {page}");
    }
    for (name, label) in [
        ("errors", "error=\"the key length is zero\""),
        ("call_failures", "kind=\"trap\""),
        ("count", "name=\"configured\""),
    ] {
        let start = format!("statehouse_policy_{name}_total{{policy=\"");
        let mut lines = page.lines().filter(|it| it.starts_with(&start));
        let is_counted = lines.any(|it| it.contains(label) && !it.ends_with("} 0"));
        assert!(is_counted, "{label}: {page}");
    }
}

#[test]
fn reference_parser_accepts_the_page_in_openmetrics_format() {
    let (server, _client) = busy();
    let page = page(&server, OPEN_METRICS);
    assert!(page.ends_with("\n# EOF\n"), "{page}");
    let samples = page.lines().filter(|line| !line.starts_with('#'));
    let names = samples.clone().map(|line| line.rsplit_once(' ').unwrap().0);
    let distinct: BTreeSet<&str> = names.collect();
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut python = Command::new(tests.join("../target/venv/bin/python"));
    python.arg(tests.join("tests/admin/openmetrics.py"));
    let ran = finish(python, page.as_bytes()).code(0);
    assert_eq!(ran.text(), format!("{}\n", distinct.len()));
    assert_eq!(samples.count(), distinct.len());
}

#[test]
fn metrics_listener_answers_metrics_and_probes_only() {
    let server = Server::with("", &["--metrics", "127.0.0.1:0"]);
    let address = Admin::open_to_all(&server.metrics_address());
    let (status, page) = address.ask("GET", "/metrics", b"");
    assert_eq!(status, 200, "{page}");
    assert!(page.contains("\nstatehouse_keys 0\n"), "{page}");
    for probe in ["/livez", "/readyz"] {
        for (method, body) in [("GET", "{}"), ("HEAD", "")] {
            let answer = address.ask(method, probe, b"");
            assert_eq!(answer, (200, body.to_owned()), "{method} {probe}");
        }
    }
    let large = vec![0_u8; 8 << 20];
    for (method, path, body) in [
        ("GET", "/v1/policies", &b""[..]),
        ("GET", "/v1/slow", b""),
        ("GET", "/", b""),
        ("POST", "/metrics", b""),
        ("POST", "/v1/rollback", b""),
        ("POST", "/v1/policies", &large),
    ] {
        let (status, answer) = address.ask(method, path, body);
        assert_eq!(status, 404, "{method} {path}: {answer}");
    }
}

/// Sends a request from this address of loopback, and leaves the connection open. Returns the
/// status of the answer.
fn hold_from(from: [u8; 4], address: &str) -> (TcpStream, u16) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let mut stream = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind((from, 0).into()).unwrap();
        let connected = socket.connect(address.parse().unwrap()).await.unwrap();
        connected.into_std().unwrap()
    });
    stream.set_nonblocking(false).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    stream
        .write_all(b"HEAD /metrics HTTP/1.1\r\nHost: metrics\r\n\r\n")
        .unwrap();
    let mut start = [0; "HTTP/1.1 200".len()];
    stream.read_exact(&mut start).unwrap();
    let status = str::from_utf8(&start[9..]).unwrap().parse().unwrap();
    (stream, status)
}

#[test]
fn one_address_cannot_take_all_connections_for_metrics() {
    const OTHER: [u8; 4] = [127, 0, 0, 2];
    let server = Server::with("", &["--metrics", "127.0.0.1:0"]);
    let address = &server.metrics_address();
    let held: Vec<_> = (0..32).map(|_| hold_from(OTHER, address)).collect();
    let admitted = held.iter().filter(|(_, status)| *status == 200);
    assert_eq!(admitted.count(), 8);
    let other = Admin::open_to_all(address);
    assert_eq!(other.ask("GET", "/metrics", b"").0, 200);
    assert_eq!(server.refused("administer"), 24);
    let line = server.wait_for_log("this address has too many connections");
    assert!(line.contains("127.0.0.2"), "{line}");
    drop(held);
    eventually("the address may connect again", || {
        (hold_from(OTHER, address).1 == 200).then_some(())
    });
}

/// With a commit delay each write takes some milliseconds, however fast the disk is.
#[test]
fn slow_requests_show_where_their_time_went() {
    let settings = "slow_threshold = \"4ms\"\ncommit_delay = \"5ms\"\n";
    let server = Server::with(settings, &[]);
    let mut store = server.store("press-4");
    let list = |arguments: &[&str]| {
        let all = [&["slow"], arguments].concat();
        server.run(&all).code(0).text()
    };
    // The request is listed after its response has left. One that shares the flush of a request
    // before it waits for less than the commit delay.
    let (json, set) = eventually("a SET is listed", || {
        store.set("pressure", "7");
        let json: Json = serde_json::from_str(&list(&["--json"])).unwrap();
        let requests = json["requests"].as_array()?;
        let set = requests.iter().find(|it| it["command"] == "SET")?.clone();
        Some((json, set))
    });
    assert_eq!(json["threshold_us"], 4_000);
    assert_eq!(set["client"], "press-4");
    assert_eq!(set["key"], "pressure");
    assert_eq!(set["outcome"], "ok");
    let part = |name: &str| set[name].as_u64().unwrap();
    assert!(part("flush_us") >= 4_000, "{set}");
    let parts = ["queue_us", "policy_us", "flush_us", "socket_us"].map(part);
    let sum: u64 = parts.iter().sum();
    assert!((sum..=sum + 4).contains(&part("total_us")), "{set}");
    assert!(set["policy"].as_str().unwrap().starts_with("standard@"));
    let table = list(&[]);
    let row = table.lines().find(|line| line.contains(" SET "));
    assert!(row.unwrap().contains("pressure"), "{table}");
    assert_eq!(
        server.metric("slow_requests_total"),
        json["next"].as_u64().unwrap()
    );
    let next = format!("/v1/slow?from={}", json["next"]);
    let none = Admin::of(&server).done("GET", &next, b"");
    assert_eq!(none["requests"].as_array().unwrap().len(), 0, "{none}");
}

#[test]
fn following_slow_requests_says_once_that_there_are_none() {
    let server = Server::start();
    let mut command = statehouse_tests::command(&["slow", "--follow"]);
    let mut following = Background::start(command.current_dir(server.directory()));
    following.wait_for("no request took");
    // It asks once a second.
    thread::sleep(Duration::from_millis(2500));
    assert_eq!(following.lines.all().len(), 1);
    signal(following.child.id(), "INT");
    assert_eq!(following.child.wait().unwrap().code(), Some(0));
}
