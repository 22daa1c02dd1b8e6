//! Runs Redis, a client for the load generator, and Redis's own benchmark.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use statehouse_loadgen::{Broken, Catalogue, Protocol, Received, Reply, Request, Usage, Verb};

use crate::contender::Commands;
use crate::servers::{Figures, Process, VALUE_BYTES, Work, free_address};

const LIBRARY: &str = include_str!("statestore.lua");

/// A running server with the functions of the state store.
pub(crate) struct Redis(pub(crate) Process);

impl Redis {
    /// Returns `None` if Redis is not installed.
    pub(crate) fn start(directory: &Path, durable: bool) -> Option<Self> {
        let address = free_address();
        let mut command = Command::new("redis-server");
        command
            .args(["--port", &address.port().to_string(), "--bind", "127.0.0.1"])
            .args(["--save", "", "--appendonly"])
            .arg(if durable { "yes" } else { "no" })
            .args(["--appendfsync", "always", "--dir"])
            .arg(directory);
        let process = Process::start(command, address)?;
        let mut load = Vec::new();
        push_command(&[b"FUNCTION", b"LOAD", LIBRARY.as_bytes()], &mut load);
        let mut stream = TcpStream::connect(address).expect("it listens");
        stream.write_all(&load).expect("it reads");
        let mut answer = [0; 256];
        let count = stream.read(&mut answer).expect("it answers");
        assert!(
            answer.starts_with(b"$"),
            "FUNCTION LOAD: {}",
            answer[..count].escape_ascii()
        );
        Some(Self(process))
    }
}

/// A command as an array of bulk strings.
fn push_command(arguments: &[&[u8]], out: &mut Vec<u8>) {
    // Writing to a Vec cannot fail.
    let _ = write!(out, "*{}\r\n", arguments.len());
    for argument in arguments {
        let _ = write!(out, "${}\r\n", argument.len());
        out.extend_from_slice(argument);
        out.extend_from_slice(b"\r\n");
    }
}

/// One client. Answers arrive in the order of requests.
pub(crate) struct Resp {
    catalogue: Arc<Catalogue>,
    /// GET and SET, or functions of [`LIBRARY`].
    commands: Commands,
    asked: VecDeque<(u16, u64)>,
    key: Vec<u8>,
}

impl Resp {
    pub(crate) fn new(catalogue: Arc<Catalogue>, commands: Commands) -> Self {
        Self {
            catalogue,
            commands,
            asked: VecDeque::new(),
            key: Vec::new(),
        }
    }
}

impl Protocol for Resp {
    const ACKNOWLEDGES: bool = false;

    fn hello(&mut self, out: &mut Vec<u8>) {
        out.extend_from_slice(b"PING\r\n");
    }

    fn in_flight_max(&self) -> u16 {
        u16::MAX
    }

    fn ask(&mut self, slot: u16, number: u64, request: Request, out: &mut Vec<u8>) {
        self.asked.push_back((slot, number));
        self.key.clear();
        self.catalogue.push_key(request.key, &mut self.key);
        let (key, value) = (&self.key[..], self.catalogue.value(request.key));
        match (request.verb, self.commands) {
            (Verb::Get, Commands::Plain) => push_command(&[b"GET", key], out),
            (Verb::Get, _) => push_command(&[b"FCALL_RO", b"state_get", b"1", key], out),
            (Verb::Set, Commands::Plain) => push_command(&[b"SET", key, value], out),
            (Verb::Set, commands) => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH);
                let timestamp = format!("{:015}:00000:bench", now.unwrap_or_default().as_millis());
                let (set, timestamp) = (set_of(commands).as_bytes(), timestamp.as_bytes());
                push_command(&[b"FCALL", set, b"1", key, value, timestamp], out);
            }
            (Verb::Del | Verb::Watch, _) => push_command(&[b"DEL", key], out),
        }
    }

    fn read(
        &mut self,
        bytes: &[u8],
        _: &mut Vec<u8>,
        mut hear: impl FnMut(Received<'_>),
    ) -> Result<usize, Broken> {
        let mut done = 0;
        while let Some((reply, length)) = reply(&bytes[done..])? {
            done += length;
            match self.asked.pop_front() {
                Some((slot, number)) => hear(Received::Answer {
                    slot,
                    number,
                    reply,
                }),
                None => hear(Received::Ready),
            }
        }
        Ok(done)
    }

    fn ping(&mut self, _: &mut Vec<u8>) {}

    fn bye(&mut self, _: &mut Vec<u8>) {}
}

/// The first answer, if it is complete, and its length.
fn reply(bytes: &[u8]) -> Result<Option<(Reply<'_>, usize)>, Broken> {
    let Some(end) = bytes.windows(2).position(|pair| pair == b"\r\n") else {
        return Ok(None);
    };
    let (line, head) = (&bytes[1..end], end + 2);
    let number = || std::str::from_utf8(line).ok()?.parse::<i64>().ok();
    Ok(Some(match bytes[0] {
        b'+' | b':' => (Reply::Done, head),
        b'-' => (Reply::Refused(line), head),
        b'$' => match number() {
            Some(-1) => (Reply::Nothing, head),
            Some(length) => {
                let length = usize::try_from(length).unwrap_or(0);
                if bytes.len() < head + length + 2 {
                    return Ok(None);
                }
                (Reply::Value(&bytes[head..head + length]), head + length + 2)
            }
            None => return Err(Broken::Malformed("an invalid answer of Redis")),
        },
        _ => return Err(Broken::Malformed("an invalid answer of Redis")),
    }))
}

/// Runs one round of `redis-benchmark`. Its option is a number of requests, not a time, so a short
/// trial determines the number for the round.
pub(crate) fn own_benchmark(
    address: SocketAddr,
    pid: u32,
    work: &Work,
    commands: Commands,
) -> Result<Figures, String> {
    // A trial with writes sets the keys that the round reads.
    if work.reads == 100 {
        let writes = Work { reads: 0, ..*work };
        counted(address, pid, &writes, commands, work.keys)?;
    }
    let trial = counted(address, pid, work, commands, TRIAL)?;
    let requests = (trial.per_second * work.round.as_secs_f64()) as u64;
    counted(address, pid, work, commands, requests.max(TRIAL))
}

/// Requests of a trial. A fast server takes a quarter of a second.
const TRIAL: u64 = 20_000;

fn counted(
    address: SocketAddr,
    pid: u32,
    work: &Work,
    commands: Commands,
    requests: u64,
) -> Result<Figures, String> {
    let value = "v".repeat(VALUE_BYTES);
    let mut command = Command::new("redis-benchmark");
    command
        .args(["-p", &address.port().to_string(), "--csv"])
        .args(["--precision", "3"])
        .args(["-c", &work.connections.to_string()])
        .args(["-P", &work.in_flight.to_string()])
        .args(["-n", &requests.to_string()])
        .args(["-r", &work.keys.to_string()]);
    let key = "key:__rand_int__";
    match (work.reads, commands) {
        (100, Commands::Plain) => command.args(["GET", key]),
        (0, Commands::Plain) => command.args(["SET", key, &value]),
        (100, _) => command.args(["FCALL_RO", "state_get", "1", key]),
        (0, _) => command.args(["FCALL", set_of(commands), "1", key, &value, TIMESTAMP]),
        _ => return Err("redis-benchmark reads or writes, not both".to_owned()),
    };
    let before = Usage::of(pid);
    let output = command.stderr(Stdio::null()).output();
    let output = output.map_err(|error| format!("redis-benchmark: {error}"))?;
    let used = before.zip(Usage::of(pid));
    let text = String::from_utf8_lossy(&output.stdout);
    // "test","rps","avg","min","p50","p95","p99","max", latencies in milliseconds.
    let line = text.lines().last().unwrap_or_default();
    let fields: Vec<f64> = line
        .rsplit("\",\"")
        .filter_map(|field| field.trim_matches('"').parse().ok())
        .collect();
    let [_, p99, _, p50, _, _, per_second] = fields[..] else {
        return Err(format!("redis-benchmark printed {line:?}"));
    };
    Ok(Figures {
        per_second,
        p50_us: p50 * 1000.0,
        p99_us: p99 * 1000.0,
        cpu_us: used
            .map(|(before, after)| (after.cpu - before.cpu).as_secs_f64() * 1e6 / requests as f64),
    })
}

/// The function that sets a key.
fn set_of(commands: Commands) -> &'static str {
    match commands {
        Commands::Lean => "state_set_lean",
        Commands::Plain | Commands::Full => "state_set",
    }
}

/// The timestamp of all requests of redis-benchmark, which cannot insert the time.
const TIMESTAMP: &str = "1700000000000:0:bench";
