//! The administration over HTTP: who gets in, and what is refused before it is read.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    os::unix::fs::PermissionsExt,
    time::Duration,
};

use serde_json::Value as Json;
use statehouse_tests::{Admin, Server, command, run_in};

use crate::{eventually, policy};

/// Where it is and what lets in.
struct Door {
    address: SocketAddr,
    token: String,
}

fn door(server: &Server) -> Door {
    let file = server.directory().join("statehouse-data/admin");
    let mode = std::fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let file: Json = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let url = file["url"].as_str().unwrap();
    Door {
        address: url.strip_prefix("http://").unwrap().parse().unwrap(),
        token: file["token"].as_str().unwrap().to_owned(),
    }
}

impl Door {
    fn open(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        stream
    }

    /// A request's head with a host and these lines.
    fn head(&self, first: &str, lines: &[&str]) -> String {
        let lines: String = lines.iter().map(|line| format!("{line}\r\n")).collect();
        format!(
            "{first} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n{lines}\r\n",
            self.address
        )
    }

    fn bearer(&self) -> String {
        format!("Authorization: Bearer {}", self.token)
    }

    /// Status and body.
    fn send(&self, bytes: &[u8]) -> (u16, String) {
        let mut stream = self.open();
        stream.write_all(bytes).unwrap();
        read(stream)
    }

    fn get(&self, path: &str) -> (u16, String) {
        let first = format!("GET {path}");
        self.send(self.head(&first, &[&self.bearer()]).as_bytes())
    }
}

fn read(mut stream: TcpStream) -> (u16, String) {
    let mut text = Vec::new();
    // It may be reset once the answer is out, where not all was read.
    let _ = stream.read_to_end(&mut text);
    let text = String::from_utf8(text).unwrap();
    let (head, body) = text
        .split_once("\r\n\r\n")
        .unwrap_or_else(|| panic!("no answer: {text:?}"));
    (head[9..12].parse().unwrap(), body.to_owned())
}

#[test]
fn only_who_can_read_the_data_directory_gets_in() {
    let server = Server::start();
    let door = door(&server);
    assert_eq!(door.get("/v1/policies").0, 200);
    let status = |lines: &[&str]| door.send(door.head("GET /v1/policies", lines).as_bytes()).0;
    assert_eq!(status(&[]), 401);
    assert_eq!(status(&["Authorization: Bearer wrong"]), 401);
    assert_eq!(
        status(&[&format!("Authorization: Bearer {}x", door.token)]),
        401
    );
    assert_eq!(
        status(&[&format!("Authorization: Basic {}", door.token)]),
        401
    );
    // A page in a browser of this machine: the token does not help it.
    assert_eq!(status(&[&door.bearer(), "Origin: http://127.0.0.1"]), 403);
    assert_eq!(status(&[&door.bearer(), "Origin: null"]), 403);
    let host = |host: &str| {
        let request = format!(
            "GET /metrics HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{}\r\n\r\n",
            door.bearer()
        );
        door.send(request.as_bytes()).0
    };
    assert_eq!(host("localhost"), 200);
    assert_eq!(host("store.example"), 403);
    let changed = door.send(door.head("POST /v1/rollback", &[]).as_bytes());
    assert_eq!(changed.0, 401, "{}", changed.1);
}

#[test]
fn a_request_that_repeats_a_header_with_one_value_is_refused() {
    let server = Server::start();
    let door = door(&server);
    for (path, second) in [
        ("/v1/policies", "Host: evil.example"),
        ("/v1/policies", "Authorization: Bearer other"),
        ("/livez", "Host: evil.example"),
    ] {
        let head = door.head(&format!("GET {path}"), &[&door.bearer(), second]);
        let (status, answer) = door.send(head.as_bytes());
        assert!(
            status == 400 && answer.contains("more than one"),
            "{path}, {second}: {status} {answer}"
        );
    }
}

#[test]
fn paths_methods_and_bodies_that_are_none() {
    let server = Server::start();
    let door = door(&server);
    let send = |first: &str, body: &str| {
        let length = format!("Content-Length: {}", body.len());
        let head = door.head(first, &[&door.bearer(), &length]);
        let (status, answer) = door.send((head + body).as_bytes());
        let answer: Json = serde_json::from_str(&answer).unwrap();
        assert!(answer["error"].is_string(), "{first}: {answer}");
        status
    };
    for (first, body, status) in [
        ("GET /", "", 404),
        ("GET /v2/policies", "", 404),
        ("PATCH /v1/policies", "", 405),
        ("GET /v1/policies/%zz", "", 400),
        ("POST /v1/policies", "", 422),
        ("POST /v1/policies/nonsense/promote", "", 404),
        ("DELETE /v1/policies/nonsense", "", 404),
        ("DELETE /v1/policies/builtin", "", 409),
        ("POST /v1/rollback", "", 409),
        ("PUT /v1/routes", "{}", 400),
        ("PUT /v1/routes?prefix=a", "", 400),
        (
            "PUT /v1/routes?prefix=a",
            "{\"policy\":\"builtin\",\"x\":1}",
            400,
        ),
        ("PUT /v1/routes?prefix=", "{\"policy\":\"builtin\"}", 422),
        ("PUT /v1/routes?prefix=a", "{\"policy\":\"nonsense\"}", 404),
        ("DELETE /v1/routes?prefix=a", "", 404),
    ] {
        assert_eq!(send(first, body), status, "{first} {body}");
    }
}

#[test]
fn a_body_that_is_too_large_is_refused_before_it_is_read() {
    let server = Server::start();
    let door = door(&server);
    let bearer = door.bearer();
    let memory_kib = server.memory_kib();
    // Nothing of it is sent.
    let head = door.head("POST /v1/policies", &[&bearer, "Content-Length: 104857600"]);
    assert_eq!(door.send(head.as_bytes()).0, 413);
    // Its length is not said.
    let head = door.head(
        "PUT /v1/routes?prefix=a",
        &[&bearer, "Transfer-Encoding: chunked"],
    );
    let body = format!("8000\r\n{}\r\n0\r\n\r\n", " ".repeat(0x8000));
    assert_eq!(door.send((head + &body).as_bytes()).0, 413);
    // Without the token not even its size is looked at.
    let head = door.head("POST /v1/policies", &["Content-Length: 104857600"]);
    assert_eq!(door.send(head.as_bytes()).0, 401);
    let long = format!("X: {}", "x".repeat(64 << 10));
    let status = door
        .send(door.head("GET /v1/policies", &[&bearer, &long]).as_bytes())
        .0;
    assert!((400..500).contains(&status), "{status}");
    assert!(server.memory_kib() < memory_kib + 32 * 1024);
    assert_eq!(door.get("/v1/policies").0, 200);
}

/// Opens many connections that send a part of a request each, and leaves them open.
fn hold(door: &Door, count: usize, part: &str) -> Vec<TcpStream> {
    let mut held: Vec<TcpStream> = (0..count).map(|_| door.open()).collect();
    for stream in &mut held {
        // The oldest were closed by now.
        _ = stream.write_all(part.as_bytes());
    }
    held
}

#[test]
fn half_sent_requests_keep_neither_probes_nor_operators_out() {
    let server = Server::start();
    let door = door(&server);
    let mut slow = hold(&door, 300, "GET /v1/policies HTTP/1.1\r\nHost: ");
    // A body that does not come, and an answer that is not read, both without a token.
    let body = door.head("POST /v1/policies", &["Content-Length: 1000"]);
    let _slow_bodies = hold(&door, 64, &body);
    let unread = door.head("GET /livez", &[]).repeat(10);
    let _unread = hold(&door, 64, &unread);
    for _ in 0..100 {
        assert_eq!(door.send(door.head("GET /livez", &[]).as_bytes()).0, 200);
        assert_eq!(door.get("/metrics").0, 200);
    }
    // The oldest was closed for newer ones, without waiting for the time of its head to be over.
    let mut nothing = Vec::new();
    let ended = slow[0].read_to_end(&mut nothing);
    assert!(ended.is_ok() && nothing.is_empty() || ended.is_err());
}

/// Operators who hold all their seats keep out operators only.
#[test]
fn connections_of_operators_keep_no_probe_out() {
    let server = Server::start();
    let door = door(&server);
    let bearer = door.bearer();
    let body = door.head("POST /v1/policies", &[&bearer, "Content-Length: 1000"]);
    let held = hold(&door, 16, &body);
    let mut refused = 503;
    for _ in 0..100 {
        assert_eq!(door.send(door.head("GET /livez", &[]).as_bytes()).0, 200);
        refused = door.get("/v1/policies").0;
    }
    assert_eq!(refused, 503);
    drop(held);
    let again = || (door.get("/v1/policies").0 == 200).then_some(());
    eventually("the seats are free again", again);
}

#[test]
fn without_a_token_of_the_operator_the_address_is_loopback_or_none() {
    let directory = tempfile::tempdir().unwrap();
    for address in ["0.0.0.0:0", "192.0.2.1:80", "[::]:0"] {
        run_in(directory.path(), &["serve", "--admin", address], b"")
            .code(2)
            .says("STATEHOUSE_ADMIN_TOKEN")
            .says("ssh -L");
    }
    run_in(directory.path(), &["serve", "--admin", "nonsense"], b"")
        .code(2)
        .says("off");
    let server = Server::with("admin = \"off\"", &[]);
    assert!(!server.directory().join("statehouse-data/admin").exists());
    let server = Server::with("admin = \"[::1]:0\"", &[]);
    policy(&server, &["list"]).code(0);
}

#[test]
fn the_file_goes_with_the_store() {
    let mut server = Server::start();
    let first = door(&server).token;
    server.signal("TERM");
    server.wait(Duration::from_secs(20));
    assert!(!server.directory().join("statehouse-data/admin").exists());
    server.restart();
    assert_ne!(door(&server).token, first);
}

/// Nothing is kept, so nobody could be told a token there: whoever starts the store names one.
#[test]
fn in_memory_the_token_comes_from_the_environment() {
    let mut serve = command(&["serve", "--listen", "127.0.0.1:0", "--durability", "memory"]);
    let server = Server::spawn(serve, tempfile::tempdir().unwrap());
    server.wait_for_log("the administration is off");
    assert!(!server.directory().join("statehouse-data").exists());

    serve = command(&["serve", "--listen", "127.0.0.1:0", "--durability", "memory"]);
    let token = "0123456789abcdef";
    serve.env("STATEHOUSE_ADMIN_TOKEN", token);
    let server = Server::spawn(serve, tempfile::tempdir().unwrap());
    let line = server.wait_for_log("the administration listens on");
    let url = &line[line.find("http://").unwrap()..];
    let list = |token: Option<&str>| {
        let mut list = command(&["policy", "list", "--admin", url]);
        if let Some(token) = token {
            list.env("STATEHOUSE_ADMIN_TOKEN", token);
        }
        statehouse_tests::command::finish(list, b"")
    };
    assert!(list(Some(token)).code(0).text().contains("standard@"));
    list(Some("fedcba9876543210")).code(4).says("token");
    list(None).code(2).says("STATEHOUSE_ADMIN_TOKEN");

    serve = command(&["serve", "--listen", "127.0.0.1:0", "--durability", "memory"]);
    serve.env("STATEHOUSE_ADMIN_TOKEN", "short");
    statehouse_tests::command::finish(serve, b"")
        .code(2)
        .says("guessed");
}

#[test]
fn metrics_are_openmetrics() {
    let server = Server::start();
    let mut store = server.store("client");
    store.set("key", "value");
    let (status, page) = door(&server).get("/metrics");
    assert_eq!(status, 200);
    assert!(page.ends_with("# EOF\n"), "{page}");
    assert!(page.contains("\nstatehouse_keys 1\n"), "{page}");
    for line in [
        "statehouse_sessions 1",
        "statehouse_messages_in_total 1",
        "statehouse_throttled_total 0",
    ] {
        assert!(page.contains(&format!("\n{line}\n")), "{line}: {page}");
    }
    let mut families = Vec::new();
    for line in page.lines() {
        if let Some(family) = line.strip_prefix("# TYPE ") {
            let (name, kind) = family.split_once(' ').unwrap();
            assert!(
                !families.iter().any(|(known, _)| *known == name),
                "{name} twice"
            );
            families.push((name, kind));
        } else if !line.starts_with('#') {
            let (sample, value) = line.rsplit_once(' ').unwrap();
            let (family, kind) = families.last().unwrap();
            let name = sample.split('{').next().unwrap();
            let suffix = if *kind == "counter" { "_total" } else { "" };
            assert_eq!(name, format!("{family}{suffix}"));
            value.parse::<u64>().unwrap();
        }
    }
    let set = page
        .lines()
        .find(|line| line.contains("command=\"SET\""))
        .unwrap();
    assert!(
        set.starts_with("statehouse_policy_command_requests_total{policy=\"standard\",version=\""),
        "{set}"
    );
    assert!(set.ends_with("} 1"), "{set}");
}

/// What supervisors ask has no token, and tells nothing but yes or no.
#[test]
fn what_operators_do_is_in_the_audit_log_and_so_is_who_was_none() {
    let server = Server::start();
    let admin = Admin::of(&server);
    let promoted = admin.ask("POST", "/v1/policies/standard/promote", b"");
    admin.ask("DELETE", "/v1/policies/nobody", b"");
    let door = door(&server);
    let stranger = door.head("POST /v1/policies", &["Authorization: Bearer guess"]);
    assert_eq!(door.send(stranger.as_bytes()).0, 401);
    server.wait_for_log("what=\"administer\"");
    let acts: Vec<String> = (server.stderr().into_iter())
        .filter(|it| it.contains("statehouse::audit"))
        .collect();
    let says = |words: &[&str]| {
        let is_it = |line: &&String| words.iter().all(|word| line.contains(word));
        assert!(
            acts.iter().any(|it| is_it(&it)),
            "{words:?} are not in {acts:#?}"
        );
    };
    says(&[
        "POST",
        "/v1/policies/standard/promote",
        &promoted.0.to_string(),
    ]);
    says(&["DELETE", "/v1/policies/nobody", "404"]);
    says(&["refused", "administer", "token"]);
    let (_, metrics) = admin.ask("GET", "/metrics", b"");
    let counted = "statehouse_access_refused_total{what=\"administer\"} 1";
    assert!(metrics.contains(counted), "{metrics}");
}

#[test]
fn anybody_on_this_machine_may_ask_whether_it_is_well() {
    let server = Server::start();
    let door = door(&server);
    for path in ["/livez", "/readyz"] {
        let asked = door.head(&format!("GET {path}"), &[]);
        assert_eq!(
            door.send(asked.as_bytes()),
            (200, "{}".to_owned()),
            "{path}"
        );
        let told = door.head(&format!("POST {path}"), &[]);
        assert_eq!(door.send(told.as_bytes()).0, 401, "{path}");
    }
}

#[test]
fn a_token_of_the_operator_opens_the_administration_to_other_machines() {
    let token = "a token that its operator has chosen, and nobody guesses";
    let mut command = command(&["serve", "--listen", "127.0.0.1:0", "--admin", "0.0.0.0:0"]);
    command.env("STATEHOUSE_ADMIN_TOKEN", token);
    let server = Server::spawn(command, tempfile::tempdir().unwrap());
    let mut door = door(&server);
    assert_eq!(door.token, token);
    door.address.set_ip([127, 0, 0, 1].into());
    let elsewhere = "GET /metrics HTTP/1.1\r\nHost: store.example\r\nConnection: close\r\n";
    let bare = format!("{elsewhere}\r\n");
    assert_eq!(door.send(bare.as_bytes()).0, 401);
    let shown = format!("{elsewhere}{}\r\n\r\n", door.bearer());
    assert_eq!(door.send(shown.as_bytes()).0, 200);
}
