//! Runs NATS JetStream, and a client that puts and gets keys of a bucket.

use std::io::{BufRead, BufReader, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use statehouse_loadgen::{Broken, Catalogue, Protocol, Received, Reply, Request, Verb};

use crate::servers::{Process, free_address};

/// A key-value bucket with a history of one value, as the official clients create it.
const BUCKET: &str = r#"{"name":"KV_bench","subjects":["$KV.bench.>"],"max_msgs_per_subject":1,"allow_direct":true,"allow_rollup_hdrs":true,"discard":"new","storage":"file","num_replicas":1}"#;

/// A running server with a bucket.
pub(crate) struct Nats {
    pub(crate) process: Process,
    /// Whether it writes to disk before it answers.
    pub(crate) syncs: bool,
}

impl Nats {
    /// Returns `None` if NATS is not installed. Versions before 2.10 cannot sync each write and
    /// refuse to start with that setting.
    pub(crate) fn start(directory: &Path) -> Option<Self> {
        for syncs in [true, false] {
            let address = free_address();
            let sync = if syncs { "sync_interval: always" } else { "" };
            let configuration = format!(
                "listen: \"{address}\"\njetstream {{\nstore_dir: \"{}\"\n{sync}\n}}\n",
                directory.display()
            );
            let path = directory.join("nats.conf");
            std::fs::write(&path, configuration).expect("a file");
            let mut command = Command::new("nats-server");
            command.arg("-c").arg(path);
            if let Some(process) = Process::start(command, address) {
                make_bucket(address);
                return Some(Self { process, syncs });
            }
        }
        None
    }
}

fn make_bucket(address: SocketAddr) {
    let mut stream = TcpStream::connect(address).expect("it listens");
    let create = format!(
        "CONNECT {{\"verbose\":false}}\r\nSUB made 1\r\nPUB $JS.API.STREAM.CREATE.KV_bench made {}\r\n{BUCKET}\r\n",
        BUCKET.len()
    );
    stream.write_all(create.as_bytes()).expect("it reads");
    let lines = BufReader::new(stream).lines().map_while(Result::ok);
    let answer = lines.into_iter().find(|line| line.starts_with('{'));
    let answer = answer.expect("it answers");
    assert!(!answer.contains("\"error\""), "{answer}");
}

/// One client.
pub(crate) struct NatsClient {
    catalogue: Arc<Catalogue>,
    number: usize,
}

impl NatsClient {
    pub(crate) fn new(catalogue: Arc<Catalogue>, number: usize) -> Self {
        Self { catalogue, number }
    }
}

impl Protocol for NatsClient {
    const ACKNOWLEDGES: bool = false;

    fn hello(&mut self, out: &mut Vec<u8>) {
        // Writing to a Vec cannot fail.
        let _ = write!(
            out,
            "CONNECT {{\"verbose\":false,\"headers\":true,\"no_responders\":true}}\r\nSUB _INBOX.{}.* 1\r\nPING\r\n",
            self.number
        );
    }

    fn in_flight_max(&self) -> u16 {
        u16::MAX
    }

    fn ask(&mut self, slot: u16, number: u64, request: Request, out: &mut Vec<u8>) {
        let direct = match request.verb {
            Verb::Get => "$JS.API.DIRECT.GET.KV_bench.",
            _ => "",
        };
        let _ = write!(out, "PUB {direct}$KV.bench.");
        self.catalogue.push_key(request.key, out);
        let value = match request.verb {
            Verb::Set => self.catalogue.value(request.key),
            _ => b"",
        };
        let _ = write!(
            out,
            " _INBOX.{}.{slot}-{number} {}\r\n",
            self.number,
            value.len()
        );
        out.extend_from_slice(value);
        out.extend_from_slice(b"\r\n");
    }

    fn read(
        &mut self,
        bytes: &[u8],
        out: &mut Vec<u8>,
        mut hear: impl FnMut(Received<'_>),
    ) -> Result<usize, Broken> {
        let mut done = 0;
        while let Some(end) = bytes[done..].windows(2).position(|pair| pair == b"\r\n") {
            let line = std::str::from_utf8(&bytes[done..done + end]).map_err(|_| MALFORMED)?;
            let body = done + end + 2;
            let fields: Vec<&str> = line.split(' ').collect();
            match fields[..] {
                ["PONG"] => hear(Received::Ready),
                ["PING"] => out.extend_from_slice(b"PONG\r\n"),
                ["INFO", ..] | ["+OK"] => {}
                [kind @ ("MSG" | "HMSG"), subject, _, .., total] => {
                    let total: usize = total.trim().parse().map_err(|_| MALFORMED)?;
                    if bytes.len() < body + total + 2 {
                        break;
                    }
                    let head: usize = match (kind, &fields[..]) {
                        ("HMSG", [.., head, _]) => head.parse().map_err(|_| MALFORMED)?,
                        _ => 0,
                    };
                    let head = head.min(total);
                    let (headers, payload) = bytes[body..body + total].split_at(head);
                    let (slot, number) = subject
                        .rsplit('.')
                        .next()
                        .and_then(|name| name.split_once('-'))
                        .and_then(|(slot, number)| Some((slot.parse().ok()?, number.parse().ok()?)))
                        .ok_or(MALFORMED)?;
                    let reply = match kind {
                        "HMSG" if headers.starts_with(b"NATS/1.0 404") => Reply::Nothing,
                        "HMSG" if headers.starts_with(b"NATS/1.0\r") => Reply::Value(payload),
                        "HMSG" => Reply::Refused(&headers[..headers.len().min(16)]),
                        _ if payload.starts_with(b"{\"error\"") => Reply::Refused(payload),
                        _ => Reply::Done,
                    };
                    hear(Received::Answer {
                        slot,
                        number,
                        reply,
                    });
                    done = body + total + 2;
                    continue;
                }
                _ => return Err(Broken::Ended(line.to_owned())),
            }
            done = body;
        }
        Ok(done)
    }

    fn ping(&mut self, _: &mut Vec<u8>) {}

    fn bye(&mut self, _: &mut Vec<u8>) {}
}

const MALFORMED: Broken = Broken::Malformed("an invalid message of NATS");
