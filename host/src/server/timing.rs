//! Measures requests: how long policies take, and how long responses and notifications take until
//! they leave.
//!
//! The clock is read once for several requests, because a reading would be a noticeable part of a
//! request. So a light call counts with the mean of its neighbours. A call that used much fuel is
//! measured.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use statehouse_protocol::Histogram;

use super::names::Names;
use super::watched::Watched;
use crate::limits;
use statehouse_core::request::Incoming;
use statehouse_core::store::{Effects, RestsOn};

/// Fuel from which a call is measured by a reading of the clock of its own: some hundred
/// microseconds.
const HEAVY_FUEL_MIN: u64 = 50_000;

/// The bounds of the times of policy calls: a GET takes some microseconds, and the watchdog stops a
/// call after half a second.
static CALL_BOUNDS: [Duration; 12] = [
    Duration::from_micros(5),
    Duration::from_micros(10),
    Duration::from_micros(25),
    Duration::from_micros(50),
    Duration::from_micros(100),
    Duration::from_micros(250),
    Duration::from_millis(1),
    Duration::from_micros(2_500),
    Duration::from_millis(10),
    Duration::from_millis(25),
    Duration::from_millis(100),
    Duration::from_millis(500),
];

/// The bounds of the times until outputs leave: a read takes some ten microseconds, and a flush
/// from 50 µs to some seconds on a failing disk.
pub(super) static LEAVE_BOUNDS: [Duration; 14] = [
    Duration::from_micros(50),
    Duration::from_micros(100),
    Duration::from_micros(250),
    Duration::from_micros(500),
    Duration::from_millis(1),
    Duration::from_micros(2_500),
    Duration::from_millis(5),
    Duration::from_millis(10),
    Duration::from_millis(25),
    Duration::from_millis(100),
    Duration::from_millis(250),
    Duration::from_secs(1),
    Duration::from_millis(2_500),
    Duration::from_secs(10),
];

/// The times of policy calls.
pub(super) struct CallTimes {
    times: Histogram,
    /// The last reading of the clock.
    read_at: Instant,
    /// The calls since then, and their fuel.
    calls: u32,
    fuel: u64,
    /// The pace of the last calls that were measured.
    ns_per_fuel: f64,
}

/// The time of one call.
#[derive(Clone, Copy)]
pub(super) struct Call {
    pub(super) began: Instant,
    pub(super) took: Duration,
}

impl Default for CallTimes {
    fn default() -> Self {
        Self {
            times: Histogram::new(&CALL_BOUNDS),
            read_at: Instant::now(),
            calls: 0,
            fuel: 0,
            ns_per_fuel: 0.0,
        }
    }
}

impl CallTimes {
    /// All times since the start.
    pub(super) fn times(&self) -> &Histogram {
        &self.times
    }

    /// Calls may follow this reading of the clock.
    pub(super) fn begin(&mut self, now: Instant) {
        (self.read_at, self.calls, self.fuel) = (now, 0, 0);
    }

    /// A call that used this much fuel has ended.
    pub(super) fn called(&mut self, fuel: u64) -> Call {
        self.calls += 1;
        self.fuel = self.fuel.saturating_add(fuel);
        if fuel < HEAVY_FUEL_MIN {
            return Call {
                began: self.read_at,
                took: Duration::from_nanos((fuel as f64 * self.ns_per_fuel) as u64),
            };
        }
        let now = Instant::now();
        let elapsed = now.duration_since(self.read_at);
        // The calls before it since the last reading are light.
        let took = elapsed.mul_f64(fuel as f64 / self.fuel as f64);
        let light = self.calls - 1;
        if light > 0 {
            let rest = elapsed.saturating_sub(took);
            self.times.record_many(rest / light, light);
        }
        self.times.record(took);
        self.begin(now);
        Call {
            began: now.checked_sub(took).unwrap_or(now),
            took,
        }
    }

    /// Measures the calls since the last reading of the clock.
    pub(super) fn read(&mut self, now: Instant) {
        if self.calls > 0 {
            let elapsed = now.duration_since(self.read_at);
            self.times.record_many(elapsed / self.calls, self.calls);
            self.ns_per_fuel = elapsed.as_nanos() as f64 / self.fuel.max(1) as f64;
        }
        self.begin(now);
    }
}

/// How a request was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answered {
    /// As it asked.
    Ok,
    /// With an error of the policy.
    Error,
    /// With an error, after a right or a limit was missing.
    Refused,
    /// The policy failed.
    Failed,
    /// As its original, since it was a redelivery.
    Duplicate,
}

impl Answered {
    /// All of them, with their names in metrics.
    const ALL: [(Self, &'static str); 5] = [
        (Self::Ok, "ok"),
        (Self::Error, "error"),
        (Self::Refused, "refused"),
        (Self::Failed, "failed"),
        (Self::Duplicate, "duplicate"),
    ];

    fn of(effects: &Effects) -> Self {
        if effects.failed.is_some() {
            Self::Failed
        } else if effects.repeated.is_some() {
            Self::Duplicate
        } else if effects.denied.is_some() || effects.exceeded.is_some() {
            Self::Refused
        } else if error_of(effects).is_some() {
            Self::Error
        } else {
            Self::Ok
        }
    }

    /// The name in metrics.
    pub(super) fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }
}

/// The text of an error response (RESP), without its first word if that is `ERR`.
pub(super) fn error_of(effects: &Effects) -> Option<&[u8]> {
    let text = effects.answer.as_ref()?.payload.strip_prefix(b"-")?;
    // In one dialect a negative number is a response, too.
    let is_error = text.first().is_some_and(u8::is_ascii_alphabetic);
    let text = text.strip_prefix(b"ERR ").unwrap_or(text);
    is_error.then(|| text.trim_ascii_end())
}

/// A request from its decision until its response leaves. Each waiting response has one, so it is
/// small and holds no reference but, at times, the client.
pub(super) struct Timed {
    /// When the turn of its connection began.
    pub(super) begun: Instant,
    /// Until the policy was called, and its call, in microseconds.
    pub(super) queue_us: u32,
    pub(super) policy_us: u32,
    pub(super) fuel: u32,
    pub(super) answered: Answered,
    /// The numbers of [`Names`].
    pub(super) command: u16,
    pub(super) policy: u16,
    /// The first key that it wrote or read.
    pub(super) key: ShortKey,
    /// None if it is the client of the request before in the same queue.
    client: Option<Arc<str>>,
}

impl Timed {
    pub(super) fn of(
        incoming: &Incoming<'_>,
        effects: &Effects,
        begun: Instant,
        call: Call,
        names: &mut Names,
    ) -> Self {
        let command = effects.answer.as_ref().and_then(|it| it.command);
        let (policy, command) = names.numbers(effects.by.as_deref(), command);
        Self {
            begun,
            queue_us: micros(call.began.saturating_duration_since(begun)),
            policy_us: micros(call.took),
            fuel: u32::try_from(effects.fuel).unwrap_or(u32::MAX),
            answered: Answered::of(effects),
            command,
            policy,
            key: ShortKey::of(effects, incoming.payload),
            client: None,
        }
    }
}

fn micros(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}

/// Requests whose responses have not left, in the order in which they leave.
pub(super) struct Pending {
    requests: VecDeque<Timed>,
    /// The clients of the last request that was added and of the last that left. Requests of one
    /// turn have one client, so few references are counted.
    added: Arc<str>,
    left: Arc<str>,
}

impl Default for Pending {
    fn default() -> Self {
        let none: Arc<str> = "".into();
        Self {
            requests: VecDeque::new(),
            added: none.clone(),
            left: none,
        }
    }
}

impl Pending {
    pub(super) fn add(&mut self, mut timed: Timed, client: &Arc<str>) {
        if !Arc::ptr_eq(&self.added, client) {
            self.added = client.clone();
            timed.client = Some(client.clone());
        }
        self.requests.push_back(timed);
    }

    /// The next request, with its client.
    pub(super) fn next(&mut self) -> Option<(Timed, &Arc<str>)> {
        let mut timed = self.requests.pop_front()?;
        if let Some(client) = timed.client.take() {
            self.left = client;
        }
        Some((timed, &self.left))
    }
}

/// The beginning of a key. It holds no reference, because a waiting response must not keep a whole
/// read buffer alive.
#[derive(Clone, Copy)]
pub(super) struct ShortKey {
    bytes: [u8; limits::SLOW_KEY_BYTES_MAX],
    /// The length of the whole key; none if the request has no key.
    length: Option<u32>,
}

/// The first key that a request wrote or read, if clients can name it.
pub(super) fn key_of<'a>(effects: &'a Effects, payload: &'a [u8]) -> Option<&'a [u8]> {
    let written = effects.handled.as_ref().and_then(|it| it.writes.first());
    if let Some(write) = written.filter(|it| !it.hidden) {
        return Some(write.key());
    }
    match &effects.rests_on {
        RestsOn::Keys(reads) => {
            let read = reads.first().filter(|it| !it.hidden);
            read.and_then(|it| it.key.resolve(payload))
        }
        _ => None,
    }
}

impl ShortKey {
    fn of(effects: &Effects, payload: &[u8]) -> Self {
        let key = key_of(effects, payload);
        let mut bytes = [0; limits::SLOW_KEY_BYTES_MAX];
        if let Some(key) = key {
            let shown = key.len().min(bytes.len());
            bytes[..shown].copy_from_slice(&key[..shown]);
        }
        Self {
            bytes,
            length: key.map(|it| u32::try_from(it.len()).unwrap_or(u32::MAX)),
        }
    }

    /// The key with escapes, and an ellipsis if it was cut.
    pub(super) fn text(&self) -> Option<String> {
        let length = self.length? as usize;
        let shown = &self.bytes[..length.min(self.bytes.len())];
        let mut text = shown.escape_ascii().to_string();
        if length > shown.len() {
            text.push('…');
        }
        Some(text)
    }
}

/// How long outputs took until they left.
pub(super) struct LeaveTimes {
    /// By the number of the command.
    requests: Vec<[Option<Histogram>; 5]>,
    notifications: Histogram,
    /// Further measurements, while an operator watches.
    pub(super) watched: Option<Box<Watched>>,
}

/// The times of requests with one command and one way of being answered.
pub struct RequestTimes {
    /// The command; `other` beyond the limit, and for requests without one.
    pub command: String,
    /// How they were answered.
    pub outcome: &'static str,
    /// From the beginning of the turn until the response left.
    pub times: Histogram,
}

/// How long requests took since the start.
pub struct Times {
    /// By command and outcome, until the response left.
    pub requests: Vec<RequestTimes>,
    /// From the decision of a notification until it left.
    pub notifications: Histogram,
    /// Policy calls.
    pub calls: Histogram,
}

impl Default for LeaveTimes {
    fn default() -> Self {
        Self {
            requests: Vec::new(),
            notifications: Histogram::new(&LEAVE_BOUNDS),
            watched: None,
        }
    }
}

impl LeaveTimes {
    pub(super) fn response(&mut self, timed: &Timed, now: Instant) {
        let command = usize::from(timed.command);
        if command >= self.requests.len() {
            self.requests.resize(command + 1, Default::default());
        }
        let times = &mut self.requests[command][timed.answered as usize];
        let times = times.get_or_insert_with(|| Histogram::new(&LEAVE_BOUNDS));
        times.record(now.saturating_duration_since(timed.begun));
        if let Some(watched) = &mut self.watched {
            watched.response(timed, now);
        }
    }

    pub(super) fn notification(&mut self, decided: Instant, now: Instant) {
        let delay = now.saturating_duration_since(decided);
        self.notifications.record(delay);
        if let Some(watched) = &mut self.watched {
            watched.notification(delay);
        }
    }

    /// The times of notifications.
    pub(super) fn notifications(&self) -> Histogram {
        self.notifications.clone()
    }

    /// The times of requests.
    pub(super) fn requests(&self, names: &Names) -> Vec<RequestTimes> {
        let of_command = |(command, times): (&str, &[Option<Histogram>; 5])| {
            let found = Answered::ALL.iter().zip(times);
            let found = found.filter_map(|((_, outcome), times)| {
                Some(RequestTimes {
                    command: command.to_string(),
                    outcome,
                    times: times.clone()?,
                })
            });
            found.collect::<Vec<_>>()
        };
        let commands = names.commands();
        let commands = commands.zip(&self.requests);
        commands.flat_map(of_command).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heavy_calls_are_measured_and_light_ones_averaged() {
        let mut times = CallTimes::default();
        let begun = Instant::now();
        times.begin(begun);
        for _ in 0..3 {
            times.called(1_000);
        }
        times.read(begun + Duration::from_micros(24));
        let counts: Vec<u64> = times.times().buckets().map(|(_, count)| count).collect();
        assert_eq!(counts[..3], [0, 3, 0], "a mean of 8 µs");
        // The pace of these calls is that of the next one, until it is measured.
        assert_eq!(times.called(2_000).took, Duration::from_micros(16));

        let early = Instant::now()
            .checked_sub(Duration::from_millis(100))
            .unwrap();
        times.begin(early);
        times.called(10_000);
        let heavy = times.called(990_000);
        assert!(heavy.took >= Duration::from_millis(99), "{:?}", heavy.took);
        assert!(heavy.began > early && times.calls == 0);
        assert_eq!(times.times().count(), 5);
        assert!(times.times().sum() >= Duration::from_millis(100));
    }
}
