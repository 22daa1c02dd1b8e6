//! Tests the overview, the stream of overviews and the audit log of the admin API.

use std::thread;

use serde_json::{Value as Json, json};
use statehouse_tests::{Admin, Server, WallClock, admin::assert_refused};

use statehouse_tests::wait::{eventually, until};

/// Streams that a listener serves at once.
const STREAMS_MAX: usize = 16;

#[test]
fn the_overview_has_rates_times_and_hot_keys() {
    let server = Server::start();
    let admin = Admin::of(&server);
    let mut store = server.store("press-4");
    let idle = admin.done("GET", "/v1/overview", b"");
    assert_eq!(idle["ready"], true);
    assert_eq!(idle["cluster"], Json::Null);
    assert_eq!(idle["hot_keys"], json!([]));
    assert!(idle["rates"]["requests"].is_number(), "{idle}");
    assert_eq!(idle["version"], env!("CARGO_PKG_VERSION"));
    let busy = eventually("the overview shows the load", || {
        for number in 0..100 {
            store.set("hot/key", "value");
            store.set(format!("cold/{number}"), "value");
            store.get("hot/key");
        }
        let overview = admin.done("GET", "/v1/overview", b"");
        let rate = |name: &str| overview["rates"][name].as_f64().unwrap();
        let is_busy = rate("set") > 0.0 && rate("get") > 0.0;
        // An overview may be older than the last key.
        let is_complete =
            overview["hot_keys"] != json!([]) && overview["store_size"]["keys"] == 101;
        (is_busy && is_complete).then_some(overview)
    });
    let hottest = &busy["hot_keys"][0];
    assert_eq!(hottest["key"], "hot/key", "{busy}");
    let share = hottest["share"].as_f64().unwrap();
    assert!((0.5..0.75).contains(&share), "{share}");
    let latency = &busy["latency_us"];
    for of in [
        &latency["request"],
        &latency["stages"]["queue"],
        &latency["stages"]["policy"],
        &latency["stages"]["flush"],
        &latency["stages"]["send"],
        &busy["disk"]["flush_us"],
    ] {
        assert!(of["count"].as_u64() > Some(0), "{busy}");
        assert!(of["p50"].as_u64() <= of["p99"].as_u64(), "{busy}");
    }
    let max = |it: &Json| it["max"].as_u64().unwrap();
    assert!(max(&latency["request"]) >= max(&latency["stages"]["flush"]));
    assert_eq!(busy["clients"]["connected"], 1);
    assert!(busy["process"]["cpu"].as_f64().unwrap() > 0.0);
    assert_eq!(busy["policies"][0]["roles"], json!(["active"]));
}

/// Keys expire by the time of the store, so the system time does not tell how long they last.
#[test]
fn overview_has_the_time_of_the_store_after_a_clock_step() {
    const HALF_AN_HOUR_MS: u64 = 1_800_000;
    let clock = WallClock::right();
    let server = Server::restartable_in(&[], &clock.environment());
    let admin = Admin::of(&server);
    let times = || {
        let overview = admin.done("GET", "/v1/overview", b"");
        let time = |name: &str| overview[name].as_u64().unwrap();
        (time("time_ms"), time("store_time_ms"))
    };
    let (_, mut last) = times();
    clock.set(-3600);
    until("the system time of an overview is an hour behind", || {
        let (system, store) = times();
        assert!(store >= last, "{store} after {last}");
        last = store;
        system + HALF_AN_HOUR_MS < store
    });
}

#[test]
fn streams_are_limited_and_block_no_other_request() {
    let server = Server::start();
    let admin = Admin::of(&server);
    for path in ["/v1/live", "/v1/overview", "/v1/events"] {
        assert_eq!(admin.without_token().ask("GET", path, b"").0, 401);
        assert_eq!(admin.ask("POST", path, b"").0, 405);
    }
    let mut streams = [(); STREAMS_MAX].map(|()| admin.stream("/v1/live"));
    let (first, second) = (streams[0].event(), streams[0].event());
    assert_eq!((&*first.0, &*second.0), ("overview", "overview"));
    assert!(first.1["time_ms"].as_u64() < second.1["time_ms"].as_u64());
    // All streams have the same document.
    assert_eq!(streams[1].event().1, first.1);

    assert_refused(admin.ask("GET", "/v1/live", b""), 503, "16 streams");
    assert_eq!(admin.ask("GET", "/v1/overview", b"").0, 200);
    assert_eq!(admin.ask("GET", "/livez", b"").0, 200);
    drop(streams);
    until("the places of the streams are free", || {
        admin.follow("/v1/live").0 == 200
    });
}

/// A reader that reads nothing holds a bounded number of events, and none that others wait for.
#[test]
fn stream_without_a_reader_does_not_grow_the_store() {
    let server = Server::start();
    let admin = Admin::of(&server);
    let unread = [(); STREAMS_MAX / 2].map(|()| admin.stream("/v1/live"));
    let mut read = admin.stream("/v1/live");
    read.event();
    let memory_kib = server.memory_kib();
    for _ in 0..3 {
        assert_eq!(read.event().0, "overview");
    }
    assert!(server.memory_kib() < memory_kib + (8 << 10));
    drop(unread);
}

#[test]
fn acts_and_refusals_are_events() {
    let server = Server::with("", &["--log-filter", "error"]);
    let admin = Admin::of(&server);
    let before = admin.done("GET", "/v1/events", b"");
    assert_eq!(before["lost"], 0);
    let from = before["next"].as_u64().unwrap();
    let waiting = thread::spawn({
        let admin = Admin::of(&server);
        move || admin.done("GET", &format!("/v1/events?from={from}"), b"")
    });
    assert_eq!(admin.ask("POST", "/v1/rollback", b"").0, 409);
    let seen = waiting.join().unwrap();
    let act = &seen["events"][0];
    assert_eq!(act["kind"], "act", "{seen}");
    let fields = &act["fields"];
    assert_eq!(fields["path"], "/v1/rollback");
    assert_eq!(fields["status"], "409");
    assert_eq!(admin.without_token().ask("GET", "/v1/usage", b"").0, 401);
    // A question is no act, and neither is what does not exist.
    let question = br#"{"client": "a", "command": "SET", "on": "k"}"#;
    admin.done("POST", "/v1/authz", question);
    assert_eq!(admin.ask("DELETE", "/v1/nothing", b"").0, 404);
    let acts = admin.done("GET", "/v1/events?kind=act", b"");
    assert_eq!(acts["events"].as_array().unwrap().len(), 1, "{acts}");
    let refusals = admin.done("GET", "/v1/events?kind=refusal", b"");
    let refusals = refusals["events"].as_array().unwrap();
    assert!(refusals.iter().all(|it| it["kind"] == "refusal"));
    let last = refusals.last().expect("a refusal");
    assert_eq!(last["fields"]["what"], "administer", "{last}");
    let acts = admin.done("GET", "/v1/events?kind=act", b"");
    assert!(!acts["events"].to_string().contains("refused"), "{acts}");
    assert_eq!(admin.ask("GET", "/v1/events?kind=other", b"").0, 400);
    assert_eq!(admin.ask("GET", "/v1/events?from=x", b"").0, 400);
}
