//! The admin API over TLS. Users must be able to do what their role allows and nothing more.
//! Commands must work on a store of another machine.

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    os::unix::fs::PermissionsExt,
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use data_encoding::BASE64;
use rustls::{ClientConfig, ClientConnection, StreamOwned, pki_types::ServerName};
use serde_json::Value as Json;
use statehouse_tests::{
    Browser, Mosquitto, Ran, Server,
    admin::Admin,
    client::PATIENCE,
    command,
    command::{finish, subcommands},
    policies, run,
    tls::trusting,
    wait::eventually,
};
use tempfile::TempDir;

use crate::{authority::Authority, tls::text};

const PASSWORD: &str = "right horse";

/// A store whose admin API listens over TLS, with a user for each role, and without one.
struct Plant {
    server: Server,
    files: TempDir,
    address: SocketAddr,
    config: Arc<ClientConfig>,
}

impl Plant {
    fn start(further: &[&str]) -> Plant {
        Plant::serve(|settings| {
            let flags = settings
                .iter()
                .map(|(name, _)| format!("--{}", name.replace('_', "-")));
            let flags: Vec<_> = flags.collect();
            let values = settings.iter().map(|(_, value)| *value);
            let own = flags.iter().map(String::as_str).zip(values);
            let own: Vec<_> = own.flat_map(|(name, value)| [name, value]).collect();
            Server::with("", &[&own[..], &["--allow-anonymous"], further].concat())
        })
    }

    /// Starts a server with these settings.
    fn serve(start: impl FnOnce(&[(&str, &str)]) -> Server) -> Plant {
        let files = tempfile::tempdir().unwrap();
        let path = |name: &str| text(&files.path().join(name));
        let authority = Authority::new(files.path(), "ca");
        Authority::new(files.path(), "stranger");
        let pair = authority.server("server");
        let users = path("users");
        let add = ["user", "add", "reader", "--role", "read", "--users", &users];
        run(
            &[&add[..], &["--password-stdin"]].concat(),
            PASSWORD.as_bytes(),
        )
        .code(0);
        let line = fs::read_to_string(&users).unwrap();
        let hash = line.trim().strip_prefix("reader:").unwrap();
        let hash = hash.strip_suffix(":read").unwrap();
        let lines = format!("{line}operator:{hash}:operate\nshipper:{hash}:ship\nclient:{hash}\n");
        fs::write(&users, lines).unwrap();
        fs::set_permissions(&users, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(path("password"), PASSWORD).unwrap();
        fs::set_permissions(path("password"), fs::Permissions::from_mode(0o600)).unwrap();
        let (certificate, key) = (text(&pair.certificate), text(&pair.key));
        let server = start(&[
            ("admin", "https://127.0.0.1:0"),
            ("users", &users),
            ("tls_cert", &certificate),
            ("tls_key", &key),
        ]);
        let line = server.wait_for_log("the administration listens on https://");
        let address = line.rsplit_once("https://").unwrap().1;
        let end = |c: char| !(c.is_ascii_digit() || c == '.' || c == ':');
        let address = address.split(end).next().unwrap().parse().unwrap();
        Plant {
            server,
            files,
            address,
            config: trusting(&authority.certificate),
        }
    }

    fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    fn file(&self, name: &str) -> String {
        text(&self.files.path().join(name))
    }

    /// Sends a request over TLS with further header lines. Returns the status and the body.
    fn ask(&self, method: &str, path: &str, headers: &str) -> (u16, String) {
        let host = self.address;
        self.send(&format!(
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\n{headers}Content-Length: 0\r\nConnection: close\r\n\r\n"
        ))
    }

    fn send(&self, request: &str) -> (u16, String) {
        let name = ServerName::try_from("localhost").unwrap();
        let connection = ClientConnection::new(self.config.clone(), name).unwrap();
        let socket = TcpStream::connect(self.address).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut stream = StreamOwned::new(connection, socket);
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = Vec::new();
        // The server may close without a close_notify.
        _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8(answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").expect("an HTTP response");
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, body.to_owned())
    }

    fn as_user(&self, user: &str, method: &str, path: &str) -> (u16, String) {
        self.ask(method, path, &basic(user, PASSWORD))
    }

    /// Runs a command with contexts of its own, and no other settings.
    fn run(&self, arguments: &[&str]) -> Ran {
        let mut command = command(arguments);
        command.env("XDG_CONFIG_HOME", self.files.path());
        command.current_dir(self.files.path());
        finish(command, b"")
    }

    /// Runs a command as a user. Flags name the store.
    fn run_as(&self, user: &str, arguments: &[&str]) -> Ran {
        let (url, ca, password) = (self.url(), self.file("ca.crt"), self.file("password"));
        let login = ["--admin", &url, "--ca", &ca, "--user", user];
        let password = ["--password-file", &password];
        self.run(&[arguments, &login, &password].concat())
    }
}

fn basic(user: &str, password: &str) -> String {
    let login = BASE64.encode(format!("{user}:{password}").as_bytes());
    format!("Authorization: Basic {login}\r\n")
}

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
    plant.run_as("client", &history).code(4).says("has no role");
    let rollback = ["policy", "rollback"];
    plant
        .run_as("reader", &rollback)
        .code(4)
        .says("needs the role operate");
    let (status, _) = plant.ask("GET", "/v1/usage", &basic("reader", "wrong"));
    assert_eq!(status, 401);
}

/// Each endpoint with the role that it needs. The path names things that do not exist.
const ENDPOINTS: [(&str, &str, &str); 30] = [
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
    ("POST", "/v1/cluster/handover", "operate"),
    ("POST", "/v1/cluster/upgrade", "operate"),
    ("POST", "/v1/policies", "ship"),
    ("POST", "/v1/replay", "ship"),
];

#[test]
fn roles_decide_what_users_do_over_tls() {
    let plant = Plant::start(&[]);
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
    eventually("the role is read again", || {
        let (status, _) = plant.as_user("client", "GET", "/v1/usage");
        (status == 200).then_some(())
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

#[test]
fn only_credentials_are_admitted_over_tls() {
    let plant = Plant::start(&[]);
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
    let log = plant.server.wait_for_log("user=nobody");
    assert!(
        log.contains("statehouse::audit") && log.contains("127.0.0.1:"),
        "{log}"
    );

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
    ran.code(4).says("wrong user name or password");
    let stranger = plant.file("stranger.crt");
    let ran = plant.run(&[&usage[..], &[&url, "--ca", &stranger]].concat());
    ran.code(3).says("--ca FILE");
    let ran = plant.run(&[&usage[..], &["https://127.0.0.1:1", "--ca", &ca]].concat());
    ran.code(3).says("connection refused");
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
    let plant = Plant::start(&[]);
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
    eventually("the session ends", || {
        (status("GET", "/v1/usage", &reader) == 401).then_some(())
    });
    assert_eq!(status("GET", "/v1/usage", &operator), 200);
    let again = log_in("reader");
    assert_eq!(status("POST", "/v1/rollback", &again), 409);
}

/// Every command that logs in at the admin API, but `ready`: probes need no login.
const LOGGING_IN: [&[&str]; 21] = [
    &["clients"],
    &["clients", "kick", "c"],
    &["cluster", "handover"],
    &["cluster", "upgrade"],
    &["get", "k", "--as-of", "1s"],
    &["history", "k"],
    &["policy", "canary", "builtin", "--percent", "5"],
    &["policy", "dev", "project"],
    &["policy", "diff"],
    &["policy", "list"],
    &["policy", "load", "password"],
    &["policy", "logs"],
    &["policy", "promote", "builtin"],
    &["policy", "rollback"],
    &["policy", "route", "x", "builtin"],
    &["policy", "shadow", "builtin"],
    &["policy", "unload", "builtin"],
    &["replay"],
    &["slow"],
    &["top", "--once"],
    &["usage"],
];

#[test]
fn every_command_refuses_a_wrong_password_in_words() {
    let credentials = |flags: &str| flags.contains("[--password-file]");
    let logs_in = |flags: &str| flags.contains("[--admin]") && credentials(flags);
    for (name, _) in subcommands().iter().filter(|(_, flags)| logs_in(flags)) {
        let has = |it: &&[&str]| format!("{} ", it.join(" ")).starts_with(&format!("{name} "));
        let is_other = ["ready", "context add", "lock"].contains(&&**name);
        assert!(
            is_other || LOGGING_IN.iter().any(has),
            "{name} is not tested"
        );
    }
    // An address may guess wrong only 16 times.
    for commands in LOGGING_IN.chunks(11) {
        let plant = Plant::start(&[]);
        fs::write(plant.file("wrong"), "wrong").unwrap();
        fs::create_dir(plant.file("project")).unwrap();
        fs::write(plant.file("project/Cargo.toml"), "").unwrap();
        let (url, ca) = (plant.url(), plant.file("ca.crt"));
        let login = ["--admin", &url, "--ca", &ca, "--user", "reader"];
        for command in commands {
            let all = [*command, &login, &["--password-file", "wrong"]].concat();
            let ran = plant.run(&all).code(4).says("wrong user name or password");
            assert!(ran.stdout.is_empty(), "{ran:?}");
        }
    }
}

#[test]
fn commands_read_a_store_of_another_machine() {
    let plant = Plant::start(&[]);
    let mut store = plant.server.store("press-4");
    let first = store.set("k", "one").to_string();
    store.set("k", "two\n");
    store.ask(&["DEL", "k"]);
    store.set("k", b"\xFF".repeat(5000));
    let data = text(&plant.server.directory().join("statehouse-data"));
    // What the store prints of its own directory.
    for arguments in [
        &["history", "k"][..],
        &["history", "k", "--json"],
        &["history", "k", "--limit", "1"],
        &["get", "k", "--as-of", &first, "--with-version"],
        &["get", "k", "--as-of", "0s"],
        &["get", "k", "--as-of", &first, "--json"],
        &["replay", "--json"],
    ] {
        let here = plant
            .run(&[arguments, &["--data", data.as_str()]].concat())
            .code(0);
        let there = plant.run_as("reader", arguments).code(0);
        assert_eq!(there.stdout, here.stdout, "{arguments:?}");
    }
    plant.run_as("reader", &["history", "none"]).code(1);
    let early = ["get", "k", "--as-of", "2020-01-01T00:00:00Z"];
    let here = plant.run(&[&early[..], &["--data", &data]].concat());
    let there = plant.run_as("reader", &early);
    assert_eq!((there.code, &there.stderr), (here.code, &here.stderr));

    // A context names the address and the account.
    let (url, ca, password) = (plant.url(), plant.file("ca.crt"), plant.file("password"));
    for user in ["reader", "shipper", "client"] {
        let add = [
            "context", "add", user, "--admin", &url, "--ca", &ca, "--user", user,
        ];
        plant
            .run(&[&add[..], &["--password-file", &password]].concat())
            .code(0);
    }
    plant.run(&["context", "use", "reader"]).code(0);
    let clients = plant.run(&["clients"]).code(0).text();
    assert!(clients.contains("press-4"), "{clients}");
    let history = plant.run(&["history", "k"]).code(0).text();
    assert!(history.contains("4 changes of k"), "{history}");
    let usage = plant.run(&["usage", "--context", "client"]);
    usage.code(4).says("needs the role read");
    let listed = plant.run(&["policy", "list", "--json"]).code(0).text();
    let listed: Json = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed["policies"].as_array().unwrap().len(), 1);

    // A policy from this machine.
    let ours = text(Path::new(&policies::marked("ship")));
    let load = ["policy", "load", &ours];
    plant.run(&load).code(4).says("needs the role ship");
    let replay = ["replay", "--policy", &ours];
    plant.run(&replay).code(4).says("needs the role ship");
    let replayed = plant.run(&[&replay[..], &["--context", "shipper", "--json"]].concat());
    let here = plant.run(&[&replay[..], &["--data", &data, "--json"]].concat());
    assert_eq!((replayed.code, replayed.stdout), (here.code, here.stdout));
    plant
        .run(&[&load[..], &["--context", "shipper"]].concat())
        .code(0);
    plant
        .run(&["policy", "promote", "marked-ship", "--context", "shipper"])
        .code(0);
    let log = plant
        .server
        .wait_for_log("path=\"/v1/policies/marked-ship/promote\"");
    assert!(log.contains("user=shipper"), "{log}");
    let listed = plant.run(&["policy", "list"]).code(0).text();
    assert!(listed.contains("the admin API, user shipper"), "{listed}");
}

/// Logs in to the page by a name and a password.
fn log_in(browser: &mut Browser, user: &str, password: &str) {
    browser.wait(
        "!document.querySelector('#login').hidden && !document.querySelector('#by-user').hidden",
    );
    browser.evaluate(&format!(
        "document.querySelector('#name').value = '{user}'; document.querySelector('#password').value = '{password}'; document.querySelector('#login-form').requestSubmit()"
    ));
}

/// Whether the button with this text exists and may be pressed.
fn button(text: &str, is_enabled: bool) -> String {
    format!(
        "[...document.querySelectorAll('main button')].some((it) => it.textContent === '{text}' && it.disabled === {})",
        !is_enabled
    )
}

#[test]
fn page_lets_users_do_what_their_role_allows() {
    let plant = Plant::start(&[]);
    plant.server.store("plc").set("valve", "open");
    let mut browser = Browser::show_untrusted(&format!("{}/#/keys/valve", plant.url()));
    log_in(&mut browser, "reader", "wrong horse");
    browser.wait("document.querySelector('#login-why').textContent.includes('password is wrong')");
    log_in(&mut browser, "reader", PASSWORD);
    browser.wait("document.querySelector('#user').textContent === 'reader · read'");
    for act in ["Edit", "Delete"] {
        browser.wait(&button(act, false));
        let why = format!(
            "[...document.querySelectorAll('main button')].find((it) => it.textContent === '{act}').title"
        );
        let why = browser.evaluate(&why);
        assert!(why.as_str().unwrap().contains("operate"), "{act}: {why}");
    }
    browser.evaluate("document.querySelector('#leave').click()");

    log_in(&mut browser, "operator", PASSWORD);
    browser.wait("document.querySelector('#user').textContent === 'operator · operate'");
    browser.wait(&button("Delete", true));
    browser.evaluate(
        "[...document.querySelectorAll('main button')].find((it) => it.textContent === 'Delete').click()",
    );
    browser.wait("document.querySelector('dialog').open");
    browser.evaluate("document.querySelector('#ask-yes').click()");
    browser.wait("document.body.innerText.includes('There is no such key now.')");
    assert_eq!(plant.server.store("plc").get("valve"), None);
    let (_, history) = plant.as_user("reader", "GET", "/v1/history?key=valve");
    let history: Json = serde_json::from_str(&history).unwrap();
    assert_eq!(history["changes"][0]["user"], "operator", "{history}");
}
