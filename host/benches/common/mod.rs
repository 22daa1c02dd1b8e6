//! Runs a store in its own process, and a minimal client, so that the client's own cost is small.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use statehouse_core::request::REQUEST_TOPIC;
use statehouse_loadgen::packet::{packet, push_length, push_packet, push_text};
use statehouse_mqtt::PropertiesBuilder;
/// A command as an array of bulk strings.
pub(crate) use statehouse_policy::resp::request as resp;

/// A process. Drop ends it.
pub(crate) struct Running(pub(crate) Child);

impl Drop for Running {
    fn drop(&mut self) {
        // An error means that the process has already ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A store process.
pub(crate) struct Server {
    process: Running,
    pub(crate) address: String,
}

impl Server {
    /// Starts a store with these arguments. `directory` is its working directory, which holds its
    /// data.
    pub(crate) fn start(directory: &Path, arguments: &[&str]) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_statehouse"))
            .args(["serve", "--listen", "127.0.0.1:0", "--log-filter", "warn"])
            .args(arguments)
            .current_dir(directory)
            .stdout(Stdio::piped())
            .spawn()
            .expect("cargo built the binary before the benchmark");
        let output = process.stdout.take().expect("it is piped");
        let mut lines = BufReader::new(output).lines().map_while(Result::ok);
        let address = lines
            .find_map(|line| Some(line.strip_prefix("listening on mqtt://")?.to_owned()))
            .expect("a store prints its address");
        let ready = lines.next().expect("a store prints that it is ready");
        assert_eq!(ready, "ready");
        let process = Running(process);
        Self { process, address }
    }

    /// The process id.
    #[allow(dead_code, reason = "not every benchmark needs the process id")]
    pub(crate) fn id(&self) -> u32 {
        self.process.0.id()
    }
}

/// A client that knows just enough MQTT 5 for one request at a time.
pub(crate) struct Client {
    stream: TcpStream,
    read: Vec<u8>,
    /// The number of bytes of `read` that are already handled.
    done: usize,
    packet_id: u16,
    /// The properties of every request. Only two bytes of correlation data change.
    properties: Vec<u8>,
    correlation_data: usize,
    out: Vec<u8>,
}

impl Client {
    pub(crate) fn connect(address: &str, id: &str) -> Self {
        Self::try_connect(address, id).expect("the store listens and answers")
    }

    /// Connects to a store that may not answer.
    pub(crate) fn try_connect(address: &str, id: &str) -> io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        let response_topic = format!("clients/{id}/response");
        let properties = PropertiesBuilder::new()
            .correlation_data(b"id")
            .response_topic(&response_topic)
            .user("__protVer", "1.0")
            .user("__ts", "001700000000000:00000:bench")
            .finish()
            .expect("short and without U+0000");
        let mut client = Self {
            stream,
            read: Vec::new(),
            done: 0,
            packet_id: 0,
            properties: properties.to_vec(),
            // After the property's identifier and its length.
            correlation_data: 3,
            out: Vec::new(),
        };
        let mut connect = vec![0, 4, b'M', b'Q', b'T', b'T', 5, 2, 0, 60, 0];
        push_text(&mut connect, id.as_bytes());
        client.send(0x10, &connect)?;
        let (first, body) = client.receive()?;
        assert_eq!(first >> 4, 2, "a CONNACK");
        // The second byte is the reason.
        if client.read[body][1] != 0 {
            return Err(io::ErrorKind::ConnectionRefused.into());
        }
        let mut subscribe = vec![0, 1, 0];
        push_text(&mut subscribe, response_topic.as_bytes());
        subscribe.push(1);
        client.send(0x82, &subscribe)?;
        assert_eq!(client.receive()?.0 >> 4, 9, "a SUBACK");
        Ok(client)
    }

    fn send(&mut self, first: u8, body: &[u8]) -> io::Result<()> {
        let mut packet = Vec::new();
        push_packet(&mut packet, first, body);
        self.stream.write_all(&packet)
    }

    /// Receives the next packet. Returns its first byte and the range of its body.
    fn receive(&mut self) -> io::Result<(u8, std::ops::Range<usize>)> {
        loop {
            let next = packet(&self.read[self.done..]).map_err(io::Error::other)?;
            if let Some((first, at, end)) = next {
                let body = self.done + at..self.done + end;
                self.done = body.end;
                return Ok((first, body));
            }
            self.read.drain(..self.done);
            self.done = 0;
            let mut chunk = [0; 16 << 10];
            let count = self.stream.read(&mut chunk)?;
            if count == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.read.extend_from_slice(&chunk[..count]);
        }
    }

    /// Sends one request, and waits for its answer and PUBACK.
    #[allow(dead_code, reason = "not every benchmark sends requests one by one")]
    pub(crate) fn round_trip(&mut self, payload: &[u8]) {
        self.round_trips(std::iter::once(payload));
    }

    /// Sends all requests at once, and waits for their answers and PUBACKs.
    pub(crate) fn round_trips<'a>(&mut self, payloads: impl Iterator<Item = &'a [u8]>) {
        self.try_round_trips(payloads)
            .expect("each answer within five seconds");
    }

    /// Like [`Self::round_trips`], for a store that may not answer.
    pub(crate) fn try_round_trips<'a>(
        &mut self,
        payloads: impl Iterator<Item = &'a [u8]>,
    ) -> io::Result<()> {
        let mut count = 0;
        for payload in payloads {
            self.publish(payload);
            count += 1;
        }
        self.stream.write_all(&self.out)?;
        self.out.clear();
        let (mut answered, mut acknowledged) = (0, 0);
        while answered < count || acknowledged < count {
            let (first, body) = self.receive()?;
            match first >> 4 {
                3 => {
                    let body = &self.read[body];
                    let topic = usize::from(u16::from_be_bytes([body[0], body[1]]));
                    // The PUBACK of the answer is sent with the next request, as fast clients do.
                    let acknowledgement = [0x40, 2, body[2 + topic], body[3 + topic]];
                    self.out.extend_from_slice(&acknowledgement);
                    answered += 1;
                }
                4 => acknowledged += 1,
                // DISCONNECT: the host does not lead any more.
                14 => return Err(io::ErrorKind::ConnectionAborted.into()),
                other => panic!("a packet of type {other}"),
            }
        }
        Ok(())
    }

    fn publish(&mut self, payload: &[u8]) {
        self.packet_id = self.packet_id % 60_000 + 1;
        let id = self.packet_id.to_be_bytes();
        self.properties[self.correlation_data..][..2].copy_from_slice(&id);
        let mut properties_length = Vec::with_capacity(2);
        push_length(&mut properties_length, self.properties.len());
        let body = 2 + REQUEST_TOPIC.len() + 2 + properties_length.len();
        self.out.push(0x32);
        push_length(&mut self.out, body + self.properties.len() + payload.len());
        push_text(&mut self.out, REQUEST_TOPIC.as_bytes());
        self.out.extend_from_slice(&id);
        self.out.extend_from_slice(&properties_length);
        self.out.extend_from_slice(&self.properties);
        self.out.extend_from_slice(payload);
    }
}

/// Runs this many clients, each on its own thread, until `wait` returns. The warm-up before `wait`
/// does not count. Returns the microseconds of all rounds, sorted, and the time of `wait`.
#[allow(dead_code, reason = "other benchmarks have other clients")]
pub(crate) fn run_clients<W: FnMut() + Send>(
    clients: usize,
    client: impl Fn(usize) -> W,
    warm_up: Duration,
    wait: impl FnOnce(),
) -> (Vec<f64>, Duration) {
    let (counts, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let run = |mut work: W| {
        let mut micros = Vec::new();
        while !over.load(Relaxed) {
            let counted = counts.load(Relaxed);
            let begun = Instant::now();
            work();
            if counted {
                micros.push(begun.elapsed().as_micros() as f64);
            }
        }
        micros
    };
    let workers: Vec<W> = (0..clients).map(client).collect();
    thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (workers.into_iter())
            .map(|work| scope.spawn(move || run(work)))
            .collect();
        thread::sleep(warm_up);
        counts.store(true, Relaxed);
        let start = Instant::now();
        wait();
        over.store(true, Relaxed);
        let took = start.elapsed();
        let micros = threads.into_iter();
        let micros = micros.flat_map(|it| it.join().expect("a client"));
        let mut micros: Vec<f64> = micros.collect();
        micros.sort_by(f64::total_cmp);
        (micros, took)
    })
}
