//! An honest client that measures how long the server lets it wait while an attack goes on.
//!
//! It sends GET, SET and PINGREQ in turn on its own connection, at a steady pace, and reconnects
//! when the connection ends. A stall of one second must count as all requests of that second, not
//! as one: each latency also adds the requests that the client could not send during it.

use std::{
    fmt,
    net::{SocketAddr, TcpStream},
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;

use crate::{
    client::{Client, Heard, PATIENCE},
    connect::Connect,
    packet::{PINGREQ, kind},
    resp,
    store::{self, Store},
};

/// From one request to the next: a rate that leaves a small machine idle.
const PACE: Duration = Duration::from_millis(5);

/// What the victim waited for in one phase.
#[derive(Clone)]
pub struct Latencies {
    /// Of requests that were answered correctly, in microseconds.
    histogram: Histogram<u64>,
    failures: u64,
    first_failure: Option<String>,
}

impl Latencies {
    fn new() -> Latencies {
        Latencies {
            histogram: Histogram::new(3).unwrap(),
            failures: 0,
            first_failure: None,
        }
    }

    /// Requests that were answered correctly, and those that a stall kept from being sent.
    pub fn count(&self) -> u64 {
        self.histogram.len()
    }

    /// Half of the requests took at most this long.
    pub fn p50(&self) -> Duration {
        self.quantile(0.5)
    }

    /// 99 of 100 requests took at most this long.
    pub fn p99(&self) -> Duration {
        self.quantile(0.99)
    }

    /// The longest.
    pub fn max(&self) -> Duration {
        Duration::from_micros(self.histogram.max())
    }

    /// Requests without a correct answer, and connections that were refused.
    pub fn failures(&self) -> u64 {
        self.failures
    }

    /// What the first failure was.
    pub fn first_failure(&self) -> Option<&str> {
        self.first_failure.as_deref()
    }

    fn quantile(&self, quantile: f64) -> Duration {
        Duration::from_micros(self.histogram.value_at_quantile(quantile))
    }

    fn note(&mut self, outcome: Result<Duration, String>) {
        match outcome {
            Ok(latency) => {
                let us = u64::try_from(latency.as_micros()).unwrap();
                let pace_us = u64::try_from(PACE.as_micros()).unwrap();
                self.histogram.record_correct(us, pace_us).unwrap();
            }
            Err(failure) => {
                self.failures += 1;
                self.first_failure.get_or_insert(failure);
            }
        }
    }
}

impl fmt::Display for Latencies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "p50 {}, p99 {}, max {}, {} requests, {} failures",
            milliseconds(self.p50()),
            milliseconds(self.p99()),
            milliseconds(self.max()),
            self.count(),
            self.failures
        )?;
        match &self.first_failure {
            Some(failure) => write!(f, " (the first: {failure})"),
            None => Ok(()),
        }
    }
}

/// As people read it.
pub fn milliseconds(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1000.0)
}

/// The client. It runs until it is dropped.
pub struct Victim {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    address: SocketAddr,
    connect: Connect,
    over: AtomicBool,
    measured: Mutex<Measured>,
    changed: Condvar,
}

struct Measured {
    /// Of the present phase.
    latencies: Latencies,
    /// Attempts of all phases that have ended, with or without an answer.
    ended: u64,
}

impl Victim {
    /// Of the server at this address, with the client id `victim`.
    pub fn start(address: SocketAddr) -> Victim {
        Victim::start_as(address, Connect::new("victim"))
    }

    /// The same with this CONNECT. It uses the key `victim`.
    pub fn start_as(address: SocketAddr, connect: Connect) -> Victim {
        let shared = Arc::new(Shared {
            address,
            connect,
            over: AtomicBool::new(false),
            measured: Mutex::new(Measured {
                latencies: Latencies::new(),
                ended: 0,
            }),
            changed: Condvar::new(),
        });
        let running = shared.clone();
        let thread = thread::spawn(move || running.run());
        Victim {
            shared,
            thread: Some(thread),
        }
    }

    /// What it waits for while nothing else is done: the baseline.
    pub fn undisturbed(&self, time: Duration) -> Latencies {
        self.during(|| thread::sleep(time)).0
    }

    /// What it waits for while this is done, a request under way at the end included.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> (Latencies, T) {
        let take =
            |measured: &mut Measured| std::mem::replace(&mut measured.latencies, Latencies::new());
        take(&mut self.shared.measured.lock().unwrap());
        let done = work();
        let measured = self.shared.measured.lock().unwrap();
        let under_way = measured.ended + 1;
        let (mut measured, _) = self
            .shared
            .changed
            .wait_timeout_while(measured, 2 * PATIENCE, |it| it.ended < under_way)
            .unwrap();
        assert!(measured.ended >= under_way, "the victim's thread has ended");
        (take(&mut measured), done)
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || thread::panicking(), "the victim panicked");
    }
}

impl Shared {
    fn run(&self) {
        let mut connection = None;
        for turn in 0.. {
            if self.over.load(Ordering::Relaxed) {
                return;
            }
            let began = Instant::now();
            let outcome = match connection.take() {
                Some(there) => Ok(there),
                None => Honest::connect(self.address, &self.connect),
            }
            .and_then(|mut there| {
                there.request(turn)?;
                connection = Some(there);
                Ok(began.elapsed())
            });
            let mut measured = self.measured.lock().unwrap();
            measured.latencies.note(outcome);
            measured.ended += 1;
            drop(measured);
            self.changed.notify_all();
            thread::sleep(PACE.saturating_sub(began.elapsed()));
        }
    }
}

/// Its connection.
struct Honest {
    store: Store,
    /// What the last SET of this connection stored.
    value: Option<String>,
}

impl Honest {
    fn connect(address: SocketAddr, connect: &Connect) -> Result<Honest, String> {
        let stream = TcpStream::connect_timeout(&address, PATIENCE)
            .map_err(|error| format!("cannot connect: {error}"))?;
        let mut client = Client::on(stream);
        let id = &*connect.client_id;
        send(&mut client, &connect.bytes())?;
        match client.poll(PATIENCE) {
            Heard::Packet(packet) if packet.kind() == kind::CONNACK && packet.ack().reason == 0 => {
            }
            other => return Err(format!("instead of a CONNACK: {other:?}")),
        }
        let mut store = Store::on(client, id);
        let filter = (&*format!("clients/{id}/#"), 1);
        let packet_id = store.client.packet_id();
        let subscribe = crate::packet::subscribe(packet_id, &[], &[filter]);
        send(&mut store.client, &subscribe)?;
        wait_for(&mut store.client, kind::SUBACK)?;
        Ok(Honest { store, value: None })
    }

    /// One request of each kind in turn.
    fn request(&mut self, turn: u64) -> Result<(), String> {
        match turn % 3 {
            0 => {
                let value = turn.to_string();
                self.ask(&["SET", "victim", &value], b"+OK\r\n".to_vec())?;
                self.value = Some(value);
                Ok(())
            }
            1 => match self.value.clone() {
                Some(value) => self.ask(&["GET", "victim"], resp::bulk(value.as_bytes())),
                None => self.ask(&["GET", "no such key"], b"$-1\r\n".to_vec()),
            },
            _ => {
                send(&mut self.store.client, &PINGREQ)?;
                wait_for(&mut self.store.client, kind::PINGRESP)
            }
        }
    }

    /// Asks the store, and waits for the acknowledgement, which comes behind the answer.
    fn ask(&mut self, arguments: &[&str], expected: Vec<u8>) -> Result<(), String> {
        let request = self.store.command(arguments);
        let mut publish = request.publish();
        publish.packet_id = self.store.client.packet_id();
        send(&mut self.store.client, &publish.bytes())?;
        let mut answered = false;
        loop {
            let packet = next(&mut self.store.client)?;
            if store::is_answer(&packet, request.correlation.as_deref()) {
                let payload = packet.publish().payload;
                if payload != expected {
                    return Err(format!("{arguments:?}: {}", payload.escape_ascii()));
                }
                answered = true;
            } else if packet.kind() == kind::PUBACK && packet.ack().packet_id == publish.packet_id {
                return match answered {
                    true => Ok(()),
                    false => Err(format!("{arguments:?}: {packet:?} without an answer")),
                };
            }
        }
    }
}

fn send(client: &mut Client, bytes: &[u8]) -> Result<(), String> {
    client
        .try_send(bytes)
        .map_err(|error| format!("cannot send: {error}"))
}

fn next(client: &mut Client) -> Result<crate::Packet, String> {
    match client.poll(PATIENCE) {
        Heard::Packet(packet) => Ok(packet),
        Heard::Silence => Err(format!("no answer within {PATIENCE:?}")),
        Heard::Closed => Err("the server closed the connection".into()),
    }
}

fn wait_for(client: &mut Client, wanted: u8) -> Result<(), String> {
    while next(client)?.kind() != wanted {}
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_counts_for_every_request_it_held_up() {
        let mut latencies = Latencies::new();
        for _ in 0..100 {
            latencies.note(Ok(Duration::from_millis(1)));
        }
        assert_eq!((latencies.count(), latencies.failures()), (100, 0));
        latencies.note(Ok(Duration::from_millis(1000)));
        // 1000, 995, 990 … 5 ms: 200 requests were due.
        assert_eq!(latencies.count(), 300);
        assert!(latencies.p50() > Duration::from_millis(200), "{latencies}");
        assert!(latencies.p99() > Duration::from_millis(950), "{latencies}");
    }

    #[test]
    fn failures_are_counted_and_the_first_is_named() {
        let mut latencies = Latencies::new();
        latencies.note(Err("refused".into()));
        latencies.note(Err("closed".into()));
        assert_eq!((latencies.count(), latencies.failures()), (0, 2));
        assert!(latencies.to_string().contains("the first: refused"));
    }
}
