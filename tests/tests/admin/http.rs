//! Tests the admin API over HTTP: authentication, hostile requests and limits. A request
//! without the token must be refused before its body is read.

use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    os::unix::fs::PermissionsExt,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value as Json;
use statehouse_tests::{Admin, Server, admin::assert_refused, command, run_in};

use crate::{eventually, policy};

/// The address and the token of the admin API.
struct Api {
    address: SocketAddr,
    token: String,
}

fn api(server: &Server) -> Api {
    let file = server.directory().join("statehouse-data/admin");
    let mode = std::fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let file: Json = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let url = file["url"].as_str().unwrap();
    Api {
        address: url.strip_prefix("http://").unwrap().parse().unwrap(),
        token: file["token"].as_str().unwrap().to_owned(),
    }
}

impl Api {
    fn open(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        stream
    }

    /// The head of a request with a `Host` header and these lines.
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

    /// Sends a request. Returns the status and the body of the answer.
    fn send(&self, bytes: &[u8]) -> (u16, String) {
        let mut stream = self.open();
        stream.write_all(bytes).unwrap();
        read(stream)
    }

    /// Sends a request without a body.
    fn ask(&self, first: &str, lines: &[&str]) -> (u16, String) {
        self.send(self.head(first, lines).as_bytes())
    }

    fn get(&self, path: &str) -> (u16, String) {
        self.ask(&format!("GET {path}"), &[&self.bearer()])
    }
}

fn read(mut stream: TcpStream) -> (u16, String) {
    let mut text = Vec::new();
    // The server may reset the connection after its answer if it has not read the whole request.
    let _ = stream.read_to_end(&mut text);
    let text = String::from_utf8(text).unwrap();
    let (head, body) = text
        .split_once("\r\n\r\n")
        .unwrap_or_else(|| panic!("no answer: {text:?}"));
    (head[9..12].parse().unwrap(), body.to_owned())
}

#[test]
fn request_without_the_token_of_the_data_directory_fails() {
    let server = Server::start();
    let api = api(&server);
    assert_eq!(api.get("/v1/policies").0, 200);
    let status = |lines: &[&str]| api.ask("GET /v1/policies", lines).0;
    assert_eq!(status(&[]), 401);
    assert_eq!(status(&["Authorization: Bearer wrong"]), 401);
    assert_eq!(
        status(&[&format!("Authorization: Bearer {}x", api.token)]),
        401
    );
    assert_eq!(
        status(&[&format!("Authorization: Basic {}", api.token)]),
        401
    );
    let host = |host: &str| {
        let request = format!(
            "GET /metrics HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{}\r\n\r\n",
            api.bearer()
        );
        api.send(request.as_bytes()).0
    };
    assert_eq!(host("localhost"), 200);
    assert_eq!(host("store.example"), 403);
    let changed = api.ask("POST /v1/rollback", &[]);
    assert_eq!(changed.0, 401, "{}", changed.1);
}

#[test]
fn repeated_single_value_header_is_refused() {
    let server = Server::start();
    let api = api(&server);
    for (path, second) in [
        ("/v1/policies", "Host: evil.example"),
        ("/v1/policies", "Authorization: Bearer other"),
        ("/livez", "Host: evil.example"),
    ] {
        let answer = api.ask(&format!("GET {path}"), &[&api.bearer(), second]);
        println!("{path}, {second}");
        assert_refused(answer, 400, "more than one");
    }
}

/// Regression: the body was stored without decoding it.
#[test]
fn transfer_encoding_other_than_chunked_is_refused() {
    let server = Server::start();
    let api = api(&server);
    for (encodings, expected) in [
        (&["gzip, chunked"][..], 501),
        (&["gzip", "chunked"][..], 501),
        (&["chunked"][..], 200),
    ] {
        let encodings = encodings
            .iter()
            .map(|it| format!("Transfer-Encoding: {it}"));
        let lines: Vec<_> = encodings.chain([api.bearer()]).collect();
        let lines: Vec<_> = lines.iter().map(String::as_str).collect();
        let head = api.head("PUT /v1/key?key=a", &lines);
        let (status, answer) = api.send(format!("{head}3\r\nabc\r\n0\r\n\r\n").as_bytes());
        assert_eq!(status, expected, "{lines:?}: {answer}");
    }
}

#[test]
fn request_of_http_1_1_without_a_host_is_refused() {
    let server = Server::start();
    let api = api(&server);
    for (path, version, host, status) in [
        ("/livez", "1.1", "", 400),
        ("/livez", "1.1", "Host:\r\n", 400),
        ("/v1/policies", "1.1", "", 400),
        ("/livez", "1.1", "Host: store.example\r\n", 200),
        ("/livez", "1.0", "", 200),
    ] {
        let request = format!(
            "GET {path} HTTP/{version}\r\n{host}{}\r\nConnection: close\r\n\r\n",
            api.bearer()
        );
        let (got, answer) = api.send(request.as_bytes());
        assert_eq!(got, status, "{request}: {answer}");
    }
}

#[test]
fn invalid_path_method_or_body_is_a_client_error() {
    let server = Server::start();
    let api = api(&server);
    let send = |first: &str, body: &str| {
        let length = format!("Content-Length: {}", body.len());
        let head = api.head(first, &[&api.bearer(), &length]);
        let (status, answer) = api.send((head + body).as_bytes());
        let answer: Json = serde_json::from_str(&answer).unwrap();
        assert!(answer["error"].is_string(), "{first}: {answer}");
        status
    };
    for (first, body, status) in [
        ("GET /nothing", "", 404),
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
fn canary_with_a_wrong_rule_learns_what_a_rule_is() {
    let server = Server::start();
    let admin = Admin::of(&server);
    for rule in [r#"{}"#, r#"{"percent":5,"clients":"a"}"#, r#"[]"#] {
        let body = format!(r#"{{"policy":"builtin","rule":{rule}}}"#);
        let says = "exactly one of `percent`, `clients` and `keys`";
        println!("{rule}");
        assert_refused(admin.ask("PUT", "/v1/canary", body.as_bytes()), 400, says);
    }
    for percent in ["2.5", "-1", "300", "null", "\"5 %\""] {
        let body = format!(r#"{{"policy":"builtin","rule":{{"percent":{percent}}}}}"#);
        let says = "`percent` is a whole number from 1 to 100";
        println!("{percent}");
        assert_refused(admin.ask("PUT", "/v1/canary", body.as_bytes()), 400, says);
    }
}

#[test]
fn wrong_method_names_the_methods_of_the_resource() {
    let server = Server::start();
    let api = api(&server);
    for (first, allowed) in [
        ("POST /livez", "GET, HEAD"),
        ("DELETE /readyz", "GET, HEAD"),
        ("POST /", "GET, HEAD"),
        ("PUT /v1/overview", "GET, HEAD"),
        ("PATCH /v1/policies", "GET, HEAD, POST"),
        ("POST /v1/key?key=k", "GET, HEAD, PUT, DELETE"),
    ] {
        let mut stream = api.open();
        let head = api.head(first, &[&api.bearer(), "Content-Length: 3"]);
        stream.write_all((head + "abc").as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let is_refused = answer.starts_with("HTTP/1.1 405 ")
            && answer.contains(&format!("\r\nallow: {allowed}\r\n"));
        assert!(is_refused, "{first}: {answer}");
    }
}

/// An act that took place must not be missing in the audit log.
#[test]
fn act_of_a_client_that_closes_its_connection_is_logged() {
    let server = Server::start();
    let (api, admin) = (api(&server), Admin::of(&server));
    for number in 0..60 {
        let first = format!("PUT /v1/key?key=closes-{number}");
        let head = api.head(&first, &[&api.bearer(), "Content-Length: 1"]);
        let mut stream = api.open();
        stream.write_all((head + "x").as_bytes()).unwrap();
        thread::sleep(Duration::from_micros(20 * number));
        drop(stream);
        if number % 10 == 9 {
            eventually("room for more connections", || {
                (admin.ask("GET", "/v1/session", b"").0 == 200).then_some(())
            });
        }
    }
    eventually("every change in the log", || {
        let keys = admin.done("GET", "/v1/keys?prefix=closes-", b"");
        let keys = keys["entries"].as_array().unwrap().len();
        let acts = admin.done("GET", "/v1/events?kind=act", b"");
        let acts = acts["events"].as_array().unwrap().iter();
        let acts = acts.filter(|it| it["fields"]["path"] == "/v1/key").count();
        println!("{keys} keys were set, {acts} acts are in the log");
        (keys > 0 && acts >= keys).then_some(())
    });
}

#[test]
fn slow_upload_of_a_policy_delays_no_other() {
    let server = Server::start();
    let (api, admin) = (api(&server), Admin::of(&server));
    let mut slow = Vec::new();
    // The last one waits for room.
    for length in [
        "Content-Length: 100000",
        "Transfer-Encoding: chunked",
        "Content-Length: 67108864",
    ] {
        let head = api.head("POST /v1/policies", &[&api.bearer(), length]);
        let mut stream = api.open();
        stream.write_all(head.as_bytes()).unwrap();
        slow.push(stream);
        thread::sleep(Duration::from_millis(100));
    }
    let began = Instant::now();
    assert_eq!(admin.ask("POST", "/v1/policies", b"no policy").0, 422);
    // The others end after 10 s without a byte, and then the waiting one.
    assert!(began.elapsed() < Duration::from_secs(10));
}

/// Regression: it kept its room for a minute, and all others were refused meanwhile.
#[test]
fn stalled_upload_of_the_largest_size_ends_and_gives_back_its_room() {
    let server = Server::start();
    let (api, admin) = (api(&server), Admin::of(&server));
    let head = api.head(
        "POST /v1/policies",
        &[&api.bearer(), "Content-Length: 67108864"],
    );
    let mut stalled = api.open();
    stalled.write_all((head + "8 bytes.").as_bytes()).unwrap();
    thread::sleep(Duration::from_millis(100));
    // Waits for the room of the stalled one.
    assert_eq!(admin.ask("POST", "/v1/policies", b"no policy").0, 422);
    assert_eq!(read(stalled).0, 408);
}

#[test]
fn too_large_body_is_refused_before_it_is_read() {
    let server = Server::start();
    let api = api(&server);
    let bearer = api.bearer();
    let memory_kib = server.memory_kib();
    // The head alone: none of the body is sent.
    let length = "Content-Length: 104857600";
    assert_eq!(api.ask("POST /v1/policies", &[&bearer, length]).0, 413);
    // A chunked body does not announce its length.
    let head = api.head(
        "PUT /v1/routes?prefix=a",
        &[&bearer, "Transfer-Encoding: chunked"],
    );
    let body = format!("8000\r\n{}\r\n0\r\n\r\n", " ".repeat(0x8000));
    assert_eq!(api.send((head + &body).as_bytes()).0, 413);
    // The token is checked before the length of the body.
    assert_eq!(api.ask("POST /v1/policies", &[length]).0, 401);
    let long = format!("X: {}", "x".repeat(64 << 10));
    let (status, _) = api.ask("GET /v1/policies", &[&bearer, &long]);
    assert!((400..500).contains(&status), "{status}");
    assert!(server.memory_kib() < memory_kib + 32 * 1024);
    assert_eq!(api.get("/v1/policies").0, 200);
}

/// A connection that is closed with unread bytes is reset, and the reset can overtake the answer.
#[test]
fn answer_arrives_although_the_body_is_not_read() {
    let server = Server::start();
    let (api, admin) = (api(&server), Admin::of(&server));
    let large = vec![b'x'; 8 << 20];
    for (method, path, body, status) in [
        ("PUT", "/v1/routes?prefix=a", &large[..], 413),
        ("PUT", "/v1/key?key=k", &large[..], 413),
        ("PUT", "/v1/key?key=k&px=0", &large[..], 400),
        ("DELETE", "/v1/key?key=k&fence=x", &large[..], 400),
        ("POST", "/v1/rollback", &large[..], 409),
        ("POST", "/v1/session", &large[..], 200),
    ] {
        for _ in 0..3 {
            assert_eq!(admin.ask(method, path, body).0, status, "{method} {path}");
        }
    }
    // A chunked body does not announce its length.
    let bearer = api.bearer();
    for (second, status) in [("X: y", 413), ("Host: evil.example", 400)] {
        let lines = [&*bearer, second, "Transfer-Encoding: chunked"];
        let head = api.head("PUT /v1/routes?prefix=a", &lines);
        let mut stream = api.open();
        stream.write_all(head.as_bytes()).unwrap();
        write!(stream, "{:x}\r\n", large.len()).unwrap();
        stream.write_all(&large).unwrap();
        stream.write_all(b"\r\n0\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let expected = format!("HTTP/1.1 {status} ");
        assert!(answer.starts_with(&expected), "{second}: {answer}");
    }
}

/// Opens `count` connections, sends a part of a request on each, and leaves them open.
fn hold(api: &Api, count: usize, part: &str) -> Vec<TcpStream> {
    let mut held: Vec<TcpStream> = (0..count).map(|_| api.open()).collect();
    for stream in &mut held {
        // The server may have closed the oldest connections by now.
        _ = stream.write_all(part.as_bytes());
    }
    held
}

#[test]
fn half_sent_requests_block_neither_probes_nor_operators() {
    let server = Server::start();
    let api = api(&server);
    let began = Instant::now();
    let mut slow = hold(&api, 300, "GET /v1/policies HTTP/1.1\r\nHost: ");
    // The server closes the oldest connection in favor of newer ones, before the timeout for its
    // head, which is ten seconds.
    let mut nothing = Vec::new();
    let ended = slow[0].read_to_end(&mut nothing).map_err(|it| it.kind());
    assert!(
        matches!(ended, Ok(0) | Err(ErrorKind::ConnectionReset)),
        "{ended:?}"
    );
    assert!(
        began.elapsed() < Duration::from_secs(8),
        "after its time-out"
    );
    // Without a token: bodies that never arrive, and answers that are never read.
    let body = api.head("POST /v1/policies", &["Content-Length: 1000"]);
    let _slow_bodies = hold(&api, 64, &body);
    let unread = api.head("GET /livez", &[]).repeat(10);
    let _unread = hold(&api, 64, &unread);
    for _ in 0..100 {
        assert_eq!(api.ask("GET /livez", &[]).0, 200);
        assert_eq!(api.get("/metrics").0, 200);
    }
}

/// Operators who use all connections for operators block only other operators.
#[test]
fn connections_of_operators_do_not_block_probes() {
    let server = Server::start();
    let api = api(&server);
    let bearer = api.bearer();
    let body = api.head("POST /v1/policies", &[&bearer, "Content-Length: 1000"]);
    let held = hold(&api, 32, &body);
    let mut refused = 503;
    for _ in 0..100 {
        assert_eq!(api.ask("GET /livez", &[]).0, 200);
        refused = api.get("/v1/policies").0;
    }
    assert_eq!(refused, 503);
    let upload = Admin::of(&server).ask("POST", "/v1/policies", &vec![0; 8 << 20]);
    assert_eq!(upload.0, 503, "{}", upload.1);
    drop(held);
    let again = || (api.get("/v1/policies").0 == 200).then_some(());
    eventually("connections for operators are free again", again);
}

#[test]
fn admin_address_without_an_operator_token_is_loopback() {
    let directory = tempfile::tempdir().unwrap();
    for address in ["0.0.0.0:0", "192.0.2.1:80", "[::]:0"] {
        run_in(directory.path(), &["serve", "--admin", address])
            .fails(2, "STATEHOUSE_ADMIN_TOKEN")
            .says("ssh -L");
    }
    run_in(directory.path(), &["serve", "--admin", "nonsense"]).fails(2, "off");
    let server = Server::with("admin = \"off\"", &[]);
    assert!(!server.directory().join("statehouse-data/admin").exists());
    let server = Server::with("admin = \"[::1]:0\"", &[]);
    policy(&server, &["list"]).code(0);
}

#[test]
fn admin_file_is_removed_when_the_store_stops() {
    let mut server = Server::start();
    let first = api(&server).token;
    server.stop();
    assert!(!server.directory().join("statehouse-data/admin").exists());
    server.restart();
    assert_ne!(api(&server).token, first);
}

/// A store in memory has no data directory that could hold a token file, so the operator must
/// choose the token.
#[test]
fn token_in_memory_comes_from_the_environment() {
    let mut serve = command(&["serve", "--listen", "127.0.0.1:0", "--durability", "memory"]);
    let server = Server::spawn(serve, tempfile::tempdir().unwrap());
    server.wait_for_log("the admin API is off");
    assert!(!server.data_directory().exists());

    serve = command(&["serve", "--listen", "127.0.0.1:0", "--durability", "memory"]);
    let token = "0123456789abcdef";
    serve.env("STATEHOUSE_ADMIN_TOKEN", token);
    let server = Server::spawn(serve, tempfile::tempdir().unwrap());
    let line = server.wait_for_log("the admin API listens on");
    let url = &line[line.find("http://").unwrap()..];
    let list = |token: Option<&str>| {
        let mut list = command(&["policy", "list", "--admin", url]);
        if let Some(token) = token {
            list.env("STATEHOUSE_ADMIN_TOKEN", token);
        }
        statehouse_tests::command::finish(list, b"")
    };
    assert!(list(Some(token)).code(0).text().contains("standard@"));
    list(Some("fedcba9876543210")).fails(4, "token");
    list(None).fails(2, "STATEHOUSE_ADMIN_TOKEN");
    list(Some("")).fails(2, "needs the store's token");
    list(Some("0123456789abcdef\n")).fails(2, "without a space or a line end");

    serve = command(&["serve", "--listen", "127.0.0.1:0", "--durability", "memory"]);
    serve.env("STATEHOUSE_ADMIN_TOKEN", "short");
    statehouse_tests::command::finish(serve, b"").fails(2, "guessed");
}

#[test]
fn audit_log_names_operator_actions_and_refused_requests() {
    let server = Server::start();
    let admin = Admin::of(&server);
    let promoted = admin.ask("POST", "/v1/policies/standard/promote", b"");
    admin.ask("DELETE", "/v1/policies/missing", b"");
    admin.ask("POST", "/v1/cluster/handover?to=gw-2", b"");
    let api = api(&server);
    let stranger = ["Authorization: Bearer guess"];
    assert_eq!(api.ask("POST /v1/policies", &stranger).0, 401);
    server.wait_for_log("what=\"administer\"");
    let acts: Vec<String> = (server.stderr().into_iter())
        .filter(|it| it.contains("statehouse::audit"))
        .collect();
    let logged = |words: &[&str]| {
        let matches = |line: &&String| words.iter().all(|word| line.contains(word));
        assert!(
            acts.iter().any(|it| matches(&it)),
            "{words:?} are not in {acts:#?}"
        );
    };
    logged(&[
        "POST",
        "/v1/policies/standard/promote",
        &promoted.0.to_string(),
    ]);
    logged(&["DELETE", "/v1/policies/missing", "404"]);
    logged(&["POST", "/v1/cluster/handover?to=gw-2"]);
    logged(&["refused", "administer", "token"]);
    assert_eq!(server.refused("administer"), 1);
}

/// A line of `/v1/events` is cut. An operator chooses the path, which must not displace the rest.
#[test]
fn act_with_a_long_path_keeps_its_user_and_status() {
    let server = Server::start();
    let admin = Admin::of(&server);
    let name = "x".repeat(4000);
    for (method, path, named) in [
        (
            "DELETE",
            format!("/v1/clients?{}id=press-4", "&".repeat(2100)),
            "/v1/clients?id=press-4",
        ),
        (
            "POST",
            format!("/v1/policies/{name}/promote"),
            "/v1/policies/xxx",
        ),
    ] {
        let (status, _) = admin.ask(method, &path, b"");
        let events = admin.done("GET", "/v1/events?kind=act", b"");
        let acts = events["events"].as_array().unwrap();
        let fields = &acts.last().unwrap()["fields"];
        assert_eq!(fields["method"], method, "{fields}");
        assert_eq!(fields["user"], "-", "{fields}");
        assert_eq!(fields["status"], status.to_string(), "{fields}");
        let logged = fields["path"].as_str().unwrap();
        assert!(logged.starts_with(named), "{fields}");
    }
}

/// Health probes need no token. Their answer is only a status code.
#[test]
fn health_probes_need_no_token() {
    let server = Server::start();
    let api = api(&server);
    for path in ["/livez", "/readyz"] {
        let asked = api.ask(&format!("GET {path}"), &[]);
        assert_eq!(asked, (200, "{}".to_owned()), "{path}");
        assert_eq!(api.ask(&format!("POST {path}"), &[]).0, 405, "{path}");
    }
}

#[test]
fn operator_token_allows_requests_from_other_machines() {
    let token = "a token that the operator has chosen and is hard to guess";
    let mut command = command(&["serve", "--listen", "127.0.0.1:0", "--admin", "0.0.0.0:0"]);
    command.env("STATEHOUSE_ADMIN_TOKEN", token);
    let server = Server::spawn(command, tempfile::tempdir().unwrap());
    let mut api = api(&server);
    assert_eq!(api.token, token);
    api.address.set_ip([127, 0, 0, 1].into());
    let elsewhere = "GET /metrics HTTP/1.1\r\nHost: store.example\r\nConnection: close\r\n";
    let bare = format!("{elsewhere}\r\n");
    assert_eq!(api.send(bare.as_bytes()).0, 401);
    // Regression: the line had no address.
    let line = server.wait_for_log("what=\"administer\"");
    assert!(line.contains("peer=\"127.0.0.1:"), "{line}");
    let shown = format!("{elsewhere}{}\r\n\r\n", api.bearer());
    assert_eq!(api.send(shown.as_bytes()).0, 200);
}
