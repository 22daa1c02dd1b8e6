//! Tests the page of metrics of a live store, with the programs that read such pages.

use std::{collections::BTreeSet, path::Path, process::Command};

use statehouse_tests::{Admin, Server, command::finish};

const OPEN_METRICS: &str = "Accept: application/openmetrics-text; version=1.0.0\r\n";

/// The page in the format that the header lines ask for.
fn page(server: &Server, lines: &str) -> String {
    let (status, page) = Admin::of(server).ask_with("GET", "/metrics", lines, b"");
    assert_eq!(status, 200, "{page}");
    page
}

/// A store that has done something of each kind.
fn busy() -> Server {
    let server = Server::start();
    let mut store = server.store("client");
    store.set("key", "value");
    server
}

#[test]
fn promtool_accepts_the_page_in_prometheus_format() {
    let server = busy();
    let page = page(&server, "");
    let mut promtool = Command::new("promtool");
    promtool.args(["check", "metrics"]);
    let ran = finish(promtool, page.as_bytes()).code(0);
    assert_eq!(ran.text(), "");
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
    let set = (page.lines()).find(|line| line.contains("command=\"SET\""));
    let set = set.unwrap_or_else(|| panic!("{page}"));
    assert!(
        set.starts_with("statehouse_policy_command_requests_total{policy=\"standard\",version=\""),
        "{set}"
    );
    assert!(set.ends_with("} 1"), "{set}");
}

#[test]
fn reference_parser_accepts_the_page_in_openmetrics_format() {
    let server = busy();
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
