use serde_json::json;

use super::*;
use crate::admin::overview::document::HotKeyRate;
use crate::cli::top::{Figures, lines};

fn latency(p50: u64) -> serde_json::Value {
    json!({ "count": 9, "p50": p50, "p99": 9 * p50, "max": 10 * p50 })
}

/// An overview of a store with some load.
fn overview() -> Overview {
    let document = json!({
        "store": "plant7", "host": "gw1", "version": "0.1.0",
        "started_ms": 1_700_000_000_000_u64, "time_ms": 1_700_000_093_000_u64,
        "ready": true, "why_not_ready": null,
        "rates": {
            "requests": 3841.6, "get": 1933.8, "set": 1887.9, "del": 19.9, "other": 0.0,
            "refused": 0.5, "failed": 0.0, "notifications": 349.4,
            "publishes_in": 3841.6, "publishes_out": 4191.0,
        },
        "latency_us": {
            "window_s": 10.0, "request": latency(268), "notification": latency(594),
            "stages": { "queue": latency(25), "policy": latency(132), "flush": latency(121), "send": latency(39) },
        },
        "store_size": { "keys": 950, "bytes": 130_000, "watches": 4, "dedup_entries": 20 },
        "memory": { "rss": 45_400_000, "limit": 1_u64 << 30, "owners": {} },
        "disk": { "free": 1_u64 << 34, "room": 1, "used": { "log": 4_194_304 }, "is_full": false, "flush_us": latency(294) },
        "clients": { "connected": 12, "limit": 10_000, "sessions": 14, "sessions_limit": 20_000, "subscriptions": 30, "retained": 1 },
        "foreign_broker": null, "queues": {},
        "process": { "cpu": 1.009, "fds": 37, "fds_limit": 20_000 },
        "policies": [{
            "name": "standard", "version": "1.0.0", "digest": "49f3a3ae1733ad15", "roles": ["active"],
            "calls_per_s": 3841.6, "failures": 0, "fuel_mean": 2706,
        }],
        "hot_keys": [
            { "key": "room/temperature", "is_cut": false, "requests_per_s": 960.4, "share": 0.25 },
            { "key": { "base64": "G1sySmhvc3RpbGU=" }, "is_cut": true, "requests_per_s": 38.4, "share": 0.01 },
        ],
        "limits": { "max_keys": 1000, "max_bytes": 536_870_912, "max_watches": 1_000_000 },
        "cluster": null,
    });
    serde_json::from_value(document).unwrap()
}

fn screen(overview: Overview) -> Screen {
    let mut screen = Screen::new(View::Keys);
    for _ in 0..2 {
        screen.refresh(Ok(Figures {
            overview: overview.clone(),
            ..Figures::default()
        }));
    }
    screen
}

fn drawn(screen: &Screen) -> Vec<String> {
    lines(screen, (80, 24)).unwrap()
}

#[test]
fn a_screen_of_80_by_24_has_everything() {
    let expected = concat!(
        " plant7 on gw1, 0.1.0, up 1m 33s, ready\n",
        "3842 requests/s  get 1934 set 1888 del 20 other 0.0             ██\n",
        "notifications 349  refused 0.5  publishes in 3842 out 4191      ██\n",
        "latency          p50     p99     max    keys           950 of 1000        95 %\n",
        "request       268 µs  2.4 ms  2.7 ms    table    127.0 KiB of 512.0 MiB    0 %\n",
        "  queue        25 µs  225 µs  250 µs    watches          4 of 1000000      0 %\n",
        "  policy      132 µs  1.2 ms  1.3 ms    memory    43.3 MiB of 1.0 GiB      4 %\n",
        "  flush       121 µs  1.1 ms  1.2 ms    disk       4.0 MiB of 16.0 GiB     0 %\n",
        "  send         39 µs  351 µs  390 µs    clients         12 of 10000        0 %\n",
        "notification  594 µs  5.3 ms  5.9 ms    files           37 of 20000        0 %\n",
        "disk          294 µs  2.6 ms  2.9 ms    cpu          101 % of one processor\n",
        " 1 keys  2 policies  3 clients  4 slow  5 cluster\n",
        "requests/s   share  key\n",
        "       960  25.0 %  room/temperature\n",
        "        38   1.0 %  \\u{1b}[2Jhostile…"
    );
    let mut screen = screen(overview());
    let lines = drawn(&screen);
    assert_eq!(lines[..15].join("\n"), expected);
    assert_eq!(lines[23], " 1-5 list   s order: rate   ↑↓ scroll   q quit");
    // Old figures do not say that the store is ready.
    screen.problem = Some("the store does not answer".to_owned());
    let lines = drawn(&screen);
    assert_eq!(lines[0], " plant7 on gw1, 0.1.0, up 1m 33s");
    assert!(
        lines[23].ends_with("old: the store does not answer"),
        "{lines:#?}"
    );
}

#[test]
fn every_list_is_drawn_in_a_terminal_of_any_size() {
    let mut screen = screen(overview());
    for view in View::value_variants() {
        (screen.view, screen.top) = (*view, 1_000);
        for (width, height) in [(1, 1), (20, 5), (80, 24), (300, 100)] {
            lines(&screen, (width, height)).unwrap();
        }
    }
    screen.view = View::Policies;
    let lines = drawn(&screen);
    assert!(
        lines[13].starts_with("standard@1.0.0  49f3a3ae  active"),
        "{lines:#?}"
    );
    screen.view = View::Cluster;
    assert!(drawn(&screen)[12].contains("not part of a cluster"));
}

#[test]
fn a_list_scrolls_to_its_last_page() {
    let key = |number: usize| HotKeyRate {
        key: json!(format!("key-{number:02}")),
        ..HotKeyRate::default()
    };
    let overview = Overview {
        hot_keys: (0..30).map(key).collect(),
        ..overview()
    };
    let mut screen = screen(overview);
    screen.top = 3;
    assert!(drawn(&screen)[13].ends_with("key-03"));
    screen.top = 1_000;
    assert!(drawn(&screen)[22].ends_with("key-29"));
}

#[test]
fn a_follower_names_the_leader_and_old_figures_their_age() {
    let document = json!({
        "name": "plant7", "role": "follower", "leader": "gw2", "followers": [], "epoch": 3,
        "position": 4_000, "history_position": 0, "lag_records": 2, "reaches_log": true,
        "log_records": 7, "log_bytes": 900, "snapshot_age_ms": null, "unreleased": null, "lease_ms": null,
    });
    let mut screen = screen(Overview {
        store: "plant7".to_owned(),
        host: "gw1".to_owned(),
        why_not_ready: Some("the cluster has no leader".to_owned()),
        cluster: Some(serde_json::from_value(document).unwrap()),
        ..Overview::default()
    });
    screen.view = View::Cluster;
    screen.problem = Some("cannot reach http://127.0.0.1:1".to_owned());
    let lines = drawn(&screen);
    assert!(
        lines[0].contains("follower, NOT READY: the cluster has no leader"),
        "{lines:#?}"
    );
    assert_eq!(
        lines[1],
        "This host follows gw2: ask that one for the store."
    );
    assert!(
        lines[14].starts_with("leader") && lines[14].ends_with("gw2"),
        "{lines:#?}"
    );
    assert!(
        lines[23].ends_with("old: cannot reach http://127.0.0.1:1"),
        "{lines:#?}"
    );
}
