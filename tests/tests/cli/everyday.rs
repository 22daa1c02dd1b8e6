//! Tests commands of everyday use: `call`, `export`, `import`, and options that show or change more
//! than one value.

use std::{
    fs,
    io::{Read, Write},
    net::TcpListener,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use statehouse_tests::{
    Hlc, Property, Publish, Server, assert_contains, command, policies, run, server::own_address,
};

use crate::{ask, ask_with};

fn version(server: &Server, key: &str) -> String {
    let got = ask(server, &["get", key, "--json"]).code(0).object();
    got["version"].as_str().unwrap().to_owned()
}

#[test]
fn call_prints_any_response() {
    let server = Server::start();
    assert_eq!(
        ask(&server, &["call", "SET", "k", "v"]).code(0).text(),
        "OK\n"
    );
    let got = ask(&server, &["call", "get", "k", "--with-version"]).code(0);
    assert_eq!(got.text(), format!("{}\nv\n", version(&server, "k")));
    assert_eq!(ask(&server, &["call", "GET", "none"]).code(1).text(), "\n");
    assert_eq!(ask(&server, &["call", "DEL", "none"]).code(0).text(), "0\n");
    let scan = ask(&server, &["call", "SCAN", "*", "--json"])
        .code(0)
        .object();
    assert_eq!(scan, json!({ "value": [["k"]], "version": null }));
    ask(&server, &["call"]).code(2);
}

#[test]
fn set_if_version_applies_to_that_version_only() {
    let server = Server::start();
    let absent = ["set", "k", "a", "--if-version", "1:0:StateStore"];
    ask(&server, &absent).fails(1, "does not exist");
    let absent = ask(&server, &[&absent[..], &["--json"]].concat())
        .code(1)
        .object();
    assert_eq!(absent["applied"], false);
    assert_eq!(absent["version"], Value::Null);

    ask(&server, &["set", "k", "a"]).code(0);
    let first = version(&server, "k");
    ask(&server, &["set", "k", "b", "--if-version", &first]).code(0);
    let second = version(&server, "k");
    ask(&server, &["set", "k", "c", "--if-version", &first]).fails(1, &second);
    assert_eq!(ask(&server, &["get", "k"]).code(0).text(), "b");
    ask(&server, &["set", "k", "c", "--if-version", &first, "--nx"]).code(2);
}

#[test]
fn meta_shows_expiry_and_fence() {
    let server = Server::start();
    ask(&server, &["get", "k", "--meta"]).fails(1, "does not exist");
    ask(&server, &["set", "lock", "holder"]).code(0);
    let fence = version(&server, "lock");
    let set = [
        "set",
        "k",
        "value",
        "--ttl",
        "1h",
        "--fencing-token",
        &fence,
    ];
    ask(&server, &set).code(0);
    let meta = ask(&server, &["get", "k", "--meta", "--json"])
        .code(0)
        .object();
    assert_eq!(meta["bytes"], 5);
    assert_eq!(meta["fencing_token"], json!(fence));
    let ttl = meta["ttl_ms"].as_u64().unwrap();
    assert!((3_500_000..=3_600_000).contains(&ttl), "{meta}");
    let text = ask(&server, &["get", "k", "--meta"]).code(0).text();
    assert_contains!(
        text,
        "version  ",
        "bytes    5\n",
        "expires  20",
        &format!("fence    {fence}\n")
    );
}

#[test]
fn scan_prints_values_or_metadata() {
    let server = Server::start();
    ask(&server, &["set", "a", "tab\there"]).code(0);
    ask(&server, &["set", "b", "", "--ttl", "1h"]).code(0);
    let values = ask(&server, &["scan", "--values"]).code(0).text();
    assert_eq!(values, "a\ttab\\there\nb\t\n");
    let long = ask(&server, &["scan", "--long"]).code(0).text();
    let lines: Vec<Vec<&str>> = long.lines().map(|it| it.split('\t').collect()).collect();
    assert_eq!(lines[0], [&*version(&server, "a"), "8", "-", "a"]);
    assert!(
        lines[1][2].ends_with('s') && lines[1][2].starts_with("3"),
        "{long}"
    );
    let objects = ask(&server, &["scan", "b", "--long", "--json"]).code(0);
    assert_eq!(objects.object()["bytes"], json!(0));
    ask(&server, &["scan", "none", "--values"]).code(1);
    ask(&server, &["scan", "--values", "--long"]).code(2);
}

#[test]
fn del_prefix_deletes_exactly_these_keys() {
    let server = Server::start();
    let mut store = server.store("writer");
    for number in 0..300 {
        store.set(format!("old*/{number}"), "v");
    }
    store.set("old", "stays");
    store.set("old1/0", "stays");
    ask(&server, &["del", "--prefix", "old*/"])
        .code(0)
        .says("300 keys");
    assert_eq!(ask(&server, &["scan"]).code(0).text(), "old\nold1/0\n");
    ask(&server, &["del", "--prefix", "old*/"]).code(1);
    ask(&server, &["del", "--prefix", "a", "b"]).code(2);
}

/// Regression: it stopped at the first key that the store refused to delete, printed a wrong
/// number, and stopped at the same key when it was repeated.
#[test]
fn del_prefix_deletes_the_keys_beside_a_fenced_one() {
    let server = Server::start();
    let mut store = server.store("writer");
    for number in 100..300 {
        store.set(format!("k/{number}"), "v");
    }
    let token = "009999999999999:00000:writer";
    ask(&server, &["set", "k/120", "a", "--fencing-token", token]).code(4);
    let lock = store.set("lock", "1").to_string();
    ask(&server, &["set", "k/120", "a", "--fencing-token", &lock]).code(0);
    ask(&server, &["del", "--prefix", "k/"]).fails(4, "1 key refused, 199 keys deleted");
    assert_eq!(ask(&server, &["scan", "k/*"]).code(0).text(), "k/120\n");
    let del = ["del", "--prefix", "k/", "--fencing-token", &lock];
    ask(&server, &del).code(0);
}

#[test]
fn import_restores_what_export_wrote() {
    let (source, target) = (Server::start(), Server::start());
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("all.jsonl");
    let path = file.to_str().unwrap();
    let bytes: Vec<u8> = (0..=255).collect();
    ask_with(&source, &["set", "bytes"], &bytes).code(0);
    ask(&source, &["set", "expires", "x", "--ttl", "1h"]).code(0);
    let fence = version(&source, "bytes");
    ask(&source, &["set", "fenced", "x", "--fencing-token", &fence]).code(0);
    let mut writer = source.store("writer");
    for number in 0..200 {
        writer.set(format!("n{number:03}"), number.to_string());
    }
    ask(&source, &["set", "soon", "x", "--px", "3000"]).code(0);
    let exported = ask(&source, &["export"]).code(0).says("204 keys");
    fs::write(&file, &exported.stdout).unwrap();
    while ask(&source, &["get", "soon"]).code == Some(0) {
        std::thread::sleep(Duration::from_millis(50));
    }

    ask(&target, &["import", path])
        .code(0)
        .says("203 keys imported, 1 expired");
    assert_eq!(ask(&target, &["get", "bytes"]).code(0).stdout, bytes);
    let meta = |key| {
        ask(&target, &["get", key, "--meta", "--json"])
            .code(0)
            .object()
    };
    assert!(meta("expires")["ttl_ms"].as_u64().unwrap() > 3_000_000);
    assert_eq!(meta("fenced")["fencing_token"], json!(fence));
    ask(&target, &["set", "n001", "changed"]).code(0);
    let again = ask_with(&target, &["import", "--nx", "--json"], &exported.stdout).code(0);
    assert_eq!(
        again.object(),
        json!({ "imported": 0, "expired": 1, "existing": 203 })
    );
    assert_eq!(ask(&target, &["get", "n001"]).code(0).text(), "changed");
    // The store checks the fence of a key first, and would refuse the line.
    let line = b"{\"key\":\"fenced\",\"value\":\"old\"}\n";
    let fenced = ask_with(&target, &["import", "--nx"], line).code(0);
    fenced.says("0 keys imported, 1 existed already");
    ask_with(&target, &["import"], line).fails(
        4,
        "Continue with --skip 0, or behind this line with --skip 1",
    );
    // Regression: it named a flag that `import` does not have.
    ask_with(&target, &["import"], line)
        .fails(4, "fenced: the store refused: a fencing token is required")
        .says("Add \"fence\" to the line");

    let keys = ask(&source, &["export", "n*", "--after", "n197"]).code(0);
    let keys = keys.objects();
    assert_eq!(keys.len(), 2);
    assert_eq!(keys[0]["key"], "n198");
    assert_eq!(keys[1]["value"], "199");
}

/// In an earlier version, the expiries of all later keys were left out, with exit code 0.
#[test]
fn export_fails_if_the_expiry_of_a_key_cannot_be_read() {
    let policy = policies::marked("everyday");
    let server = Server::with("", &["--policy", policy.to_str().unwrap()]);
    for key in ["a", "bad-meta", "early", "later"] {
        ask(&server, &["set", key, "x", "--ttl", "1h"]).code(0);
    }
    // Keys before it that are read together with it are written.
    let failed = ask(&server, &["export"]).code(4);
    let failed = failed.says("internal error").says("bad-meta");
    let failed = failed.says("1 key written; continue with --after='a'");
    let failed = failed.says("--after='bad-meta' leaves out only the key that failed");
    check_expiries(&failed.objects(), &["a"]);
    // Without a key before it there is nothing to continue.
    let failed = ask(&server, &["export", "[b-z]*"]).code(4);
    let failed = failed.says("--after='bad-meta' leaves out only the key that failed");
    check_expiries(&failed.objects(), &[]);
    assert!(!failed.stderr.contains("continue with"), "{failed:#?}");
    let rest = ask(&server, &["export", "--after", "bad-meta"]).code(0);
    check_expiries(&rest.objects(), &["early", "later"]);
    // A response that the client cannot read names the key too.
    ask(&server, &["set", "odd-meta", "x", "--ttl", "1h"]).code(0);
    let failed = ask(&server, &["export", "[e-z]*"]).code(3);
    let failed = failed.says("protocol? The key is odd-meta. 2 keys written");
    let failed = failed.says("--after='odd-meta' leaves out only the key that failed");
    check_expiries(&failed.objects(), &["early", "later"]);
    ask(&server, &["scan", "odd*", "--long"]).fails(3, "The key is odd-meta");
}

/// Asserts that an export has these keys, with their expiries.
fn check_expiries(lines: &[Value], keys: &[&str]) {
    let exported: Vec<_> = lines.iter().map(|it| it["key"].as_str().unwrap()).collect();
    assert_eq!(exported, keys);
    assert!(lines.iter().all(|it| it["expires_ms"].is_u64()));
}

/// Every command that prints versions must write them alike, so that each can be given to any
/// other.
#[test]
fn versions_have_one_format_in_all_commands() {
    let server = Server::start();
    ask(&server, &["set", "lock", "me"]).code(0);
    let fence = version(&server, "lock");
    ask(&server, &["set", "k", "a", "--fencing-token", &fence]).code(0);
    let first = version(&server, "k");
    ask(&server, &["set", "k", "b", "--fencing-token", &fence]).code(0);
    let second = version(&server, "k");
    let data = &server.data();
    for (arguments, code) in [
        (&["get", "k", "--with-version"][..], 0),
        (&["get", "k", "--json"], 0),
        (&["get", "k", "--meta"], 0),
        (&["get", "k", "--meta", "--json"], 0),
        (
            &[
                "get",
                "k",
                "--as-of",
                &first,
                "--with-version",
                "--data",
                data,
            ],
            0,
        ),
        (&["call", "GET", "k", "--with-version"], 0),
        (&["call", "GET", "k", "--json"], 0),
        (&["call", "META", "k"], 0),
        (&["scan", "k", "--long"], 0),
        (&["scan", "k", "--long", "--json"], 0),
        (&["export", "k"], 0),
        (&["watch", "k", "--from", &first, "--count", "1"], 0),
        (
            &["watch", "k", "--from", &first, "--count", "1", "--json"],
            0,
        ),
        (
            &[
                "set",
                "k",
                "c",
                "--if-version",
                &first,
                "--fencing-token",
                &fence,
            ],
            1,
        ),
        (
            &["set", "k", "c", "--nx", "--json", "--fencing-token", &fence],
            1,
        ),
        (&["del", "k", "--json", "--fencing-token", &fence], 0),
    ] {
        let ran = ask(&server, arguments).code(code);
        assert_padded(&format!("{}\n{}", ran.text(), ran.stderr));
    }
    for arguments in [
        &["history", "k", "--data", data][..],
        &["history", "k", "--data", data, "--json"],
        &["explain", "--data", data, "--", "GET", "lock"],
        &["explain", "--data", data, "--json", "--", "SET", "n", "v"],
    ] {
        assert_padded(&run(arguments, b"").code(0).text());
    }
    assert!(first < second, "padded versions sort as text");
}

/// Asserts that the text has a version, and that each one is padded.
fn assert_padded(text: &str) {
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, ':' | '_' | '@' | '.' | '-');
    let words = text.split(|c| !is_name(c));
    let versions = words.filter(|word| {
        let wall = word.split(':').next().unwrap();
        word.contains(':') && wall.len() >= 10 && wall.bytes().all(|it| it.is_ascii_digit())
    });
    let mut count = 0;
    for version in versions {
        Hlc::parse_padded(version.trim_end_matches('.')).unwrap();
        count += 1;
    }
    assert!(count > 0, "no version in {text}");
}

#[test]
fn export_and_import_show_their_progress_on_a_terminal() {
    let server = Server::start();
    let line = |number| format!("{{\"key\":\"k{number}\",\"value\":\"v\"}}\n");
    let lines: String = (0..5_000).map(line).collect();
    fs::write(server.directory().join("all.jsonl"), lines).unwrap();
    let shown = |arguments: &str, columns: u32, terminal: &str| {
        let program = command(&[]).get_program().to_owned();
        let program = program.to_str().unwrap();
        let line = format!("stty cols {columns}; exec {program} {arguments}");
        let mut script = Command::new("script");
        script.args(["--quiet", "--return", "--command", &line, "/dev/null"]);
        script.current_dir(server.directory());
        script.env("STATEHOUSE_PORT", server.port().to_string());
        script.env("TERM", terminal);
        let ran = command::finish(script, b"");
        ran.code(0).text()
    };
    for (arguments, columns, shows) in [
        ("import all.jsonl", 80, " %  "),
        ("export > copy.jsonl", 80, " keys written\x1b[K"),
        ("import all.jsonl", 24, "\x1b[K"),
    ] {
        let text = shown(arguments, columns, "xterm");
        let (progress, result) = text.rsplit_once("\r\x1b[K").unwrap();
        assert!(progress.contains(shows), "{text:?}");
        let end = "statehouse: 5000 keys ";
        assert!(result.starts_with(end), "the bar is erased: {result:?}");
        // A line that fills the terminal cannot be erased.
        let mut lines = progress.split('\r').map(|it| it.replace("\x1b[K", ""));
        let fits = |line: String| line.chars().count() < columns as usize;
        assert!(lines.all(fits), "{text:?}");
    }
    let plain = shown("import all.jsonl", 80, "dumb");
    assert!(!plain.contains('\x1b'), "{plain:?}");
}

/// Regression: it counted keys that were not read, with exit code 0.
#[test]
fn export_whose_reader_has_ended_fails() {
    let server = Server::start();
    ask(&server, &["set", "k", "v"]).code(0);
    let mut export = command(&["export"]);
    export.env("STATEHOUSE_PORT", server.port().to_string());
    export.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = export.spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("before all keys were written"), "{said}");
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn failed_import_names_the_line_to_go_on_with() {
    let server = Server::start();
    let lines = b"{\"key\":\"a\",\"value\":\"1\"}\n{\"key\":\"b\",\"value\":\"2\"}\nwhat\n{\"key\":\"c\",\"value\":\"3\"}\n";
    ask_with(&server, &["import"], lines).fails(
        2,
        "line 3; all lines before it are imported. Continue with --skip 2",
    );
    assert_eq!(ask(&server, &["scan"]).code(0).text(), "a\nb\n");
    ask_with(&server, &["import", "--skip", "3"], lines)
        .code(0)
        .says("1 key imported");
    assert_eq!(ask(&server, &["scan"]).code(0).text(), "a\nb\nc\n");
}

#[test]
fn lock_status_names_the_holder() {
    let server = Server::start();
    ask(&server, &["lock", "job", "--status"]).fails(1, "is free");
    ask(&server, &["set", "job", "anna", "--nex", "--ttl", "1h"]).code(0);
    let text = ask(&server, &["lock", "job", "--status"]).code(0).text();
    assert!(text.starts_with("holder   anna\nrenewed  20"), "{text}");
    let status = ask(&server, &["lock", "job", "--status", "--json"])
        .code(0)
        .object();
    assert_eq!(status["holder"], json!("anna"));
    assert_eq!(status["version"], json!(version(&server, "job")));
    // Only the history shows with which version the holder acquired the lock.
    assert_eq!(status["fencing_token"], json!(null));
    ask(&server, &["lock", "job", "--status", "--", "true"]).code(2);
}

#[test]
fn client_id_names_the_user() {
    let server = Server::with_config("log_filter = \"info,statehouse::request=debug\"\n");
    let port = server.port().to_string();
    let mut set = command(&["set", "k", "v", "--port", &port]);
    set.env("USER", "an na/#");
    command::finish(set, b"").code(0);
    server.wait_for_log("client=\"anna@");
}

#[test]
fn wrongly_built_requests_leave_a_line_with_the_remedy() {
    let server = Server::start();
    let topic = "statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/command/invoke";
    let get = b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n";
    let set = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1\r\nv\r\n";
    let complete = |payload: &[u8]| {
        let request = Publish::new(topic, payload).with(Property::ResponseTopic("r".into()));
        request.with(Property::CorrelationData(b"1".to_vec()))
    };
    let mut client = server.connect("press-4");
    client.publish(Publish::new(topic, get).qos(1));
    let uncorrelated = Publish::new(topic, get).with(Property::ResponseTopic("r".into()));
    server.connect("press-5").publish(uncorrelated.qos(1));
    let line = server.wait_for_log("client=\"press-5\"");
    assert!(line.contains("a request needs Correlation Data"), "{line}");
    for _ in 0..5 {
        client.publish(complete(set).qos(1));
    }
    client.send(&complete(get).qos(0).bytes());
    for (mistake, remedy) in [
        ("a request needs a Response Topic", "and Correlation Data"),
        ("a SET needs a timestamp", "__ts"),
        ("a request needs QoS 1", "publish it with QoS 1"),
    ] {
        let line = server.wait_for_log(mistake);
        assert!(line.contains("press-4") && line.contains(remedy), "{line}");
    }
    let lines = server.stderr();
    let repeated = lines.iter().filter(|it| it.contains("needs a timestamp"));
    assert_eq!(repeated.count(), 1, "{lines:#?}");
}

#[test]
fn ready_does_not_wait_for_a_store_that_hangs() {
    let server = Server::start();
    server.run(&["ready"]).code(0);
    server.signal("STOP");
    let begun = Instant::now();
    let ran = server.run(&["ready", "--wait", "1s"]);
    server.signal("CONT");
    ran.fails(3, "does not answer");
    assert!(begun.elapsed() < Duration::from_secs(30));
}

#[test]
fn ready_does_not_repeat_a_usage_error() {
    let begun = Instant::now();
    let arguments = ["ready", "--wait", "50s", "--admin", "nowhere"];
    run(&arguments, b"").code(2);
    assert!(begun.elapsed() < Duration::from_secs(30));
}

/// Regression: it demanded the token of the store.
#[test]
fn ready_needs_no_login_to_ask_an_address() {
    let admin = own_address().to_string();
    let server = Server::with("", &["--admin", &admin]);
    let url = format!("http://{admin}");
    let ready = ["ready", "--admin", &url];
    run(&ready, b"").code(0);
    drop(server);
    run(&ready, b"").fails(3, &format!("cannot reach {url}"));
}

/// Regression: the first address decided.
#[test]
fn ready_needs_one_of_several_hosts() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let unready = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = |it: &TcpListener| format!("http://{}", it.local_addr().unwrap());
    let others = format!("{},{}", url(&silent), url(&unready));
    thread::spawn(move || {
        for socket in unready.incoming() {
            let mut socket = socket.unwrap();
            _ = socket.read(&mut [0; 1024]);
            _ = socket.write_all(
                b"HTTP/1.1 503 \r\nContent-Length: 19\r\nConnection: close\r\n\r\n{\"error\":\"no link\"}",
            );
        }
    });
    let ready = |hosts: &str| run(&["ready", "--admin", hosts], b"");
    ready(&others).fails(3, &url(&silent)).says("no link");
    let admin = own_address();
    let _server = Server::with("", &["--admin", &admin.to_string()]);
    ready(&format!("{others},http://{admin}")).code(0);
}

/// Regression: a blank line at the end of a file failed, and a directory was not named.
#[test]
fn import_skips_blank_lines_and_names_its_file() {
    let server = Server::start();
    let lines = b"{\"key\":\"a\",\"value\":\"1\"}\n\n \t\r\n{\"key\":\"b\",\"value\":\"2\"}\n\n";
    ask_with(&server, &["import"], lines)
        .code(0)
        .says("2 keys imported");
    assert_eq!(ask(&server, &["scan"]).code(0).text(), "a\nb\n");
    // They count as lines.
    let lines = b"\n{\"key\":\"c\",\"value\":\"3\"}\n\nnonsense\n\n";
    ask_with(&server, &["import"], lines).fails(2, "This is line 4");
    ask_with(&server, &["import", "--skip", "4"], lines)
        .code(0)
        .says("0 keys imported");
    let directory = server.directory().to_str().unwrap();
    ask(&server, &["import", directory])
        .fails(2, &format!("cannot read {directory}: is a directory"));
}
