//! The admin API over TLS. Users must be able to do what their role allows and nothing more.
//! Commands must work on a store of another machine.

mod commands;
mod page;
mod plant;

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value as Json;
use statehouse_tests::{
    Mosquitto, Server, admin::Admin, assert_contains, client::PATIENCE, run, wait::until,
};

use crate::authority::Authority;
use plant::{PASSWORD, Plant, basic};

#[test]
fn users_are_operators_behind_a_foreign_broker() {
    let broker = Mosquitto::start();
    let plant = Plant::serve(|settings| {
        let settings = [settings, &[("presence", "off")]].concat();
        Server::attached(&broker.url(), broker.address(), &settings)
    });
    plant.server.store("client").set("key", "value");
    let history = ["history", "key", "--json"];
    let found = plant.run_as("reader", &history).code(0).text();
    assert!(found.contains("\"value\":\"value\""), "{found}");
    plant.run_as("client", &history).fails(4, "has no role");
    plant
        .server
        .wait_for_log("user=\"client\" peer=\"127.0.0.1:");
    let rollback = ["policy", "rollback"];
    plant
        .run_as("reader", &rollback)
        .fails(4, "needs the role operate");
    let (status, _) = plant.ask("GET", "/v1/usage", &basic("reader", "wrong"));
    assert_eq!(status, 401);
}

/// Regression: only the listeners of clients warned, and such a store has none.
#[test]
fn changed_certificate_of_operators_alone_causes_a_warning() {
    let broker = Mosquitto::start();
    let plant = Plant::serve(|settings| {
        let settings = [settings, &[("presence", "off")]].concat();
        Server::attached(&broker.url(), broker.address(), &settings)
    });
    let (certificate, key) = (plant.file("server.crt"), plant.file("server.key"));
    let directory = Path::new(&certificate).parent().unwrap();
    let of_client = Authority::new(directory, "other").client("press-4", 7);
    fs::rename(of_client.key, key).unwrap();
    fs::rename(of_client.certificate, certificate).unwrap();
    plant.server.reload();
    let line = plant.server.wait_for_log("is not for a server");
    assert_contains!(line, "WARN", "server.crt", "CN=press-4");
}

/// Each endpoint with the role that it needs. The path names things that do not exist.
const ENDPOINTS: [(&str, &str, &str); 31] = [
    ("GET", "/v1/session", "read"),
    ("GET", "/v1/policies", "read"),
    ("GET", "/v1/log", "read"),
    ("GET", "/v1/shadow", "read"),
    ("POST", "/v1/authz", "read"),
    ("GET", "/v1/usage", "read"),
    ("GET", "/v1/clients", "read"),
    ("GET", "/v1/events", "read"),
    ("GET", "/v1/overview", "read"),
    ("GET", "/v1/keys", "read"),
    ("GET", "/v1/key?key=k", "read"),
    ("GET", "/v1/changes?prefix=%zz", "read"),
    ("PUT", "/v1/key?key=k", "operate"),
    ("DELETE", "/v1/key?key=k", "operate"),
    ("GET", "/v1/history?key=k", "read"),
    ("GET", "/v1/value?key=k&as_of=0s", "read"),
    ("GET", "/v1/replay", "read"),
    ("GET", "/metrics", "read"),
    ("DELETE", "/v1/policies/none", "operate"),
    ("POST", "/v1/policies/none/promote", "operate"),
    ("POST", "/v1/rollback", "operate"),
    ("PUT", "/v1/shadow", "operate"),
    ("PUT", "/v1/canary", "operate"),
    ("PUT", "/v1/routes?prefix=x", "operate"),
    ("DELETE", "/v1/routes?prefix=x", "operate"),
    ("DELETE", "/v1/clients/watcher", "operate"),
    ("DELETE", "/v1/clients?id=none", "operate"),
    ("POST", "/v1/cluster/handover", "operate"),
    ("POST", "/v1/cluster/upgrade", "operate"),
    ("POST", "/v1/policies", "ship"),
    ("POST", "/v1/replay", "ship"),
];

#[test]
fn roles_decide_what_users_do_over_tls() {
    let plant = Plant::start();
    let mut watcher = plant.server.store("watcher");
    watcher.set("k", "v");
    let admin = Admin::of(&plant.server);
    let state = || {
        let policies = admin.done("GET", "/v1/policies", b"");
        let clients = admin.done("GET", "/v1/clients?clients=9", b"");
        (policies["assignment"].clone(), clients["connected"].clone())
    };
    let before = state();
    for (method, path, role) in ENDPOINTS {
        let (below, enough) = match role {
            "read" => ("client", "reader"),
            "operate" => ("reader", "operator"),
            _ => ("operator", "shipper"),
        };
        let (status, body) = plant.as_user(below, method, path);
        let says = format!("needs the role {role}");
        assert!(
            status == 403 && body.contains(&says) && body.contains(below),
            "{method} {path}: {status} {body}"
        );
        assert_eq!(state(), before, "{method} {path} was refused");
        let (status, body) = match path {
            "/v1/clients/watcher" => plant.as_user(enough, method, "/v1/clients/none"),
            _ => plant.as_user(enough, method, path),
        };
        assert!(
            ![401, 403, 405].contains(&status),
            "{method} {path}: {status} {body}"
        );
    }
    assert_eq!(
        plant.as_user("operator", "DELETE", "/v1/clients/watcher").0,
        200
    );
    assert_eq!(plant.as_user("shipper", "GET", "/v1/nothing").0, 404);
    // A changed role holds for the next request.
    let users = plant.file("users");
    run(&["user", "role", "client", "read", "--users", &users], b"").code(0);
    until("the role is read again", || {
        let (status, _) = plant.as_user("client", "GET", "/v1/usage");
        status == 200
    });
    // A stream ends with the role that it needs, long before its time is over.
    let began = Instant::now();
    let stream = thread::scope(|scope| {
        let stream = scope.spawn(|| plant.as_user("client", "GET", "/v1/live"));
        thread::sleep(Duration::from_millis(500));
        run(&["user", "role", "client", "none", "--users", &users], b"").code(0);
        stream.join().unwrap()
    });
    assert!(stream.0 == 200 && stream.1.contains("event: overview"));
    assert!(began.elapsed() < Duration::from_secs(20));
    assert_eq!(plant.as_user("client", "GET", "/v1/live").0, 403);
}

/// Otherwise a user who may only read could lock out all others.
#[test]
fn one_user_has_a_part_of_the_connections() {
    let plant = Plant::start();
    let mut open: Vec<_> = (0..8).map(|_| plant.keep_open("reader")).collect();
    let (status, body) = plant.as_user("reader", "GET", "/v1/usage");
    assert!(status == 503 && body.contains("this user"), "{body}");
    assert_eq!(plant.as_user("operator", "GET", "/v1/usage").0, 200);
    open.pop();
    until("a connection has ended", || {
        plant.as_user("reader", "GET", "/v1/usage").0 == 200
    });
}

/// The log has room for ten lines of a kind in a second.
#[test]
fn flood_without_a_login_hides_no_refused_user() {
    let plant = Plant::start();
    let (is_over, began) = (AtomicBool::new(false), Instant::now());
    thread::scope(|scope| {
        // The time limit ends it if the test fails.
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) && began.elapsed() < PATIENCE {
                assert_eq!(plant.ask("GET", "/v1/usage", "").0, 401);
            }
        });
        until("the log leaves out refusals", || {
            plant.server.refused("administer") > 20
        });
        for number in 0..5 {
            let path = format!("/v1/policies/none-{number}/promote");
            assert_eq!(plant.as_user("reader", "POST", &path).0, 403);
        }
        is_over.store(true, Ordering::Relaxed);
    });
    for number in 0..5 {
        let line = plant.server.wait_for_log(&format!("none-{number}/promote"));
        assert!(line.contains("user=\"reader\""), "{line}");
    }
}

/// Regression: their refused requests, with a body that never ends, took the places of operators.
#[test]
fn users_without_a_role_take_no_place_of_operators() {
    let plant = Plant::start();
    let mut open = Vec::new();
    for _ in 0..9 {
        let (stream, status) =
            plant.begin("client", "POST /v1/rollback", "Content-Length: 100\r\n");
        assert_eq!(status, "403");
        open.push(stream);
    }
}

#[test]
fn only_credentials_are_admitted_over_tls() {
    let plant = Plant::start();
    let status = |headers: &str| plant.ask("GET", "/v1/usage", headers).0;
    let right = basic("reader", PASSWORD);
    assert_eq!(status(&right), 200);
    let token = fs::read(plant.server.directory().join("statehouse-data/admin")).unwrap();
    let token: Json = serde_json::from_slice(&token).unwrap();
    let token = token["token"].as_str().unwrap();
    assert_eq!(status(&format!("Authorization: Bearer {token}\r\n")), 200);
    assert_eq!(status("Authorization: Bearer wrong\r\n"), 401);
    assert_eq!(status(""), 401);
    assert_eq!(status("Authorization: Basic ?\r\n"), 400);
    assert_eq!(
        status(&format!("Origin: https://evil.example\r\n{right}")),
        403
    );
    let rebound = format!("GET /v1/usage HTTP/1.1\r\nHost: evil.example\r\n{right}\r\n");
    assert_eq!(plant.send(&rebound).0, 403);
    // Probes need no login.
    assert_eq!(plant.ask("GET", "/readyz", "").0, 200);

    let refused = plant.server.refused("authenticate");
    let (code, body) = plant.ask("GET", "/v1/usage", &basic("reader", "wrong"));
    assert_eq!(
        (code, body.contains("wrong user name or password")),
        (401, true)
    );
    assert_eq!(status(&basic("nobody", PASSWORD)), 401);
    assert_eq!(plant.server.refused("authenticate"), refused + 2);
    let log = plant.server.wait_for_log("user=\"nobody\"");
    assert_contains!(log, "statehouse::audit", "127.0.0.1:");

    // The commands: a wrong password, no answer, another CA, and no TLS.
    let wrong = plant.file("wrong");
    fs::write(&wrong, "wrong").unwrap();
    let (url, ca) = (plant.url(), plant.file("ca.crt"));
    let usage = [
        "usage",
        "--user",
        "reader",
        "--password-file",
        &wrong,
        "--admin",
    ];
    let ran = plant.run(&[&usage[..], &[&url, "--ca", &ca]].concat());
    ran.fails(4, "wrong user name or password");
    let stranger = plant.file("stranger.crt");
    let ran = plant.run(&[&usage[..], &[&url, "--ca", &stranger]].concat());
    ran.fails(3, "--ca FILE");
    let ran = plant.run(&[&usage[..], &["https://127.0.0.1:1", "--ca", &ca]].concat());
    ran.fails(3, "connection refused");
    let plain = format!("https://127.0.0.1:{}", plant.server.port());
    let ran = plant.run(&[&usage[..], &[&plain, "--ca", &ca]].concat());
    ran.code(3);
    let mut socket = TcpStream::connect(plant.address).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(socket, "GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    _ = socket.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");

    // Guesses are limited as those of clients are, and do not lock out a user who has logged in.
    let long = "x".repeat(1100);
    let guesses = (0..40).map(|_| status(&basic("operator", &long)));
    assert!(guesses.into_iter().any(|status| status == 429));
    assert_eq!(status(&right), 200);
}

#[test]
fn sessions_of_users_end_with_their_role() {
    let plant = Plant::start();
    let log_in = |user: &str| {
        let (status, body) = plant.as_user(user, "POST", "/v1/session");
        assert_eq!(status, 200, "{body}");
        let begun: Json = serde_json::from_str(&body).unwrap();
        assert_eq!(begun["user"], user);
        format!(
            "Authorization: Bearer {}\r\n",
            begun["session"].as_str().unwrap()
        )
    };
    assert_eq!(plant.as_user("client", "POST", "/v1/session").0, 403);
    let wrong = basic("reader", "wrong");
    assert_eq!(plant.ask("POST", "/v1/session", &wrong).0, 401);
    let (reader, operator) = (log_in("reader"), log_in("operator"));
    let status = |method: &str, path: &str, session: &str| plant.ask(method, path, session).0;
    assert_eq!(status("GET", "/v1/usage", &reader), 200);
    assert_eq!(status("POST", "/v1/rollback", &reader), 403);
    assert_eq!(status("POST", "/v1/rollback", &operator), 409);
    // Changes, which history names the user of.
    assert_eq!(status("PUT", "/v1/key?key=edited", &reader), 403);
    assert_eq!(status("DELETE", "/v1/key?key=edited", &reader), 403);
    assert_eq!(status("PUT", "/v1/key?key=edited", &operator), 200);
    let (_, history) = plant.ask("GET", "/v1/history?key=edited", &reader);
    let history: Json = serde_json::from_str(&history).unwrap();
    let changes = history["changes"].as_array().unwrap();
    assert_eq!(changes.len(), 1, "{history}");
    assert_eq!(changes[0]["user"], "operator", "{history}");
    assert_eq!(changes[0]["client"], "$operator", "{history}");
    // The page of this address, and another one.
    let host = plant.address;
    let own = format!("Origin: https://{host}\r\nSec-Fetch-Site: same-origin\r\n{reader}");
    assert_eq!(status("GET", "/v1/usage", &own), 200);
    let plain = format!("Origin: http://{host}\r\n{reader}");
    assert_eq!(status("GET", "/v1/usage", &plain), 403);
    assert_eq!(plant.ask("GET", "/", "").0, 200);
    // A session of this address means nothing at the other one.
    let local = Admin::of(&plant.server);
    let secret = reader.trim_end().rsplit_once(' ').unwrap().1;
    assert_eq!(local.with_token(secret).ask("GET", "/v1/usage", b"").0, 401);

    let users = plant.file("users");
    run(
        &["user", "role", "reader", "operate", "--users", &users],
        b"",
    )
    .code(0);
    until("the session ends", || {
        status("GET", "/v1/usage", &reader) == 401
    });
    assert_eq!(status("GET", "/v1/usage", &operator), 200);
    let again = log_in("reader");
    assert_eq!(status("POST", "/v1/rollback", &again), 409);
}
