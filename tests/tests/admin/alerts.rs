//! Tests the alerts and the board in `host/dist` against their documentation, with promtool, and on
//! live stores. `cluster/operations.rs` does so for the part of a cluster.

use std::{collections::BTreeSet, fs, path::Path, process::Command};

use statehouse_tests::{
    Connect, Mosquitto, Publish, Server, Store,
    client::Client,
    command::finish,
    prometheus::{Prometheus, check_page, expect_data, host_file, panels},
    store::notification_topic,
    wait::eventually,
};

fn read(path: &str) -> String {
    let path = host_file(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The rest of each line that begins with `start`, without indentation.
fn values<'a>(text: &'a str, start: &str) -> Vec<&'a str> {
    let lines = text.lines().map(str::trim_start);
    lines.filter_map(|line| line.strip_prefix(start)).collect()
}

/// The anchors of the headings of a Markdown page, as GitHub makes them.
fn anchors(page: &str) -> BTreeSet<String> {
    let headings = page.lines().filter(|line| line.starts_with('#'));
    headings
        .map(|heading| {
            let words = heading.trim_start_matches('#').trim().to_lowercase();
            let kept = words
                .chars()
                .filter(|it| it.is_alphanumeric() || " -_".contains(*it));
            kept.collect::<String>().replace(' ', "-")
        })
        .collect()
}

/// The names of metrics of this program in a text, as the table of metrics writes them.
fn metrics(text: &str) -> BTreeSet<&str> {
    let is_name = |it: char| it.is_ascii_alphanumeric() || it == '_';
    let words = text.split(|it| !is_name(it));
    words
        .filter(|word| word.starts_with("statehouse_") || word.starts_with("process_"))
        .map(|word| {
            let suffixes = ["_bucket", "_sum", "_count"];
            let name = suffixes.iter().find_map(|it| word.strip_suffix(it));
            name.unwrap_or(word)
        })
        .collect()
}

#[test]
fn every_alert_has_a_severity_a_summary_and_a_runbook() {
    let rules = read("dist/prometheus/rules.yml");
    let page = read("docs/operations.md");
    let anchors = anchors(&page);
    for link in page.split("](#").skip(1) {
        let anchor = link.split(')').next().unwrap();
        assert!(
            anchors.contains(anchor),
            "operations.md has no heading {anchor}"
        );
    }
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/admin/alerts.yml");
    let cases = fs::read_to_string(cases).unwrap();
    let tested = values(&cases, "- alertname: ");
    assert!(tested.len() > 30);
    for alert in rules.split("- alert: ").skip(1) {
        let name = alert.lines().next().unwrap();
        let severity = values(alert, "severity: ");
        assert!(
            matches!(severity[..], ["critical" | "warning"]),
            "{name}: {severity:?}"
        );
        assert_eq!(values(alert, "summary: ").len(), 1, "{name}");
        let anchor = name.to_lowercase();
        let runbook = format!("host/docs/operations.md#{anchor}");
        assert_eq!(values(alert, "runbook: "), [runbook.as_str()], "{name}");
        assert!(
            anchors.contains(&anchor),
            "operations.md has no heading {name}"
        );
        // Once where it fires, and once before or beside that.
        let tests = tested.iter().filter(|it| **it == name).count();
        assert_eq!(tests, 2, "tests of {name} in alerts.yml");
    }
}

#[test]
fn alerts_board_and_operations_name_existing_metrics() {
    let documented = read("docs/metrics.md");
    let documented = documented.lines().filter(|line| line.starts_with("| `"));
    let documented: String = documented.collect::<Vec<_>>().join("\n");
    let documented = metrics(&documented);
    for path in [
        "dist/prometheus/rules.yml",
        "dist/grafana/statehouse.json",
        "docs/operations.md",
    ] {
        let text = read(path);
        let named = metrics(&text);
        assert!(named.len() > 20, "{path}");
        let unknown: Vec<_> = named.difference(&documented).collect();
        assert!(unknown.is_empty(), "{path}: {unknown:?}");
    }
}

#[test]
fn promtool_accepts_the_alerts_and_their_tests() {
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/admin/alerts.yml");
    let prometheus = host_file("dist/prometheus");
    for arguments in [
        ["check", "rules", "rules.yml"],
        ["check", "config", "prometheus.yml"],
        ["test", "rules", cases.to_str().unwrap()],
    ] {
        let mut promtool = Command::new("promtool");
        promtool.args(arguments).current_dir(&prometheus);
        finish(promtool, b"").code(0);
    }
}

/// Panels without data on a store and a store behind a foreign broker.
const EXCEPTIONS: [(&str, &str); 4] = [
    ("Counters of policies", "the standard policy has none"),
    ("Comparison in shadow", "there is no candidate"),
    (
        "Time of snapshots",
        "a store that has just begun takes none",
    ),
    ("Changes of the active policy", "nothing changed it"),
];

/// Requests of all outcomes but `failed`, and their refusals.
fn work(server: &Server, store: &mut Store) {
    store.watch("key");
    store.set("key", "value");
    store.notification();
    store.get("key");
    assert!(store.ask(&["NO SUCH COMMAND"]).text().starts_with("-ERR"));
    let long = "v".repeat(101);
    assert!(store.ask(&["SET", "key", &long]).text().starts_with("-ERR"));
    let mut refused = Client::connect(server.address(), &Connect::new("refused"));
    let forged = Publish::new(&notification_topic("client", b"key"), b"").qos(1);
    assert_eq!(refused.publish(forged).reason, 0x87);
}

#[test]
fn every_panel_has_data_and_no_alert_fires_on_a_busy_store() {
    // No request is sampled, so the collector that does not exist loses no span.
    let settings = "max_value_bytes = 100\ntraces = \"http://127.0.0.1:9\"\ntraces_sample = 0.0\n";
    let server = Server::with(settings, &["--metrics", "127.0.0.1:0"]);
    let broker = Mosquitto::start();
    let settings = [("metrics", "127.0.0.1:0"), ("presence", "off")];
    let attached = Server::attached(&broker.url(), broker.address(), &settings);
    let mut behind = attached.store("behind");
    behind.set("key", "value");
    check_page(&attached.metrics_page());

    let targets = [&server, &attached].map(Server::metrics_address);
    let prometheus = Prometheus::scraping(&targets);
    let mut store = server.store("client");
    let (of_cluster, of_store): (Vec<_>, Vec<_>) =
        panels().into_iter().partition(|it| it.row == "A cluster");
    assert!(of_store.len() > 40 && of_cluster.len() > 5);
    expect_data(&prometheus, &of_store, &EXCEPTIONS, || {
        work(&server, &mut store)
    });
    let exceptions: Vec<_> = of_cluster
        .iter()
        .map(|it| (it.title.as_str(), "there is no cluster"))
        .collect();
    expect_data(&prometheus, &of_cluster, &exceptions, || {});
    // Prometheus answers, too, and is no store.
    prometheus.wait_until_scraped(targets.len());
    let mut stores = of_store.iter();
    let stores = stores.find(|it| it.title == "Stores that answer").unwrap();
    eventually("the board counts the stores alone", || {
        let count = prometheus.query(&stores.expressions[0]).unwrap();
        (count[0]["value"][1] == "2").then_some(())
    });

    let alerts = eventually("every alert is evaluated", || {
        let alerts = prometheus.alerts();
        alerts
            .iter()
            .all(|it| it["health"] != "unknown")
            .then_some(alerts)
    });
    let names = values(&read("dist/prometheus/rules.yml"), "- alert: ").len();
    assert_eq!(alerts.len(), names);
    for alert in alerts {
        assert_eq!(alert["health"], "ok", "{alert:#}");
        assert_eq!(alert["state"], "inactive", "{alert:#}");
    }
}
