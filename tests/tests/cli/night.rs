//! A bad night: makes the trouble of `host/docs/operations.md` on one store, and checks that the
//! commands of that page answer its questions, and that the alerts see the trouble.
//!
//! Real: the processes, the full file system, the failing policy, the client that reads nothing,
//! the damaged backup. Simulated: the slow disk, by a library that delays each flush. The full disk
//! needs root.

use std::{
    cell::RefCell,
    fs,
    os::unix::fs::symlink,
    path::PathBuf,
    time::{Duration, Instant},
};

use serde_json::Value as Json;
use statehouse_tests::{
    Admin, Client, Connect, Dice, Publish, Ran, Server, SlowDisk, Store, assert_contains, command,
    command::add_user,
    policies,
    prometheus::{Prometheus, host_file, panels},
    small::{FileSystem::Tmpfs, Small},
    wait::eventually,
    wait::until,
};

use crate::data_directory::{find, flip};

const RULES: &str = r#"
[[rules]]
principals.usernames = ["anna", "line"]
brokerResources = [
  { method = "Connect" },
  { method = "Publish", topics = ["alarms"] },
  { method = "Subscribe", topics = ["alarms"] },
]
stateStoreResources = [{ method = "ReadWrite", keyType = "Pattern", keys = ["line/*", "locks/*"] }]
"#;

const SETTINGS: &str = "\
slow_threshold = \"50ms\"
guard_failures = 3
";

/// The store of the night, and what observes it.
struct Night {
    prometheus: Prometheus,
    server: Server,
    disk: SlowDisk,
    /// Whether its file system is small.
    is_small: bool,
    /// The commands that were run, without their logins.
    commands: RefCell<Vec<String>>,
    // Unmounted after the server has ended.
    _small: Option<Small>,
}

impl Night {
    fn begin() -> Night {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        fs::write(path("rules.toml"), RULES).unwrap();
        fs::write(path("statehouse.toml"), SETTINGS).unwrap();
        for user in ["anna", "line"] {
            add_user(path("users"), user, user).code(0);
        }
        fs::write(path("anna.password"), "anna").unwrap();
        let small = Small::mount(Tmpfs, 24);
        if let Some(small) = &small {
            fs::create_dir(small.data()).unwrap();
            symlink(small.data(), path("statehouse-data")).unwrap();
        }
        let disk = SlowDisk::fast();
        let mut serve = command(&["serve", "--listen", "127.0.0.1:0"]);
        serve.args(["--config", "statehouse.toml", "--users", "users"]);
        serve.args(["--rules", "rules.toml", "--metrics", "127.0.0.1:0"]);
        serve.envs(disk.environment());
        let server = Server::spawn(serve, directory);
        Night {
            prometheus: Prometheus::scraping(&[server.metrics_address()]),
            server,
            disk,
            is_small: small.is_some(),
            commands: RefCell::default(),
            _small: small,
        }
    }

    /// Runs a command as the operator does, and prints its output for the reader of this test.
    fn run(&self, arguments: &[&str]) -> Ran {
        self.commands.borrow_mut().push(arguments.join(" "));
        let ran = self.server.run(arguments);
        println!(
            "$ statehouse {}\n{}{}",
            arguments.join(" "),
            ran.text(),
            ran.stderr
        );
        ran
    }

    /// Like [`Self::run`], for a command that sends requests as anna.
    fn ask(&self, arguments: &[&str]) -> Ran {
        let url = format!("mqtt://{}", self.server.address());
        let login = ["--url", &url, "--user", "anna", "--password-file"];
        self.commands.borrow_mut().push(arguments.join(" "));
        let (name, rest) = arguments.split_first().unwrap();
        self.run(&[&[*name], &login[..], &["anna.password"], rest].concat())
    }

    fn login(&self, id: &str, user: &str) -> Client {
        let connect = Connect::new(id).login(user, user);
        Client::connect(self.server.address(), &connect)
    }

    fn store(&self, id: &str, user: &str) -> Store {
        Store::new(self.login(id, user), id)
    }

    fn readiness(&self) -> (u16, String) {
        Admin::of(&self.server).ask("GET", "/readyz", b"")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.server.directory().join(name)
    }

    /// Waits until an alert is pending or firing. Most fire only after minutes.
    fn wait_for_alert(&self, name: &str) {
        until(name, || {
            let alerts = self.prometheus.alerts();
            let alert = alerts.iter().find(|it| it["name"] == name).unwrap();
            assert_ne!(alert["health"], "err", "{alert:#}");
            alert["state"] != "inactive"
        });
    }
}

#[test]
fn questions_of_a_bad_night_are_answered() {
    let night = Night::begin();
    let mut press = night.store("press-4", "line");
    who_wrote_this_key(&night, &mut press);
    who_holds_this_lock(&night, &mut press);
    why_was_this_refused(&night, &mut press);
    night.prometheus.wait_until_scraped(1);
    what_is_slow(&night, &mut press);
    which_key_is_hot(&night, &mut press);
    who_is_connected(&night, &mut press);
    if night.is_small {
        how_full_is_it(&night, &mut press);
    }
    is_the_backup_good(&night);
    what_did_the_new_policy_change(&night, &mut press);
    every_answer_was_seen(&night);
}

/// Each command that the page shows with its output was run, and each metric that it names exists.
fn every_answer_was_seen(night: &Night) {
    let page = fs::read_to_string(host_file("docs/operations.md")).unwrap();
    let (_, questions) = page.split_once("\n## Questions of a bad night\n").unwrap();
    let (questions, _) = questions.split_once("\n## ").unwrap();
    // Names and times of the page differ from those of this run.
    let words = |command: &str| -> Vec<String> {
        let command = command.split(" | ").next().unwrap();
        let names = if command.starts_with("policy ") { 2 } else { 1 };
        let words = command.split_whitespace().enumerate();
        let kept = words.filter(|(place, word)| *place < names || word.starts_with("--"));
        kept.map(|(_, word)| word.to_owned()).collect()
    };
    let commands = night.commands.borrow();
    let run: Vec<_> = commands.iter().map(|it| words(it)).collect();
    let metrics = night.server.metrics_page();
    let questions: Vec<&str> = questions.split("\n### ").skip(1).collect();
    assert_eq!(questions.len(), 9);
    for question in questions {
        let title = question.lines().next().unwrap();
        let is_skipped = title == "How full is it?" && !night.is_small;
        let shown = question
            .lines()
            .filter_map(|it| it.strip_prefix("$ statehouse "));
        let mut shown = shown.peekable();
        assert!(title.ends_with('?') && shown.peek().is_some(), "{title}");
        for command in shown.filter(|_| !is_skipped) {
            assert!(run.contains(&words(command)), "{title} {command}");
        }
        for place in ["metric", "page"] {
            let is_named = question.to_lowercase().contains(place);
            assert!(is_named, "{title} names no {place}");
        }
        let is_name = |it: char| it.is_ascii_lowercase() || it == '_';
        let named = question.split(|it| !is_name(it));
        for name in named.filter(|it| it.starts_with("statehouse_") || it.starts_with("process_")) {
            assert!(metrics.contains(&format!("\n{name}")), "{title} {name}");
        }
    }
}

fn who_wrote_this_key(night: &Night, press: &mut Store) {
    let good = press.set("line/speed", "70").to_string();
    night.store("laptop", "anna").set("line/speed", "900");
    let text = night.run(&["history", "line/speed"]).code(0).text();
    let first = text.split("\nset ").next().unwrap();
    assert!(
        first.contains("3 bytes: 900\n    client   laptop\n    user     anna\n"),
        "{text}"
    );
    assert_contains!(text, "client   press-4\n    user     line\n");
    let meta = night.ask(&["get", "line/speed", "--meta"]).code(0).text();
    assert!(meta.ends_with("writer   laptop, user anna\n"), "{meta}");
    let earlier = night.run(&["get", "line/speed", "--as-of", &good]);
    assert_eq!(earlier.code(0).text(), "70");
}

fn who_holds_this_lock(night: &Night, press: &mut Store) {
    let lock = ["SET", "locks/nightly", "press-4", "NEX", "PX", "600000"];
    let acquired = press.ask(&lock).version().unwrap();
    let renewed = press.ask(&lock).version().unwrap();
    assert!(acquired < renewed);
    let text = night
        .ask(&["lock", "locks/nightly", "--status"])
        .code(0)
        .text();
    let lines: Vec<&str> = text.lines().collect();
    let names = [
        "holder   press-4",
        "since    20",
        "renewed  20",
        "until    20",
    ];
    let mut both = lines.iter().zip(names);
    assert!(both.all(|(line, it)| line.starts_with(it)), "{text}");
    let status = night
        .ask(&["lock", "locks/nightly", "--status", "--json"])
        .code(0)
        .object();
    let history = night.run(&["history", "locks/nightly", "--json"]).code(0);
    let first = &history.objects()[1];
    assert_eq!(status["since"], first["time"], "{history:?}");
    assert_eq!(status["since_before"], Json::Null);
    assert_eq!(status["fencing_token"], first["version"], "{history:?}");
    assert_ne!(status["version"], status["fencing_token"]);
    night
        .ask(&["lock", "locks/nightly", "--wait", "0s", "--", "true"])
        .fails(1, "held by another client");
}

fn why_was_this_refused(night: &Night, press: &mut Store) {
    let refused = press.ask(&["SET", "valve/1", "open"]);
    assert_eq!(refused.text(), "-ERR not authorized\\r\\n");
    let line = night.server.wait_for_log("refused what=\"write\"");
    println!("{line}");
    assert_contains!(line, "client=\"press-4\"", "user=\"line\"");
    let text = night
        .run(&["authz", "explain", "press-4", "SET", "valve/1"])
        .code(1)
        .text();
    assert!(text.contains("denied"), "{text}");
    assert_eq!(night.server.refused("write"), 1);
    let refusals = Admin::of(&night.server).done("GET", "/v1/events?kind=refusal", b"");
    let refusals = refusals["events"].as_array().unwrap();
    assert!(
        refusals.iter().any(|it| it.to_string().contains("valve/1")),
        "{refusals:?}"
    );
}

fn what_is_slow(night: &Night, press: &mut Store) {
    press.set("line/other", "1");
    assert_eq!(night.server.metric("slow_requests_total"), 0);
    night.disk.delay(Duration::from_millis(300));
    // A read of another key does not wait for the disk.
    let write = press.command(&["SET", "line/speed", "71"]);
    let id = press.client.start(write.publish());
    let mut laptop = night.store("laptop", "anna");
    let began = Instant::now();
    assert_eq!(laptop.get("line/other").as_deref(), Some(&b"1"[..]));
    assert!(
        began.elapsed() < Duration::from_millis(300),
        "{:?}",
        began.elapsed()
    );
    press.finish(&write, id);
    let slow = night.run(&["slow", "--json"]).code(0).object();
    let slow = &slow["requests"][0];
    assert_eq!(slow["client"], "press-4");
    assert_eq!(slow["key"], "line/speed");
    let part = |name: &str| slow[name].as_u64().unwrap();
    assert!(part("flush_us") > part("total_us") / 10 * 9, "{slow}");
    let table = night.run(&["slow"]).code(0).text();
    assert_contains!(table, " press-4  SET      line/speed  ok ");
    assert_eq!(night.readiness().0, 200);
    night.wait_for_alert("StatehouseSlowDisk");
    night.wait_for_alert("StatehouseSlowRequests");
    night.disk.delay(Duration::ZERO);
}

fn which_key_is_hot(night: &Night, press: &mut Store) {
    press.set("line/hot", "1");
    let hot = eventually("the hot key", || {
        for _ in 0..200 {
            press.get("line/hot");
        }
        // The first request begins the search.
        let overview = night.run(&["top", "--once", "--json"]).code(0).object();
        overview["hot_keys"].as_array()?.first().cloned()
    });
    assert_eq!(hot["key"], "line/hot");
    assert!(hot["share"].as_f64() > Some(0.5), "{hot}");
}

/// The panel of a machine subscribes, and does not acknowledge what it gets.
fn who_is_connected(night: &Night, press: &mut Store) {
    let mut panel = night.login("panel-2", "line");
    panel.acknowledges = false;
    assert_eq!(panel.subscribe("alarms", 1), 1);
    for _ in 0..1500 {
        let alarm = Publish::new("alarms", [b'a'; 1000]).qos(1);
        assert_eq!(press.client.publish(alarm).reason, 0);
    }
    let text = night.run(&["clients"]).code(0).text();
    let row = text.lines().nth(1).unwrap();
    let row: Vec<&str> = row.split_whitespace().collect();
    assert_eq!(row[..3], ["panel-2", "line", "127.0.0.1"], "{text}");
    let clients = night.run(&["clients", "--json"]).code(0).object();
    let first = &clients["clients"][0];
    assert!(
        first["queued"].as_u64() > Some(0) && first["in_flight"].as_u64() > Some(100),
        "{first}"
    );
    let waiting = "queue_bytes{queue=\"sessions\"}";
    assert!(night.server.metric(waiting) > 1_000_000);
    night.run(&["clients", "kick", "panel-2"]).code(0);
    assert_eq!(panel.expect_closed().unwrap().reason, 0x98);
    until("its messages are removed", || {
        night.server.metric(waiting) < 10_000
    });
    let text = night.run(&["clients"]).code(0).text();
    assert!(!text.contains("panel-2"), "{text}");
}

fn how_full_is_it(night: &Night, press: &mut Store) {
    let mut dice = Dice::of(1);
    let value: Vec<u8> = (0..100_000).map(|_| dice.next() as u8).collect();
    let refusal = (0..400).find_map(|n| {
        let answer = press.ask(&[b"SET", format!("line/log/{n}").as_bytes(), &value]);
        (answer.payload() != b"+OK\r\n").then(|| answer.text())
    });
    assert_eq!(refusal.unwrap(), "-ERR the quota has been exceeded\\r\\n");
    night.wait_for_alert("StatehouseDiskFull");
    assert_eq!(night.server.metric("disk_full"), 1);
    let (status, why) = night.readiness();
    println!("/readyz: {status} {why}");
    assert!(status == 503 && why.contains("disk is full"), "{why}");
    let text = night.run(&["doctor"]).code(0).text();
    let end = "\nthe files are well, and the disk is full\n";
    assert!(
        text.contains("the store refuses writes") && text.ends_with(end),
        "{text}"
    );
    let text = night.run(&["usage"]).code(0).text();
    let largest = text
        .lines()
        .skip_while(|line| !line.starts_with("client"))
        .nth(1);
    let largest: Vec<&str> = largest.unwrap().split_whitespace().collect();
    assert_eq!(largest[..3], ["press-4", "line", "yes"], "{text}");
    assert!(text.contains("\nthe disk is full, with "), "{text}");
    // The limit of the client is not the cause.
    let usage = night.run(&["usage", "--json"]).code(0).object();
    assert!(usage["bytes"]["used"].as_u64() < usage["max_client_bytes"].as_u64());
    night.ask(&["del", "--prefix", "line/log/"]).code(0);
    until("the store accepts writes", || night.readiness().0 == 200);
    press.set("line/speed", "72");
}

fn is_the_backup_good(night: &Night) {
    night.run(&["snapshot", "backup.state"]).code(0);
    let good = night
        .run(&["restore", "backup.state", "--check"])
        .code(0)
        .text();
    assert!(good.starts_with("read backup.state: "), "{good}");
    let backup = night.file("backup.state");
    let copy = night.file("copy.state");
    fs::copy(&backup, &copy).unwrap();
    flip(&copy, find(&copy, b"line/speed"));
    for check in [&["--check"][..], &["--data", "restored"]] {
        night
            .run(&[&["restore", "copy.state"], check].concat())
            .fails(3, "copy.state is damaged at byte ");
        assert!(!night.file("restored").exists());
    }
    night
        .run(&["restore", "backup.state", "--data", "restored"])
        .code(0);
    let text = night.run(&["doctor", "restored"]).code(0).text();
    assert!(text.ends_with("all is well\n"), "{text}");
    let kept = night.run(&["get", "line/other", "--as-of", "0s", "--data", "restored"]);
    assert_eq!(kept.code(0).text(), "1");
}

fn what_did_the_new_policy_change(night: &Night, press: &mut Store) {
    let policy = policies::faulty();
    let differs = night.run(&["replay", "--policy", policy]).code(1).text();
    assert!(differs.contains("line/speed"), "{differs}");
    night.run(&["policy", "load", policy]).code(0);
    what_would_it_change(night, press);
    night.run(&["policy", "promote", "faulty"]).code(0);
    let back = night.run(&["policy", "rollback"]).code(0).text();
    assert!(back.starts_with("rolled back to standard "), "{back}");
    night.run(&["policy", "promote", "faulty"]).code(0);
    let mut laptop = night.store("laptop", "anna");
    for client in [&mut *press, &mut laptop] {
        assert_eq!(client.ask(&["SET", "line/a", "fine"]).text(), "+OK\\r\\n");
    }
    for n in 0..6 {
        let client = if n % 2 == 0 { &mut *press } else { &mut laptop };
        client.ask(&["SET", "line/a", "panic"]);
    }
    night.server.wait_for_log("rolled back");
    let list = night.run(&["policy", "list"]).code(0).text();
    assert!(list.contains("\nlast failure of faulty@0.1.0 "), "{list}");
    assert!(list.contains(": a panic on request\n"), "{list}");
    assert!(list.contains("\nrolled back from faulty@0.1.0 "), "{list}");
    let logs = night.run(&["policy", "logs", "--recent"]).code(0).text();
    assert!(logs.contains("\terror\tfaulty 0.1.0@"), "{logs}");
    night.wait_for_alert("StatehousePolicyFails");
    assert_eq!(press.ask(&["SET", "line/a", "panic"]).text(), "+OK\\r\\n");
}

/// The policy is compared with live requests.
fn what_would_it_change(night: &Night, press: &mut Store) {
    night.run(&["policy", "shadow", "faulty"]).code(0);
    assert_eq!(press.ask(&["SET", "line/a", "panic"]).text(), "+OK\\r\\n");
    let text = eventually("the failure is seen", || {
        let diff = night.run(&["policy", "diff"]);
        let text = diff.text();
        (text.contains("SET line/a panic")).then(|| diff.code(1).text())
    });
    assert!(text.contains("a panic on request"), "{text}");
    let panels = panels();
    let compared = panels.iter().find(|it| it.title == "Comparison in shadow");
    let compared = &compared.expect("the board has this panel").expressions[0];
    until("the board shows the comparison", || {
        let found = night.prometheus.query(compared).unwrap();
        let is_failure = |it: &Json| it["metric"]["result"] == "failed" && it["value"][1] != "0";
        found.iter().any(is_failure)
    });
    night.run(&["policy", "shadow", "--off"]).code(0);
}
