//! Runs a real Prometheus that scrapes stores and evaluates the alerts of `host/dist/prometheus`,
//! and reads the panels of the board in `host/dist/grafana`. Drop ends it.

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value as Json;
use tempfile::TempDir;

use crate::{
    background::Foreign,
    command::finish,
    server,
    wait::{eventually, until},
};

/// The interval of scrapes. A rate needs two.
const INTERVAL: &str = "200ms";

/// The path of a file below `host/`.
pub fn host_file(path: &str) -> PathBuf {
    let host = concat!(env!("CARGO_MANIFEST_DIR"), "/../host");
    Path::new(host).canonicalize().unwrap().join(path)
}

/// Asserts that `promtool check metrics` has nothing to say about a page.
#[track_caller]
pub fn check_page(page: &str) {
    let mut promtool = Command::new("promtool");
    promtool.args(["check", "metrics"]);
    let ran = finish(promtool, page.as_bytes()).code(0);
    assert_eq!(ran.text(), "");
}

pub struct Prometheus {
    _process: Foreign,
    address: SocketAddr,
    _directory: TempDir,
}

impl Prometheus {
    /// Starts Prometheus on these addresses of metrics. It also scrapes itself, as a job that is no
    /// store.
    pub fn scraping(targets: &[String]) -> Prometheus {
        let directory = tempfile::tempdir().unwrap();
        let address = server::own_address();
        let configuration = serde_json::json!({
            "global": { "scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL },
            "rule_files": [host_file("dist/prometheus/rules.yml")],
            "scrape_configs": [
                { "job_name": "statehouse", "static_configs": [{ "targets": targets }] },
                { "job_name": "prometheus", "static_configs": [{ "targets": [address.to_string()] }] },
            ],
        });
        // JSON is YAML.
        let file = directory.path().join("prometheus.yml");
        fs::write(&file, configuration.to_string()).unwrap();
        let data = directory.path().join("data");
        let mut command = Command::new("prometheus");
        command
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", data.display()))
            .arg(format!("--web.listen-address={address}"));
        let prometheus = Prometheus {
            _process: Foreign::start("Prometheus", &mut command),
            address,
            _directory: directory,
        };
        eventually("Prometheus is ready", || {
            let answer = prometheus.get("/-/ready").ok()?;
            answer.starts_with("HTTP/1.0 200").then_some(())
        });
        prometheus
    }

    /// Waits until this many stores, and Prometheus itself, were scraped. Prometheus finds them five
    /// seconds after its start. What happened before has no rate.
    pub fn wait_until_scraped(&self, stores: usize) {
        until("the stores are scraped", || {
            let up = self.query("up == 1").unwrap();
            up.len() == stores + 1
        });
    }

    /// The result of an expression at this moment: samples with a number, or the error.
    pub fn query(&self, expression: &str) -> Result<Vec<Json>, String> {
        let encoded: String = expression
            .bytes()
            .map(|byte| format!("%{byte:02X}"))
            .collect();
        let answer = self.json(&format!("/api/v1/query?query={encoded}"));
        let Some(samples) = answer["data"]["result"].as_array() else {
            return Err(answer["error"].to_string());
        };
        let is_number = |sample: &&Json| sample["value"][1] != "NaN";
        Ok(samples.iter().filter(is_number).cloned().collect())
    }

    /// All alerting rules as Prometheus evaluated them; none of them before the first evaluation.
    pub fn alerts(&self) -> Vec<Json> {
        let answer = self.json("/api/v1/rules");
        let groups = answer["data"]["groups"].as_array().unwrap().iter();
        let rules = groups.flat_map(|group| group["rules"].as_array().unwrap());
        rules.cloned().collect()
    }

    fn json(&self, path: &str) -> Json {
        let answer = self.get(path).unwrap();
        let (_, body) = answer.split_once("\r\n\r\n").expect("an HTTP response");
        serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {answer}"))
    }

    /// The whole response. HTTP 1.0 has no chunks.
    fn get(&self, path: &str) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(self.address)?;
        stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    }
}

#[derive(Clone, Debug)]
pub struct Panel {
    pub row: String,
    pub title: String,
    /// What it shows: expressions of PromQL.
    pub expressions: Vec<String>,
}

/// All panels of the board, with the values that the variables of Grafana have at first.
pub fn panels() -> Vec<Panel> {
    let board = fs::read_to_string(host_file("dist/grafana/statehouse.json")).unwrap();
    let board: Json = serde_json::from_str(&board).unwrap();
    let filled = |expression: &str| filled(&board["templating"]["list"], expression);
    let (mut row, mut panels) = (String::new(), Vec::new());
    for panel in board["panels"].as_array().unwrap() {
        let title = panel["title"].as_str().unwrap().to_owned();
        if panel["type"] == "row" {
            row = title;
            continue;
        }
        let targets = panel["targets"].as_array().unwrap().iter();
        let expressions = targets.map(|it| filled(it["expr"].as_str().unwrap()));
        panels.push(Panel {
            row: row.clone(),
            title,
            expressions: expressions.collect(),
        });
    }
    let notes = board["annotations"]["list"].as_array().unwrap().iter();
    panels.extend(notes.map(|note| Panel {
        row: "Annotations".to_owned(),
        title: note["name"].as_str().unwrap().to_owned(),
        expressions: vec![filled(note["expr"].as_str().unwrap())],
    }));
    panels
}

/// An expression with values for the variables of the board: with those that select all.
fn filled(variables: &Json, expression: &str) -> String {
    let mut filled = expression.replace("$__rate_interval", "1m");
    for variable in variables.as_array().unwrap() {
        if let Some(all) = variable["allValue"].as_str() {
            let name = variable["name"].as_str().unwrap();
            filled = filled.replace(&format!("${name}"), all);
        }
    }
    assert!(!filled.contains('$'), "an unknown variable: {filled}");
    filled
}

/// Waits until each expression of these panels has a result. Those of `exceptions`, each the title
/// of a panel with the reason, must have none. `work` makes the results.
pub fn expect_data(
    prometheus: &Prometheus,
    panels: &[Panel],
    exceptions: &[(&str, &str)],
    mut work: impl FnMut(),
) {
    for (title, why) in exceptions {
        let is_known = panels.iter().any(|panel| panel.title == *title);
        assert!(is_known, "no panel {title:?}, the exception since {why}");
    }
    let is_exception = |title: &str| exceptions.iter().any(|it| it.0 == title);
    let mut wanting = Vec::new();
    for panel in panels {
        for expression in &panel.expressions {
            wanting.push((panel.title.as_str(), expression.as_str()));
        }
    }
    let mut missing: Vec<String> = Vec::new();
    let result = |expression: &str| {
        let found = prometheus.query(expression);
        found.unwrap_or_else(|error| panic!("{expression}: {error}"))
    };
    for _ in 0..150 {
        work();
        wanting.retain(|(title, expression)| is_exception(title) || result(expression).is_empty());
        let open = wanting.iter().filter(|(title, _)| !is_exception(title));
        missing = open.map(|(title, it)| format!("{title}: {it}")).collect();
        if missing.is_empty() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    assert!(missing.is_empty(), "panels without data: {missing:#?}");
    for (title, expression) in wanting {
        let found = result(expression);
        assert!(
            found.is_empty(),
            "{title} is no exception: {expression} is {found:?}"
        );
    }
}
