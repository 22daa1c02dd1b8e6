//! Tests commands that ask the admin API of a store again and again, with an API whose answers the
//! test decides.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    process::Stdio,
};

use serde_json::json;
use statehouse_tests::{
    Background, Lines, Server,
    client::PATIENCE,
    command,
    command::in_terminal,
    server::{signal, wait},
    wait::eventually,
};

/// An admin API without a store.
struct Api(TcpListener);

impl Api {
    fn start() -> Api {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        Api(listener)
    }

    /// The variables of a command that asks it.
    fn variables(&self) -> [(&'static str, String); 2] {
        let url = format!("http://{}", self.0.local_addr().unwrap());
        let token = "0123456789abcdef".to_owned();
        [
            ("STATEHOUSE_ADMIN_URL", url),
            ("STATEHOUSE_ADMIN_TOKEN", token),
        ]
    }

    /// Reads the next request, and returns its path. A dropped socket is a store that has ended.
    fn request(&self) -> (TcpStream, String) {
        let socket = eventually("the command asks", || self.0.accept().ok()).0;
        let mut lines = BufReader::new(&socket).lines().map(Result::unwrap);
        let first = lines.next().expect("a request");
        assert!(lines.any(|line| line.is_empty()), "an incomplete request");
        let path = first.split(' ').nth(1).expect("a path").to_owned();
        drop(lines);
        (socket, path)
    }

    fn answer(&self, document: &str) -> String {
        let length = document.len();
        let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{document}");
        let (mut socket, path) = self.request();
        socket.write_all(answer.as_bytes()).unwrap();
        path
    }
}

/// Slow requests of this key, or none.
fn slow(key: Option<&str>) -> String {
    let request = |key: &str| {
        json!({
            "at_ms": 1_700_000_000_000_u64, "client": "press-4", "command": "SET", "key": key,
            "policy": null, "outcome": "ok", "fuel": 1, "total_us": 200_000, "queue_us": 0,
            "policy_us": 0, "flush_us": 200_000, "socket_us": 0,
        })
    };
    let requests: Vec<_> = key.map(request).into_iter().collect();
    json!({ "threshold_us": 100_000, "next": requests.len(), "requests": requests }).to_string()
}

/// Regression: it ended only after the answer.
#[test]
fn ctrl_c_ends_slow_while_the_store_hangs() {
    let api = Api::start();
    let mut command = command(&["slow", "--follow"]);
    let mut following = Background::start(command.envs(api.variables()));
    api.answer(&slow(None));
    following.wait_for("no request took");
    let unanswered = api.request();
    signal(following.child.id(), "INT");
    let ended = wait(&mut following.child, PATIENCE).expect("it ends");
    assert_eq!(ended.code(), Some(0));
    drop(unanswered);
}

/// Regression: they ended with exit code 3. A store that has started again counts from 0, so they
/// begin again.
#[test]
fn commands_that_follow_continue_after_an_outage() {
    let overview = |host: &str| json!({ "rates": {}, "host": host }).to_string();
    let line = json!({
        "at_ms": 1_700_000_000_000_u64, "level": "info", "policy": "p", "digest": "00",
        "text": "later",
    });
    let no_lines = json!({ "lines": [], "lost": 0, "next": 7 }).to_string();
    let lines = json!({ "lines": [line], "lost": 0, "next": 1 }).to_string();
    let top = ["top", "--json", "--interval", "250ms"];
    let earlier = slow(Some("earlier"));
    for (arguments, before, after, path) in [
        (
            &["slow", "--follow"][..],
            earlier,
            slow(Some("later")),
            "/v1/slow?from=0",
        ),
        (&top, overview("earlier"), overview("later"), "/v1/overview"),
        (&["policy", "logs"], no_lines, lines, "/v1/log?"),
    ] {
        let api = Api::start();
        let mut command = command(arguments);
        command.envs(api.variables()).stderr(Stdio::piped());
        let mut following = Background::start(&mut command);
        let notices = Lines::follow(following.child.stderr.take().unwrap());
        let notice = |says: &str| {
            let line = notices.wait(PATIENCE, |line| line.contains(says));
            assert!(line.is_some(), "{arguments:?}: {:?}", notices.all());
        };
        api.answer(&before);
        for _ in 0..2 {
            drop(api.request());
        }
        notice("Asking again until it answers");
        assert_eq!(api.answer(&after), path);
        following.wait_for("later");
        notice("the store answers again");
        assert_eq!(notices.all().len(), 2, "{:?}", notices.all());
    }
}

/// Regression: the old figures looked like new ones.
#[test]
fn top_says_that_the_store_does_not_answer() {
    let server = Server::start();
    let overview = server.run(&["top", "--once", "--json"]).code(0).text();
    let api = Api::start();
    let mut top = in_terminal("top --interval 250ms")
        .envs(api.variables())
        .spawn()
        .expect("script of util-linux runs");
    let (mut terminal, mut keys) = (top.stdout.take().unwrap(), top.stdin.take().unwrap());
    api.answer(&overview);
    let unanswered = api.request();
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains("answer") {
        let mut byte = [0];
        let read = terminal.read_exact(&mut byte);
        read.unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&seen)));
        seen.push(byte[0]);
    }
    keys.write_all(b"q").unwrap();
    // The terminal must be read until its end.
    terminal.read_to_end(&mut seen).unwrap();
    let ended = wait(&mut top, PATIENCE).expect("it ends");
    assert_eq!(ended.code(), Some(0));
    drop(unanswered);
}
