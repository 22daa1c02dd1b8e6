//! An honest client that measures the server's latency during an attack.
//!
//! The client sends SET, GET and PINGREQ in turn on its own connection, at a steady pace, and
//! reconnects when the connection ends. A stall of one second must count as all requests of that
//! second, not as one. So each latency also adds the requests that the client could not send during
//! it.

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

/// The time from one request to the next. At this rate, a small machine is mostly idle.
const PACE: Duration = Duration::from_millis(5);

/// The victim's latencies in one phase.
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

    /// The number of correctly answered requests, including those that a stall prevented.
    pub fn count(&self) -> u64 {
        self.histogram.len()
    }

    pub fn p50(&self) -> Duration {
        self.quantile(0.5)
    }

    pub fn p99(&self) -> Duration {
        self.quantile(0.99)
    }

    pub fn max(&self) -> Duration {
        Duration::from_micros(self.histogram.max())
    }

    /// The number of requests without a correct answer and of refused connections.
    pub fn failures(&self) -> u64 {
        self.failures
    }

    fn quantile(&self, quantile: f64) -> Duration {
        Duration::from_micros(self.histogram.value_at_quantile(quantile))
    }

    fn record(&mut self, outcome: Result<Duration, String>) {
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

/// Formats a duration in milliseconds.
pub fn milliseconds(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1000.0)
}

/// A client that runs until drop.
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
    /// The latencies of the current phase.
    latencies: Latencies,
    /// The number of completed attempts in all phases, with or without an answer.
    ended: u64,
}

impl Victim {
    /// Starts a client of the server at this address, with the client id `victim`.
    pub fn start(address: SocketAddr) -> Victim {
        Victim::start_as(address, Connect::new("victim"))
    }

    /// Like [`Self::start`], with this CONNECT. The client uses the key `victim`.
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

    /// Measures the baseline for this time.
    pub fn undisturbed(&self, time: Duration) -> Latencies {
        self.during(|| thread::sleep(time)).0
    }

    /// Measures while `work` runs, including a request that is in progress at its end.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> (Latencies, T) {
        let take =
            |measured: &mut Measured| std::mem::replace(&mut measured.latencies, Latencies::new());
        take(&mut self.shared.measured.lock().unwrap());
        let done = work();
        let measured = self.shared.measured.lock().unwrap();
        let in_progress = measured.ended + 1;
        let (mut measured, _) = self
            .shared
            .changed
            .wait_timeout_while(measured, 2 * PATIENCE, |it| it.ended < in_progress)
            .unwrap();
        assert!(
            measured.ended >= in_progress,
            "the victim's thread has ended"
        );
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
            measured.latencies.record(outcome);
            measured.ended += 1;
            drop(measured);
            self.changed.notify_all();
            thread::sleep(PACE.saturating_sub(began.elapsed()));
        }
    }
}

/// A connection of the victim.
struct Honest {
    store: Store,
    /// The value of the last SET on this connection.
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

    /// Sends one request. The three kinds take turns.
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

    /// Sends a request to the store and waits for the acknowledgement, which follows the answer.
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
    fn stall_counts_for_every_delayed_request() {
        let mut latencies = Latencies::new();
        for _ in 0..100 {
            latencies.record(Ok(Duration::from_millis(1)));
        }
        assert_eq!((latencies.count(), latencies.failures()), (100, 0));
        latencies.record(Ok(Duration::from_millis(1000)));
        // 1000, 995, 990 … 5 ms: 200 requests were due.
        assert_eq!(latencies.count(), 300);
        assert!(latencies.p50() > Duration::from_millis(200), "{latencies}");
        assert!(latencies.p99() > Duration::from_millis(950), "{latencies}");
    }

    #[test]
    fn failures_are_counted_and_the_first_is_named() {
        let mut latencies = Latencies::new();
        latencies.record(Err("refused".into()));
        latencies.record(Err("closed".into()));
        assert_eq!((latencies.count(), latencies.failures()), (0, 2));
        assert!(latencies.to_string().contains("the first: refused"));
    }
}
