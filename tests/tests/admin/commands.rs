//! Tests the commands of `statehouse policy` on a running store: load, list, promote, rollback,
//! shadow, diff, canary, route and unload.

use std::{ffi::OsStr, fs, os::unix::ffi::OsStrExt, thread, time::Duration};

use statehouse_tests::{
    Admin, Server,
    admin::assert_refused,
    assert_contains,
    command::{command, finish},
    policies, run_in,
};

use crate::wasm::{component, leb, section};
use crate::{OURS, answers, eventually, listing, ours, policy, roles, until};

#[test]
fn policy_is_loaded_promoted_and_rolled_back_while_running() {
    let server = Server::start();
    let mut store = server.store("client");
    store.set("key", "value");
    let loaded = policy(&server, &["load", &ours()]).code(0).text();
    assert!(loaded.starts_with(&format!("loaded {OURS} ")), "{loaded}");
    assert_eq!(roles(&server, OURS).unwrap(), [""; 0]);
    assert!(!answers(&server, "tally"));

    policy(&server, &["promote", OURS]).code(0);
    assert!(answers(&server, "tally"));
    assert_eq!(roles(&server, OURS).unwrap(), ["active"]);
    assert_eq!(roles(&server, "standard").unwrap(), ["previous"]);
    // The same connection still reads the value that was set before the promotion.
    assert_eq!(store.get("key"), Some(b"value".to_vec()));

    let back = policy(&server, &["rollback"]).code(0).text();
    assert!(back.starts_with("rolled back to standard "), "{back}");
    assert!(!answers(&server, "tally"));
    policy(&server, &["rollback"]).fails(1, "nothing to go back to");
    policy(&server, &["unload", OURS]).code(0);
    assert_eq!(roles(&server, OURS), None);
    policy(&server, &["unload", "builtin"]).fails(1, "comes with the program");
}

#[test]
fn policy_that_uses_too_much_fuel_is_rolled_back() {
    let server = Server::with("", &["--guard-fuel", "100"]);
    policy(&server, &["load", "--promote", &ours()]).code(0);
    let mut store = server.store("client");
    for _ in 0..99 {
        store.get("key");
    }
    assert_eq!(roles(&server, OURS).unwrap(), ["active"]);
    store.get("key");
    assert_eq!(roles(&server, "standard").unwrap(), ["active"]);
    let list = policy(&server, &["list"]).code(0).text();
    let why = "fuel per request over its last 100 requests";
    assert!(list.contains(why), "{list}");
}

#[test]
fn load_with_promote_activates_and_list_prints_a_table() {
    let server = Server::start();
    policy(&server, &["load", "--promote", &ours()]).code(0);
    assert!(answers(&server, "tally"));
    let table = policy(&server, &["list"]).code(0).text();
    let lines: Vec<&str> = table.lines().collect();
    assert!(
        lines[0].starts_with("policy ") && lines[0].ends_with("fuel max"),
        "{table}"
    );
    let mine = lines.iter().find(|line| line.starts_with(OURS)).unwrap();
    let cells: Vec<&str> = mine.split_whitespace().collect();
    assert_eq!(
        (cells[2], cells[3], cells[4]),
        ("active", "1", "0"),
        "{table}"
    );
    let view = policy(&server, &["promote", "builtin", "--json"]);
    let view = view.code(0).object();
    assert_eq!(view["name"], "standard");
    assert_eq!(view["digest"].as_str().unwrap().len(), 64);
}

/// The assignment of policies survives both kill -9 and SIGTERM.
#[test]
fn restart_keeps_the_assigned_policies() {
    let mut server = Server::restartable(&[]);
    let faulty = policies::faulty();
    policy(&server, &["load", faulty]).code(0);
    policy(&server, &["load", "--promote", &ours()]).code(0);
    policy(&server, &["route", "broken/", "faulty"]).code(0);
    let before = listing(&server)["assignment"].clone();
    server.kill_and_restart();
    assert_eq!(listing(&server)["assignment"], before);
    assert!(answers(&server, "tally"));
    let routes = server.stdout();
    assert!(
        routes
            .iter()
            .any(|line| line.starts_with("keys under broken/: policy faulty")),
        "{routes:?}"
    );

    policy(&server, &["rollback"]).code(0);
    server.stop();
    server.restart();
    assert!(!answers(&server, "tally"));
    assert_eq!(roles(&server, "faulty").unwrap(), ["routed"]);
}

/// The routed policy fails on a value that the standard policy accepts.
#[test]
fn route_applies_to_its_keys_only() {
    let server = Server::start();
    policy(&server, &["load", policies::faulty()]).code(0);
    let fails = |key: &str| {
        let answer = server.store("asking").ask(&["SET", key, "panic"]);
        match answer.payload() {
            b"+OK\r\n" => false,
            b"-ERR internal error\r\n" => true,
            _ => panic!("{:?}", answer.text()),
        }
    };
    assert!(!fails("lab/key"));
    policy(&server, &["route", "lab/", "faulty"]).code(0);
    assert!(fails("lab/key") && !fails("key"));
    let table = policy(&server, &["list"]).code(0).text();
    assert!(table.contains("keys under lab/: faulty@"), "{table}");
    policy(&server, &["unload", "faulty"]).fails(1, "route");
    policy(&server, &["route", "lab/", "--off"]).code(0);
    assert!(!fails("lab/key"));
    policy(&server, &["route", "lab/", "--off"]).fails(1, "no route");
}

#[test]
fn route_takes_a_prefix_of_any_bytes() {
    let server = Server::start();
    let route = |last: &str| {
        let mut route = command(&["policy", "route"]);
        route.arg(OsStr::from_bytes(b"b\xff/")).arg(last);
        route.current_dir(server.directory());
        finish(route, b"").code(0)
    };
    route("builtin");
    let prefix = &listing(&server)["assignment"]["routes"][0]["prefix"];
    assert_eq!(*prefix, serde_json::json!({ "base64": "Yv8v" }));
    let table = policy(&server, &["list"]).code(0).text();
    assert!(table.contains("keys under b\\xff/: standard@"), "{table}");
    route("--off");
    let table = policy(&server, &["list"]).code(0).text();
    assert!(!table.contains("keys under"), "{table}");
}

/// The shadow policy handles a copy of each request. Its answers are compared and never sent.
#[test]
fn shadow_is_compared_and_never_answers_clients() {
    let server = Server::start();
    policy(&server, &["load", &ours()]).code(0);
    policy(&server, &["shadow", OURS]).code(0);
    let diff = |json: bool| policy(&server, if json { &["diff", "--json"] } else { &["diff"] });
    let compared = || diff(true).object();
    for json in [false, true] {
        diff(json).fails(1, "nothing was compared yet");
    }
    server.store("client").set("key", "value");
    let report = eventually("one request is compared", || {
        let report = compared();
        (report["compared"] == 1).then_some(report)
    });
    assert_eq!(report["same"], 1, "{report}");
    diff(false).code(0);
    assert!(!answers(&server, "tally"));
    let report = eventually("the difference is seen", || {
        let report = compared();
        (report["different_answer"] == 1).then_some(report)
    });
    assert_eq!(report["examples"][0]["request"][0], "TALLY", "{report}");
    let text = diff(false).code(1).text();
    assert_contains!(text, "TALLY tally", "different answers");
    assert_eq!(roles(&server, OURS).unwrap(), ["shadow"]);
    policy(&server, &["shadow", "--off"]).code(0);
    assert_eq!(roles(&server, OURS).unwrap(), [""; 0]);
    policy(&server, &["shadow", "builtin"]).fails(1, "active");
    policy(&server, &["shadow", OURS, "--sample", "0%"]).fails(2, "0.1%");
    policy(&server, &["shadow", OURS, "--sample", "12.5%"]).code(0);
    assert_eq!(listing(&server)["assignment"]["shadow"]["per_mille"], 125);
}

/// Bytes are escaped once, and versions are those of the store.
#[test]
fn difference_is_shown_with_bytes_and_versions() {
    let server = Server::start();
    let once = policies::example("write-once");
    policy(&server, &["load", once.to_str().unwrap()]).code(0);
    policy(&server, &["shadow", "write-once"]).code(0);
    let mut store = server.store("client");
    store.set("once/\t", "a\\");
    let version = store.set("once/\t", "b\\");
    let text = eventually("the difference is seen", || {
        let ran = policy(&server, &["diff"]);
        let text = ran.text();
        text.contains("    request   ").then(|| ran.code(1).text())
    });
    for line in [
        "    request   SET once/\\t b\\\\\n".to_owned(),
        format!("    active    +OK\\r\\n, version {version}\n"),
        "              put once/\\t = b\\\\\n".to_owned(),
    ] {
        assert!(text.contains(&line), "{line}\n---\n{text}");
    }
}

/// Regression: such a pattern was accepted and matched only a literal bracket.
#[test]
fn canary_pattern_with_an_unclosed_bracket_is_refused() {
    let server = Server::start();
    policy(&server, &["load", &ours()]).code(0);
    let body = format!(r#"{{"policy":"{OURS}","rule":{{"keys":"["}}}}"#);
    let answer = Admin::of(&server).ask("PUT", "/v1/canary", body.as_bytes());
    assert_refused(answer, 422, "a `]` for each `[`");
    policy(&server, &["canary", OURS, "--clients", "press-[0-9"]).fails(4, "a `]` for each `[`");
}

#[test]
fn canary_answers_its_clients_only() {
    let mut server = Server::restartable(&[]);
    policy(&server, &["load", &ours()]).code(0);
    policy(&server, &["canary", OURS, "--percent", "0"]).code(2);
    policy(&server, &["canary", OURS, "--percent", "5", "--keys", "x"]).code(2);
    policy(&server, &["canary", OURS, "--clients", "other-*"]).code(0);
    assert!(!answers(&server, "tally"));
    policy(&server, &["canary", OURS, "--clients", "ask*"]).code(0);
    assert!(answers(&server, "tally"));
    server.kill_and_restart();
    assert!(answers(&server, "tally"));
    let table = policy(&server, &["list"]).code(0).text();
    assert_contains!(table, &format!("canary, clients ask*: {OURS}@"));
    policy(&server, &["canary", OURS, "--percent", "100"]).code(0);
    assert!(answers(&server, "tally"));
    policy(&server, &["canary", "--off"]).code(0);
    assert!(!answers(&server, "tally"));
}

#[test]
fn unusual_policy_name_is_refused() {
    let server = Server::start();
    policy(&server, &["promote", "a b/c\u{e9}"]).code(1);
    policy(&server, &["promote", ""]).fails(2, "NAME@VERSION");
}

/// Regression: the URL was too long for the admin API, and the error said that it is another
/// server.
#[test]
fn long_prefix_or_name_is_refused_with_its_limit() {
    let server = Server::start();
    for bytes in [1025, 40_000] {
        let long = "p".repeat(bytes);
        for end in ["builtin", "--off"] {
            policy(&server, &["route", &long, end]).fails(4, "a prefix must have 1 to 1024 bytes");
        }
        for command in ["promote", "unload", "logs"] {
            policy(&server, &[command, &long]).fails(2, "a policy is selected by");
        }
    }
}

#[test]
fn load_of_an_invalid_file_changes_nothing() {
    let server = Server::start();
    let before = listing(&server);
    for (name, bytes) in policies::INVALID {
        fs::write(server.directory().join(name), bytes).unwrap();
        policy(&server, &["load", name]).code(4);
    }
    assert_eq!(listing(&server), before);
}

#[test]
fn commands_without_a_store_report_it() {
    let directory = tempfile::tempdir().unwrap();
    let list = || run_in(directory.path(), &["policy", "list"]);
    list().fails(3, "statehouse serve");
    // A killed store leaves its admin file, but the address in it does not answer.
    let mut server = Server::restartable(&[]);
    server.kill();
    policy(&server, &["list"]).fails(3, "killed");
    server.restart_with(&[("admin", "off")]);
    policy(&server, &["list"]).code(3);
}

/// The command sometimes reported that the store was unreachable: the store had closed the
/// connection before it had received the whole file.
#[test]
fn large_upload_with_a_wrong_token_names_the_token() {
    let server = Server::start();
    let admin = Admin::of(&server);
    let file = fs::File::create(server.directory().join("large.wasm")).unwrap();
    file.set_len(30 << 20).unwrap();
    for _ in 0..5 {
        let mut load = command(&["policy", "load", "large.wasm", "--admin", &admin.url()]);
        load.current_dir(server.directory())
            .env("STATEHOUSE_ADMIN_TOKEN", "0123456789abcdef");
        finish(load, b"").fails(4, "the token is not the one");
    }
    let mut list = command(&["policy", "list", "--admin", "mqtts://localhost:1"]);
    list.env("STATEHOUSE_ADMIN_TOKEN", "0123456789abcdef");
    finish(list, b"").fails(2, "http://127.0.0.1");
}

/// A component that is not a policy. The store finds this out only after it has compiled every
/// function.
fn slow_to_compile() -> Vec<u8> {
    const FUNCTIONS: usize = 4_000;
    // (local.get 0), then 1000 times (local.get 0) (i64.mul) (i64.const 7) (i64.add), then the end.
    let steps = [0x20, 0, 0x7e, 0x42, 7, 0x7c].repeat(1_000);
    let body = [&[0, 0x20, 0][..], &steps, &[0x0b]].concat();
    let bodies = [leb(body.len()), body].concat().repeat(FUNCTIONS);
    component(&[
        // One type: a function from i64 to i64.
        section(1, &[1, 0x60, 1, 0x7e, 1, 0x7e]),
        section(3, &[leb(FUNCTIONS), vec![0; FUNCTIONS]].concat()),
        section(10, &[leb(FUNCTIONS), bodies].concat()),
    ])
}

#[test]
fn store_stops_while_a_policy_is_compiled() {
    let mut server = Server::start();
    let file = server.directory().join("slow.wasm");
    fs::write(&file, slow_to_compile()).unwrap();
    let directory = server.directory().to_owned();
    let loading = thread::spawn(move || {
        run_in(&directory, &["policy", "load", "slow.wasm"]);
    });
    let pid = server.pid().to_string();
    let is_child = |stat: &str| {
        // proc_pid_stat(5): the parent is the second field behind the name of the program.
        let fields = stat.rsplit_once(')').map(|(_, fields)| fields);
        fields.and_then(|it| it.split_whitespace().nth(1)) == Some(&*pid)
    };
    until("the compiler runs", || {
        let processes = fs::read_dir("/proc").unwrap();
        let mut processes = processes.map(|it| it.unwrap().path().join("stat"));
        processes.any(|it| fs::read_to_string(it).is_ok_and(|it| is_child(&it)))
    });
    server.signal("TERM");
    let status = server.wait(Duration::from_secs(5));
    assert!(status.success(), "{status}");
    loading.join().unwrap();
}
