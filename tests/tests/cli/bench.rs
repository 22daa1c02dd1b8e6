//! Tests `statehouse bench` with short runs against a real server. Its counts must agree with those
//! of the server; no test asserts speed.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use serde_json::Value;
use statehouse_tests::{
    Background, Mosquitto, Ran, Server, assert_contains,
    client::PATIENCE,
    command,
    command::finish,
    run,
    server::{signal, wait},
    wait::until,
};

/// A run of one second with 100 keys, unless the options say otherwise.
fn bench_command(port: u16, options: &str) -> Command {
    let mut bench = command(&["bench", "--port", &port.to_string()]);
    for (name, default) in [
        ("--warm-up", "200ms"),
        ("--keys", "100"),
        ("--duration", "1s"),
    ] {
        if !options.contains(name) {
            bench.args([name, default]);
        }
    }
    bench.args(options.split_whitespace());
    bench
}

fn bench(port: u16, options: &str) -> Ran {
    finish(bench_command(port, options), b"")
}

/// Runs the benchmark with `--json`. Returns the figures too.
fn figures(server: &Server, name: &str, options: &str) -> (Ran, Value) {
    let path = server.directory().join(name);
    let options = format!("--json {} {options}", path.display());
    (bench(server.port(), &options), json(&path))
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("no number: {value}"))
}

/// Asserts that every measured request was answered, and that all counts agree.
fn assert_counts_agree(run: &Value) {
    let (requests, answered) = (number(&run["requests"]), number(&run["answered"]));
    assert!(answered > 0, "{run}");
    assert_eq!(requests, answered + number(&run["failed"]), "{run}");
    assert_eq!(run["errors"], serde_json::json!({}), "{run}");
    let latency = &run["latency_us"];
    let (get, set) = (&latency["get"], &latency["set"]);
    assert_eq!(
        number(&get["count"]) + number(&set["count"]),
        answered,
        "{run}"
    );
    assert_eq!(number(&latency["all"]["count"]), answered, "{run}");
    let times = ["p50", "p99", "p99.9", "max"].map(|it| latency["all"][it].as_f64().unwrap());
    assert!(times.is_sorted() && times[0] > 1.0, "{run}");
    let rate = run["requests_per_second"].as_f64().unwrap();
    assert!(rate > 0.0, "{run}");
    let all = &run["with_warm_up"];
    assert_eq!(all["sent"], all["replied"], "{run}");
    assert!(number(&all["sent"]) >= requests, "{run}");
}

#[test]
fn closed_loop_counts_agree_with_the_server() {
    let server = Server::start();
    let before = server.metric("requests_total");
    let (ran, it) = figures(&server, "closed.json", "--connections 8 --in-flight 4");
    let ran = ran.code(0);
    let run = &it["runs"][0];
    assert_counts_agree(run);
    assert_eq!(run["connections"], 8);
    assert_eq!(run["rate"], Value::Null);
    assert_eq!(number(&run["misses"]), 0, "the fill sets all keys");
    // The fill sets every key before the run, and the cleanup removes every key after it.
    let asked = number(&run["with_warm_up"]["sent"]) + 2 * 100;
    assert_eq!(server.metric("requests_total") - before, asked);
    assert_eq!(server.metric("keys"), 0);
    assert_eq!(it["process"]["pid"], server.pid());
    assert!(number(&run["server"]["resident_bytes"]) > 1 << 20);
    let text = ran.text();
    assert_contains!(
        text,
        "closed loop",
        "8 connections, 4 in flight on each",
        "requests/s",
        "p99.9 us",
        "GET ",
        "SET ",
        "us of CPU per request",
        "MB resident"
    );
}

/// Regression: the fill, which has more requests in flight, was refused.
#[test]
fn server_with_few_requests_in_flight_is_measured() {
    let server = Server::with_config("max_client_in_flight = 10\n");
    let (ran, it) = figures(&server, "few.json", "--connections 2 --in-flight 10");
    ran.code(0);
    assert_counts_agree(&it["runs"][0]);
    assert_eq!(server.metric("keys"), 0);
    bench(server.port(), "--connections 2 --in-flight 11").fails(
        2,
        "accepts 10 requests in flight per connection, but 11 were requested",
    );
    assert_eq!(server.metric("keys"), 0);
}

#[test]
fn open_loop_sends_at_the_given_rate() {
    let server = Server::start();
    let (ran, it) = figures(
        &server,
        "open.json",
        "--rate 500 --connections 10 --reads 100 --keep",
    );
    ran.code(0);
    let run = &it["runs"][0];
    assert_counts_agree(run);
    // 500 requests per second for one second.
    assert_eq!(number(&run["requests"]), 500);
    assert_eq!(number(&run["with_warm_up"]["sent"]), 600);
    assert_eq!(number(&run["late_us"]["count"]), 500);
    assert_eq!(number(&run["latency_us"]["set"]["count"]), 0);
    assert_eq!(server.metric("keys"), 100);
}

/// Latency starts when a request is due, so a pause of the server delays all requests of that time.
#[test]
fn open_loop_latency_includes_a_pause_of_the_server() {
    let server = Server::start();
    let path = server.directory().join("pause.json");
    let mut bench = bench_command(
        server.port(),
        "--keys 10 --rate 200 --warm-up 0s --duration 2s --connections 1 --in-flight 1 --timeout 20s",
    );
    bench.arg("--json").arg(&path);
    let running = thread::spawn(move || finish(bench, b""));
    thread::sleep(Duration::from_millis(1000));
    server.signal("STOP");
    thread::sleep(Duration::from_millis(600));
    server.signal("CONT");
    running.join().unwrap().code(0);
    let it = json(&path);
    let run = &it["runs"][0];
    assert_eq!(number(&run["requests"]), 400);
    assert_eq!(number(&run["answered"]), 400);
    // The request in flight waited 600 ms. 120 more were due during the pause, and waited for the
    // rest of it.
    let p99 = run["latency_us"]["all"]["p99"].as_f64().unwrap();
    assert!(
        p99 > 300_000.0,
        "p99 {p99} us does not include the pause: {run}"
    );
}

#[test]
fn watchers_are_notified_of_every_change_once() {
    let server = Server::start();
    let (ran, it) = figures(
        &server,
        "watchers.json",
        "--keys 3 --watchers 6 --reads 50 --connections 4 --keep",
    );
    let ran = ran.code(0);
    let run = &it["runs"][0];
    assert_counts_agree(run);
    let notified = number(&run["notifications"]);
    // There are two watchers for each of three keys, so each SET has two notifications.
    assert!(notified > 0 && notified.is_multiple_of(2), "{run}");
    assert_eq!(server.metric("notifications_total"), notified);
    assert!(ran.text().contains("notified"), "{}", ran.text());
}

#[test]
fn sweep_prints_a_row_per_value_and_draws_a_chart() {
    let server = Server::start();
    let svg = server.directory().join("curve.svg");
    let options = format!(
        "--sweep connections=1,2,3 --duration 300ms --svg {}",
        svg.display()
    );
    let (ran, it) = figures(&server, "sweep.json", &options);
    let text = ran.code(0).text();
    for row in ["1 connection ", "2 connections ", "3 connections "] {
        assert!(
            text.lines().any(|line| line.starts_with(row)),
            "no {row:?} in {text}"
        );
    }
    let runs = it["runs"].as_array().unwrap();
    assert_eq!(runs.len(), 3);
    runs.iter().for_each(assert_counts_agree);
    let svg = fs::read_to_string(svg).unwrap();
    assert_well_formed(&svg);
    assert_eq!(
        svg.matches("<circle").count(),
        9,
        "three runs on three lines"
    );

    let (ran, it) = figures(
        &server,
        "rates.json",
        "--sweep rate=100,200 --duration 300ms",
    );
    assert!(ran.code(0).text().contains("200/s"));
    assert_eq!(number(&it["runs"][1]["requests"]), 60);
}

/// No further request of the first run is due before its end.
#[test]
fn slow_rate_is_measured_for_the_whole_duration() {
    let server = Server::start();
    let options = "--sweep rate=1,200 --warm-up 0s --duration 300ms";
    let (ran, it) = figures(&server, "slow.json", options);
    ran.code(0);
    let runs = it["runs"].as_array().unwrap();
    let measured: Vec<u64> = runs.iter().map(|it| number(&it["measured_ms"])).collect();
    assert_eq!(measured, [300, 300]);
    assert_eq!(number(&runs[0]["requests"]), 1);
}

/// Asserts that XML without entity declarations is well-formed: every element is closed in order,
/// attributes are quoted, and there is one root.
fn assert_well_formed(xml: &str) {
    let (mut open, mut roots, mut rest) = (Vec::new(), 0, xml.trim());
    while let Some(at) = rest.find('<') {
        let text = &rest[..at];
        assert!(
            !open.is_empty() || text.trim().is_empty(),
            "text outside of the root: {text:?}"
        );
        assert_known_entities(text);
        let end = rest.find('>').expect("the tag is not closed");
        let tag = &rest[at + 1..end];
        rest = &rest[end + 1..];
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(
                open.pop(),
                Some(name),
                "closing tag of an element that is not open"
            );
            continue;
        }
        let (body, alone) = tag
            .strip_suffix('/')
            .map_or((tag, false), |body| (body, true));
        let (name, attributes) = body.split_once(' ').unwrap_or((body, ""));
        assert!(
            !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric()),
            "{tag}"
        );
        let mut attributes = attributes.trim();
        while !attributes.is_empty() {
            let (name, behind) = attributes
                .split_once("=\"")
                .unwrap_or_else(|| panic!("{tag}"));
            assert!(
                name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'),
                "{tag}"
            );
            let (value, behind) = behind.split_once('"').unwrap_or_else(|| panic!("{tag}"));
            assert_known_entities(value);
            attributes = behind.trim_start();
        }
        if open.is_empty() {
            roots += 1;
        }
        if !alone {
            open.push(name);
        }
    }
    assert!(
        open.is_empty() && rest.is_empty() && roots == 1,
        "{open:?} {rest:?} {roots}"
    );
}

/// Asserts that every entity in the text is predefined.
fn assert_known_entities(text: &str) {
    for behind in text.split('&').skip(1) {
        let known = ["amp;", "lt;", "gt;", "quot;"]
            .iter()
            .any(|it| behind.starts_with(it));
        assert!(known, "{text:?}");
    }
}

#[test]
fn lost_connections_are_counted_and_exit_with_code_1() {
    let server = Server::start();
    let path = server.directory().join("gone.json");
    let mut bench = bench_command(
        server.port(),
        "--keys 10 --warm-up 0s --duration 20s --connections 5",
    );
    bench.arg("--json").arg(&path);
    let running = thread::spawn(move || finish(bench, b""));
    thread::sleep(Duration::from_millis(1500));
    server.signal("TERM");
    let ran = running.join().unwrap().fails(1, "the keys stay");
    let it = json(&path);
    let run = &it["runs"][0];
    // Each of the five connections counts as one error, however many requests were in flight.
    let errors: u64 = run["errors"]
        .as_object()
        .unwrap()
        .values()
        .map(number)
        .sum();
    assert_eq!(errors, 5, "{run}");
    assert!(number(&run["answered"]) > 0);
    assert!(
        number(&run["measured_ms"]) < 19_000,
        "the run must end early: {run}"
    );
    assert!(ran.text().contains("connection lost"), "{}", ran.text());
}

/// Regression: the keys stayed, and nothing said so.
#[test]
fn signal_ends_the_run_and_removes_the_keys() {
    let server = Server::start();
    for (name, code, options, keys) in [
        ("INT", 130, "", 0),
        ("TERM", 143, "--rate 500", 0),
        ("TERM", 143, "--keep", 100),
    ] {
        let before = server.metric("requests_total");
        let options = format!("--duration 600s --warm-up 0s --connections 4 {options}");
        let mut bench = bench_command(server.port(), &options);
        bench.stdin(Stdio::null());
        bench.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut bench = bench.spawn().unwrap();
        // The fill has one request for each key.
        until("the measurement has begun", || {
            server.metric("requests_total") > before + 200
        });
        signal(bench.id(), name);
        let ended = wait(&mut bench, PATIENCE).expect("it ends after a signal");
        let ran = bench.wait_with_output().unwrap();
        let text = String::from_utf8(ran.stderr).unwrap();
        assert_eq!(ended.code(), Some(code), "{text}");
        assert!(text.contains(&format!("SIG{name}: ")), "{text}");
        assert!(
            text.contains("no results") && ran.stdout.is_empty(),
            "{text}"
        );
        assert_eq!(server.metric("keys"), keys, "{name} {options}");
    }
}

#[test]
fn refusals_are_reported_by_kind() {
    let server = Server::with_config("max_keys = 50");
    let ran = bench(server.port(), "").fails(4, "quota");
    assert!(ran.stdout.is_empty(), "{ran:?}");
    // Without a fill the run counts the refusals as errors, by kind.
    let (ran, it) = figures(&server, "quota.json", "--no-fill");
    assert!(
        ran.code(1)
            .text()
            .contains("refused: the quota has been exceeded")
    );
    let run = &it["runs"][0];
    let failed = number(&run["failed"]);
    assert!(
        failed > 0 && number(&run["answered"]) + failed == number(&run["requests"]),
        "{run}"
    );
    // The server allows fewer requests in flight.
    bench(server.port(), "--in-flight 2000 --no-fill").fails(2, "1024");
}

#[test]
fn bench_measures_a_store_behind_a_broker() {
    let broker = Mosquitto::start();
    let mut serve = command(&["serve", "--broker", &broker.url()]);
    serve.current_dir(broker.directory()).stderr(Stdio::null());
    let store = Background::start(&mut serve);
    store.wait_for("ready");

    let (host, port) = (broker.address().ip().to_string(), broker.address().port());
    let path = broker.directory().join("behind.json");
    let options = format!(
        "--host {host} --keys 20 --connections 4 --watchers 2 --data {} --json {}",
        broker.directory().join("statehouse-data").display(),
        path.display()
    );
    let ran = bench(port, &options);
    let text = ran.code(0).text();
    let it = json(&path);
    assert_counts_agree(&it["runs"][0]);
    assert!(number(&it["runs"][0]["notifications"]) > 0);
    assert_eq!(it["process"]["pid"], store.child.id(), "{text}");
}

#[test]
fn bench_without_a_store_exits_with_code_3() {
    let ran = bench(1, "")
        .fails(3, "127.0.0.1:1")
        .says("statehouse serve");
    assert!(ran.stdout.is_empty(), "{ran:?}");
    // A listener that never answers.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    bench(port, "--timeout 300ms").fails(3, "300ms");
}

/// Regression: a run without results emptied the file of an earlier one.
#[test]
fn results_stay_until_others_replace_them() {
    let server = Server::start();
    let path = server.directory().join("figures.json");
    let earlier = format!("\"{}\"", "earlier results ".repeat(10_000));
    fs::write(&path, &earlier).unwrap();
    let options = format!("--json {}", path.display());
    bench(1, &options).code(3);
    assert_eq!(fs::read_to_string(&path).unwrap(), earlier);
    bench(server.port(), &options).code(0);
    assert_counts_agree(&json(&path)["runs"][0]);
    // A pipe cannot be emptied.
    bench(server.port(), "--json /dev/stdout").code(0);
}

#[test]
fn wrong_options_exit_with_code_2() {
    let directory = tempfile::tempdir().unwrap();
    let nowhere = directory.path().join("missing/figures.json");
    for wrong in [
        &["--connections", "0"][..],
        &["--connections", "10001"],
        &["--in-flight", "0"],
        &["--connections", "10000", "--in-flight", "1000"],
        &["--rate", "0"],
        &["--rate", "5", "--sweep", "rate=1,2"],
        &["--reads", "101"],
        &["--duration", "0s"],
        &["--duration", "2d"],
        &["--duration", "soon"],
        &["--timeout", "0s"],
        &["--keys", "0"],
        &["--url", "ws://127.0.0.1"],
        &["--ca", "ca.crt"],
        &["--sweep", "keys=1"],
        &["--sweep", "rate=1,x"],
        &["--svg", "curve.svg"],
        &["--pid", "4194305"],
        &["--json", nowhere.to_str().unwrap()],
        &["--data", directory.path().to_str().unwrap()],
    ] {
        let mut all = vec!["bench", "--port", "1"];
        all.extend(wrong);
        let ran = run(&all, b"").code(2);
        assert!(ran.stdout.is_empty(), "{ran:?}");
    }
}
