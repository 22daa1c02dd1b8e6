//! Measures requests: how long policies take, and how long responses and notifications take until
//! they leave.
//!
//! The clock is read once for several requests, because a reading would be a noticeable part of a
//! request. So a light call counts with the mean of its neighbours. A call that used much fuel is
//! measured.

use std::time::{Duration, Instant};

use statehouse_protocol::{Histogram, TimeBucket};

use super::names::Names;
use super::watched::Watched;
use statehouse_core::store::Effects;

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

pub(super) struct CallTimes {
    times: Histogram,
    /// When the turn began.
    turn: Instant,
    /// The last reading of the clock, and the microseconds from the beginning of the turn to it.
    read_at: Instant,
    queue_us: u32,
    /// The calls since then, and their fuel.
    calls: u32,
    fuel: u64,
    /// The pace of the last calls that were measured.
    ns_per_fuel: f64,
}

/// The time of one call, and from the beginning of the turn until it, in microseconds.
#[derive(Clone, Copy)]
pub(super) struct Call {
    queue_us: u32,
    policy_us: u32,
}

impl Default for CallTimes {
    fn default() -> Self {
        let now = Instant::now();
        Self {
            times: Histogram::new(&CALL_BOUNDS),
            turn: now,
            read_at: now,
            queue_us: 0,
            calls: 0,
            fuel: 0,
            ns_per_fuel: 0.0,
        }
    }
}

impl CallTimes {
    pub(super) fn times(&self) -> &Histogram {
        &self.times
    }

    /// Calls of a turn that began at the time `turn` may follow this reading of the clock.
    pub(super) fn begin(&mut self, turn: Instant, now: Instant) {
        self.turn = turn;
        self.restart(now);
    }

    fn restart(&mut self, now: Instant) {
        (self.read_at, self.calls, self.fuel) = (now, 0, 0);
        self.queue_us = micros(now.saturating_duration_since(self.turn));
    }

    /// A call that used this much fuel has ended.
    pub(super) fn called(&mut self, fuel: u64) -> Call {
        self.calls += 1;
        self.fuel = self.fuel.saturating_add(fuel);
        if fuel < HEAVY_FUEL_MIN {
            let policy_ns = (fuel as f64 * self.ns_per_fuel) as u64;
            return Call {
                queue_us: self.queue_us,
                policy_us: u32::try_from(policy_ns / 1_000).unwrap_or(u32::MAX),
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
        self.restart(now);
        let policy_us = micros(took);
        Call {
            queue_us: self.queue_us.saturating_sub(policy_us),
            policy_us,
        }
    }

    /// Measures the calls since the last reading of the clock.
    pub(super) fn read(&mut self, now: Instant) {
        if self.calls > 0 {
            let elapsed = now.duration_since(self.read_at);
            self.times.record_many(elapsed / self.calls, self.calls);
            self.ns_per_fuel = elapsed.as_nanos() as f64 / self.fuel.max(1) as f64;
        }
        self.restart(now);
    }
}

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

/// What is measured of a request until its response leaves. Each waiting response has one, so it is
/// small and holds no reference.
#[derive(Clone, Copy)]
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
}

impl Timed {
    pub(super) fn of(effects: &Effects, begun: Instant, call: Call, names: &mut Names) -> Self {
        let command = effects.answer.as_ref().and_then(|it| it.command);
        let (policy, command) = names.numbers(effects.by.as_deref(), command);
        Self {
            begun,
            queue_us: call.queue_us,
            policy_us: call.policy_us,
            fuel: u32::try_from(effects.fuel).unwrap_or(u32::MAX),
            answered: Answered::of(effects),
            command,
            policy,
        }
    }

    #[cfg(test)]
    pub(super) fn example(begun: Instant) -> Self {
        Self {
            begun,
            queue_us: 0,
            policy_us: 0,
            fuel: 0,
            answered: Answered::Ok,
            command: 0,
            policy: 0,
        }
    }
}

fn micros(time: Duration) -> u32 {
    u32::try_from(time.as_micros()).unwrap_or(u32::MAX)
}

/// How long outputs took until they left.
pub(super) struct LeaveTimes {
    /// By the number of the command.
    requests: Vec<[Option<Histogram>; 5]>,
    notifications: Histogram,
    /// The last time that was computed.
    last: Elapsed,
    /// Further measurements, while an operator watches.
    pub(super) watched: Option<Box<Watched>>,
}

/// The time from the beginning of a turn until outputs left. Many outputs of one turn leave
/// together, so it is computed once for all of them.
#[derive(Clone, Copy)]
struct Elapsed {
    begun: Instant,
    left: Instant,
    time: Duration,
    bucket: TimeBucket,
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
        let (now, notifications) = (Instant::now(), Histogram::new(&LEAVE_BOUNDS));
        Self {
            requests: Vec::new(),
            last: Elapsed {
                begun: now,
                left: now,
                time: Duration::ZERO,
                bucket: notifications.bucket_of(Duration::ZERO),
            },
            notifications,
            watched: None,
        }
    }
}

impl LeaveTimes {
    /// A response leaves. Returns how long its request took.
    pub(super) fn response(&mut self, timed: &Timed, now: Instant) -> Duration {
        let Elapsed { time, bucket, .. } = self.elapsed(timed.begun, now);
        let command = usize::from(timed.command);
        if command >= self.requests.len() {
            self.requests.resize(command + 1, Default::default());
        }
        let times = &mut self.requests[command][timed.answered as usize];
        let times = times.get_or_insert_with(|| Histogram::new(&LEAVE_BOUNDS));
        times.record_at(bucket);
        if let Some(watched) = &mut self.watched {
            watched.response(timed, now);
        }
        time
    }

    pub(super) fn notification(&mut self, decided: Instant, now: Instant) {
        let Elapsed { time, bucket, .. } = self.elapsed(decided, now);
        self.notifications.record_at(bucket);
        if let Some(watched) = &mut self.watched {
            watched.notification(time);
        }
    }

    fn elapsed(&mut self, begun: Instant, left: Instant) -> Elapsed {
        if (self.last.begun, self.last.left) != (begun, left) {
            let time = left.saturating_duration_since(begun);
            self.last = Elapsed {
                begun,
                left,
                time,
                bucket: self.notifications.bucket_of(time),
            };
        }
        self.last
    }

    pub(super) fn notifications(&self) -> Histogram {
        self.notifications.clone()
    }

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
        times.begin(begun, begun);
        for _ in 0..3 {
            times.called(1_000);
        }
        times.read(begun + Duration::from_micros(24));
        let counts: Vec<u64> = times.times().buckets().map(|(_, count)| count).collect();
        assert_eq!(counts[..3], [0, 3, 0], "a mean of 8 µs");
        // The pace of these calls is that of the next one, until it is measured.
        let light = times.called(2_000);
        assert_eq!((light.queue_us, light.policy_us), (24, 16));

        let early = Instant::now()
            .checked_sub(Duration::from_millis(100))
            .unwrap();
        times.begin(early, early);
        times.called(10_000);
        let heavy = times.called(990_000);
        assert!(heavy.policy_us >= 99_000, "{}", heavy.policy_us);
        assert!(heavy.queue_us > 0 && times.calls == 0);
        assert_eq!(times.times().count(), 5);
        assert!(times.times().sum() >= Duration::from_millis(100));
    }

    #[test]
    fn outputs_that_leave_together_have_their_own_times() {
        let left = Instant::now();
        let before = |ms| left.checked_sub(Duration::from_millis(ms)).unwrap();
        let mut times = LeaveTimes::default();
        for (begun, left) in [
            (before(4), left),
            (before(4), left),
            (before(90), left),
            (before(4), left + Duration::from_millis(90)),
        ] {
            times.notification(begun, left);
        }
        let times = times.notifications();
        let counted = times.buckets().filter(|it| it.1 > 0);
        let counted: Vec<_> = counted
            .map(|(bound, count)| (bound.unwrap(), count))
            .collect();
        let ms = Duration::from_millis;
        assert_eq!(counted, [(ms(5), 2), (ms(100), 2)]);
        assert_eq!(times.sum(), ms(4 + 4 + 90 + 94));
    }
}
