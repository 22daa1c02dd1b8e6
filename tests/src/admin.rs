//! A client of the admin API that writes HTTP to a bare TCP or Unix socket. Each request uses a new
//! connection.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
    path::Path,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{client::PATIENCE, server::Server};

/// How long a request may take. An emulated processor compiles a policy for half a minute.
const ANSWER_PATIENCE: Duration = Duration::from_secs(120);

/// The address and token of a server's admin API.
pub struct Admin {
    url: String,
    /// `None` for a Unix socket, which needs no token.
    token: Option<String>,
}

impl Admin {
    /// The admin API of a server with the default data directory.
    pub fn of(server: &Server) -> Admin {
        Admin::at(&server.data_directory())
    }

    /// Reads the address and token from the file `admin` in a data directory.
    pub fn at(data: &Path) -> Admin {
        let found = fs::read(data.join("admin")).expect("a running server writes its admin file");
        let found: Value = serde_json::from_slice(&found).unwrap();
        Admin {
            url: found["url"].as_str().unwrap().to_owned(),
            token: found["token"].as_str().map(str::to_owned),
        }
    }

    /// An address such as that of `--metrics`, which needs no token.
    pub fn open_to_all(address: &str) -> Admin {
        Admin {
            url: format!("http://{address}"),
            token: None,
        }
    }

    /// The same address, for an operator without a token.
    pub fn without_token(&self) -> Admin {
        Admin {
            url: self.url.clone(),
            token: None,
        }
    }

    /// The URL of the admin API, or `unix:` with the path of its socket.
    pub fn url(&self) -> String {
        self.url.clone()
    }

    /// The token, which an address over TCP has.
    pub fn token(&self) -> &str {
        self.token.as_deref().expect("a token")
    }

    /// Sends a request. Returns the status and the body.
    pub fn ask(&self, method: &str, path: &str, body: &[u8]) -> (u16, String) {
        self.ask_with(method, path, "", body)
    }

    /// Like [`ask`](Self::ask), with further header lines, each with its line end.
    pub fn ask_with(&self, method: &str, path: &str, lines: &str, body: &[u8]) -> (u16, String) {
        let (head, body) = self.answer_with(method, path, lines, body);
        (status_of(&head), body)
    }

    /// Like [`ask_with`](Self::ask_with), but returns the head of the answer instead of its status.
    pub fn answer_with(
        &self,
        method: &str,
        path: &str,
        lines: &str,
        body: &[u8],
    ) -> (String, String) {
        self.exchange(None, method, path, lines, body)
    }

    /// Sends a GET under another name in the `Host` header.
    pub fn ask_as(&self, host: &str, path: &str) -> (u16, String) {
        let (head, body) = self.exchange(Some(host), "GET", path, "", b"");
        (status_of(&head), body)
    }

    fn exchange(
        &self,
        host: Option<&str>,
        method: &str,
        path: &str,
        lines: &str,
        body: &[u8],
    ) -> (String, String) {
        let (own, mut stream) = self.open();
        let host = host.unwrap_or(own);
        let bearer = self.bearer();
        let mut request = format!(
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\n{bearer}{lines}Content-Length: {}\r\nConnection: close\r\n\r\n",
            body.len()
        )
        .into_bytes();
        request.extend_from_slice(body);
        stream.write_all(&request).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").expect("an HTTP response");
        (head.to_owned(), body.to_owned())
    }

    /// The same address, for an operator with another token or the secret of a session.
    pub fn with_token(&self, token: &str) -> Admin {
        Admin {
            url: self.url.clone(),
            token: Some(token.to_owned()),
        }
    }

    pub fn stream(&self, path: &str) -> Events {
        let (status, events) = self.follow(path);
        assert_eq!(status, 200, "{path}");
        events
    }

    /// Opens a stream of events that may be refused. Returns the status too.
    pub fn follow(&self, path: &str) -> (u16, Events) {
        let (host, mut stream) = self.open();
        let bearer = self.bearer();
        let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n{bearer}\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut lines = BufReader::new(stream);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert!(lines.read_line(&mut head).unwrap() > 0, "{head}");
        }
        (status_of(&head), Events(lines))
    }

    fn bearer(&self) -> String {
        match &self.token {
            Some(token) => format!("Authorization: Bearer {token}\r\n"),
            None => String::new(),
        }
    }

    /// Opens a connection. Returns it with the value of the `Host` header.
    fn open(&self) -> (&str, Box<dyn Stream>) {
        if let Some(path) = self.url.strip_prefix("unix:") {
            let stream = UnixStream::connect(path).unwrap();
            stream.set_read_timeout(Some(ANSWER_PATIENCE)).unwrap();
            return ("localhost", Box::new(stream));
        }
        let address = self.url.trim_start_matches("http://");
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(ANSWER_PATIENCE)).unwrap();
        (address, Box::new(stream))
    }

    /// Sends a request that must succeed. Returns the JSON of its response.
    pub fn done(&self, method: &str, path: &str, body: &[u8]) -> Value {
        let (status, body) = self.ask(method, path, body);
        assert_eq!(status, 200, "{method} {path}: {body}");
        serde_json::from_str(&body).unwrap()
    }
}

/// Asserts that an answer has this status, and says why.
#[track_caller]
pub fn assert_refused((status, answer): (u16, String), expected: u16, why: &str) {
    let is_refused = status == expected && answer.contains(why);
    assert!(is_refused, "{status} {answer}, not {expected} and {why:?}");
}

pub struct Events(BufReader<Box<dyn Stream>>);

impl Events {
    /// The name and the data of the next event. Lines of the chunked encoding are skipped: an event
    /// is a chunk.
    pub fn event(&mut self) -> (String, Value) {
        let (mut name, end) = (None, Instant::now() + PATIENCE);
        loop {
            // A stream is never silent for long, so each line arrives.
            assert!(Instant::now() < end, "no event came");
            let mut line = String::new();
            assert!(self.0.read_line(&mut line).unwrap() > 0, "the stream ended");
            if let Some(found) = line.strip_prefix("event: ") {
                name = Some(found.trim_end().to_owned());
            } else if let (Some(name), Some(data)) = (&name, line.strip_prefix("data: ")) {
                return (name.clone(), serde_json::from_str(data).unwrap());
            }
        }
    }

    pub fn expect_end(mut self) {
        self.0.read_to_end(&mut Vec::new()).unwrap();
    }
}

trait Stream: Read + Write {}

impl<T: Read + Write> Stream for T {}

fn status_of(head: &str) -> u16 {
    let status = head.split(' ').nth(1).and_then(|it| it.parse().ok());
    status.expect("a status")
}
