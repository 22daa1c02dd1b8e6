//! Runs etcd, and a client that puts keys over its JSON gateway.
//!
//! The gateway avoids a gRPC client. It runs in the same process and adds a hop inside of it, so
//! the figures are somewhat worse than those of a native client. Only puts are measured, one at a
//! time.

use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use data_encoding::BASE64;
use statehouse_loadgen::{Broken, Catalogue, Protocol, Received, Reply, Request};

use crate::servers::{Process, free_address};

/// A running server, which is the only member of its cluster.
pub(crate) struct Etcd(pub(crate) Process);

impl Etcd {
    /// Returns `None` if etcd is not installed.
    pub(crate) fn start(directory: &Path) -> Option<Self> {
        let (clients, peers) = (free_address(), free_address());
        let (clients_url, peers_url) = (format!("http://{clients}"), format!("http://{peers}"));
        let mut command = Command::new("etcd");
        command
            .args(["--name", "bench", "--log-level", "error", "--data-dir"])
            .arg(directory.join("etcd"))
            .args(["--listen-client-urls", &clients_url])
            .args(["--advertise-client-urls", &clients_url])
            .args(["--listen-peer-urls", &peers_url])
            .args(["--initial-advertise-peer-urls", &peers_url])
            .args(["--initial-cluster", &format!("bench={peers_url}")]);
        Process::start(command, clients).map(Self)
    }
}

/// One client: HTTP/1.1, one request at a time.
pub(crate) struct Gateway {
    catalogue: Arc<Catalogue>,
    asked: Option<(u16, u64)>,
    key: Vec<u8>,
    body: Vec<u8>,
}

impl Gateway {
    pub(crate) fn new(catalogue: Arc<Catalogue>) -> Self {
        Self {
            catalogue,
            asked: None,
            key: Vec::new(),
            body: Vec::new(),
        }
    }
}

impl Protocol for Gateway {
    const ACKNOWLEDGES: bool = false;

    fn hello(&mut self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"GET /version HTTP/1.1\r\nHost: bench\r\n\r\n");
    }

    fn in_flight_max(&self) -> u16 {
        1
    }

    fn ask(&mut self, slot: u16, number: u64, request: Request, out: &mut Vec<u8>) {
        self.asked = Some((slot, number));
        self.key.clear();
        self.catalogue.push_key(request.key, &mut self.key);
        self.body.clear();
        self.body.extend_from_slice(b"{\"key\":\"");
        push_base64(&self.key, &mut self.body);
        self.body.extend_from_slice(b"\",\"value\":\"");
        push_base64(self.catalogue.value(request.key), &mut self.body);
        self.body.extend_from_slice(b"\"}");
        // Writing to a Vec cannot fail.
        let _ = write!(
            out,
            "POST /v3/kv/put HTTP/1.1\r\nHost: bench\r\nContent-Length: {}\r\n\r\n",
            self.body.len()
        );
        out.extend_from_slice(&self.body);
    }

    fn read(
        &mut self,
        bytes: &[u8],
        _: &mut Vec<u8>,
        mut hear: impl FnMut(Received<'_>),
    ) -> Result<usize, Broken> {
        let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else {
            return Ok(0);
        };
        let head = std::str::from_utf8(&bytes[..end]).map_err(|_| MALFORMED)?;
        let length = head.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            let is_length = name.eq_ignore_ascii_case("content-length");
            is_length.then(|| value.trim().parse::<usize>().ok())?
        });
        let total = end + 4 + length.ok_or(MALFORMED)?;
        if bytes.len() < total {
            return Ok(0);
        }
        let reply = match head.starts_with("HTTP/1.1 200") {
            true => Reply::Done,
            false => Reply::Refused(&bytes[end + 4..total]),
        };
        match self.asked.take() {
            Some((slot, number)) => hear(Received::Answer {
                slot,
                number,
                reply,
            }),
            None => hear(Received::Ready),
        }
        Ok(total)
    }

    fn ping(&mut self, _: &mut Vec<u8>) {}

    fn bye(&mut self, _: &mut Vec<u8>) {}
}

const MALFORMED: Broken = Broken::Malformed("an invalid answer of the gateway");

/// Base 64 with padding (RFC 4648 section 4).
fn push_base64(bytes: &[u8], out: &mut Vec<u8>) {
    let at = out.len();
    out.resize(at + BASE64.encode_len(bytes.len()), 0);
    BASE64.encode_mut(bytes, &mut out[at..]);
}
