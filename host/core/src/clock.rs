//! Time: the store's `now`, and the hybrid logical clock that issues versions.
//!
//! `now` must never decrease, and stamps must always increase; otherwise clients could see an older
//! version after a newer one. Clocks are read only through [`Source`], which tests replace with
//! [`ManualSource`].

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::limits;

const NANOS_PER_MS: u64 = 1_000_000;

/// While the wall clock is behind, `now` leaves out one of this many parts of the time that passes:
/// the wall clock catches up in about this many times the step, and locks last 7 % longer at most.
const LEFT_OUT_PART: u64 = 16;

/// A source of time.
pub trait Source: Send + Sync {
    /// Nanoseconds since the Unix epoch. May be stepped in either direction.
    fn wall_ns(&self) -> u64;
    /// Nanoseconds since some start. Never decreases.
    fn monotonic_ns(&self) -> u64;
}

/// The machine's clocks.
pub struct SystemSource {
    start: Instant,
}

impl Default for SystemSource {
    fn default() -> Self {
        Self {
            start: Instant::now(),
        }
    }
}

impl Source for SystemSource {
    fn wall_ns(&self) -> u64 {
        let since_epoch = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        u64::try_from(since_epoch.as_nanos()).unwrap_or(u64::MAX)
    }

    fn monotonic_ns(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// The wall clock of this machine, in milliseconds since 1970.
pub fn wall_ms() -> u64 {
    SystemSource::default().wall_ns() / NANOS_PER_MS
}

/// A clock that only its caller moves: for tests, simulation and replay.
#[derive(Default)]
pub struct ManualSource {
    wall_ns: AtomicU64,
    monotonic_ns: AtomicU64,
}

impl ManualSource {
    /// Starts with the wall clock at `wall_ms`.
    pub fn at(wall_ms: u64) -> Self {
        let source = Self::default();
        source.set_wall(wall_ms);
        source
    }

    /// Advances both clocks by `ms`.
    pub fn advance(&self, ms: u64) {
        self.advance_ns(ms * NANOS_PER_MS);
    }

    fn advance_ns(&self, ns: u64) {
        self.wall_ns.fetch_add(ns, Ordering::Relaxed);
        self.monotonic_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// Steps only the wall clock, as an operator or NTP does.
    pub fn set_wall(&self, wall_ms: u64) {
        self.wall_ns
            .store(wall_ms * NANOS_PER_MS, Ordering::Relaxed);
    }
}

impl Source for ManualSource {
    fn wall_ns(&self) -> u64 {
        self.wall_ns.load(Ordering::Relaxed)
    }

    fn monotonic_ns(&self) -> u64 {
        self.monotonic_ns.load(Ordering::Relaxed)
    }
}

/// The store's `now`. It follows the wall clock and never decreases. After the wall clock is
/// stepped back, `now` continues at 15/16 of the pace of the monotonic clock until the wall clock
/// has caught up, about 16 times as long as the step. Until then keys last up to 1/15 longer, and
/// no key ever ends early.
///
/// If the wall clock is stepped ahead, `now` follows at once, so that versions agree with clients'
/// clocks. No time has passed, so [`Reading::stepped_ms`] says by how much every deadline must be
/// postponed.
pub struct Clock {
    source: Arc<dyn Source>,
    /// The last reading, in ms.
    shown_ms: Arc<AtomicU64>,
    /// The time of the monotonic clock that `now` has left out. The rest is the counted time.
    left_out_ns: u64,
    /// While the wall clock is behind: the monotonic time up to which time was left out.
    left_out_until_ns: Option<u64>,
    /// `now` at the last reading at which the wall clock was not behind.
    anchor_ns: u64,
    anchor_counted_ns: u64,
    /// What `now` would have been at `start_counted_ns` if all reported steps had happened before.
    /// In counted time, because a later step would otherwise be reported without the time that was
    /// left out, and keys would end early.
    start_ns: u64,
    start_counted_ns: u64,
}

impl Clock {
    /// Starts at the wall clock.
    pub fn new(source: Arc<dyn Source>) -> Self {
        Self::resume(source, 0)
    }

    /// Starts at the wall clock, or at the last time of an earlier run if that is later.
    pub fn resume(source: Arc<dyn Source>, last_ms: u64) -> Self {
        let anchor_ns = source.wall_ns().max(last_ms.saturating_mul(NANOS_PER_MS));
        let anchor_counted_ns = source.monotonic_ns();
        Self {
            source,
            shown_ms: Arc::new(AtomicU64::new(anchor_ns / NANOS_PER_MS)),
            left_out_ns: 0,
            left_out_until_ns: None,
            anchor_ns,
            anchor_counted_ns,
            start_ns: anchor_ns,
            start_counted_ns: anchor_counted_ns,
        }
    }

    /// The last reading of `now` in ms, for other threads: no client has seen a later time.
    pub fn shown(&self) -> Arc<AtomicU64> {
        self.shown_ms.clone()
    }

    /// Reads `now`.
    pub fn read(&mut self) -> Reading {
        // The wall clock must be read first. If this thread is preempted between the two readings,
        // the wall reading is too old, so a pause can never push `now` ahead of the wall clock
        // permanently.
        let wall_ns = self.source.wall_ns();
        let monotonic_ns = self.source.monotonic_ns();
        self.leave_out(wall_ns, monotonic_ns);
        let counted_ns = monotonic_ns - self.left_out_ns;
        let carried_ns = self.carried_ns(counted_ns);
        if wall_ns >= carried_ns {
            self.anchor_ns = wall_ns;
            self.anchor_counted_ns = counted_ns;
        }
        let now_ns = carried_ns.max(wall_ns);
        let paced_ns = self
            .start_ns
            .saturating_add(counted_ns - self.start_counted_ns);
        let mut stepped_ms = now_ns.saturating_sub(paced_ns) / NANOS_PER_MS;
        if stepped_ms < limits::CLOCK_STEP_MS_MIN {
            stepped_ms = 0;
        }
        self.start_ns += stepped_ms * NANOS_PER_MS;
        let now_ms = now_ns / NANOS_PER_MS;
        self.shown_ms.store(now_ms, Ordering::Relaxed);
        Reading {
            now_ms,
            wall_behind_ms: (now_ns - wall_ns) / NANOS_PER_MS,
            stepped_ms,
        }
    }

    /// Leaves out a part of the time since the last reading, if the wall clock was behind then and
    /// still is. A single reading may be behind because this thread was preempted between the two
    /// clocks.
    fn leave_out(&mut self, wall_ns: u64, monotonic_ns: u64) {
        let carried_ns = self.carried_ns(monotonic_ns - self.left_out_ns);
        let behind_ns = carried_ns.saturating_sub(wall_ns);
        // A small step is not worth it: if the clock steps back and forth, each way would count.
        let least_ms = match self.left_out_until_ns {
            Some(_) => 1,
            None => limits::CLOCK_STEP_MS_MIN,
        };
        if behind_ns < least_ms * NANOS_PER_MS {
            self.left_out_until_ns = None;
            return;
        }
        let until_ns = self.left_out_until_ns.unwrap_or(monotonic_ns);
        let passed_ns = monotonic_ns - until_ns;
        // Never more than the time since the last reading, or `now` would decrease. The remainder
        // of the division counts at the next reading.
        self.left_out_ns += (passed_ns / LEFT_OUT_PART).min(behind_ns);
        self.left_out_until_ns = Some(monotonic_ns - passed_ns % LEFT_OUT_PART);
    }

    /// The last `now` at which the wall clock was not behind, and the time counted since.
    fn carried_ns(&self, counted_ns: u64) -> u64 {
        self.anchor_ns
            .saturating_add(counted_ns - self.anchor_counted_ns)
    }
}

/// One reading of a [`Clock`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// Milliseconds since the Unix epoch.
    pub now_ms: u64,
    /// How far the wall clock is behind `now`. More than a second means that it was stepped back.
    pub wall_behind_ms: u64,
    /// How far `now` was stepped ahead since the last reading that reported a step.
    pub stepped_ms: u64,
}

/// A version: a reading of the store's hybrid logical clock. Ordered by wall, then counter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Stamp {
    /// Milliseconds since the Unix epoch.
    pub wall: u64,
    /// Distinguishes stamps of the same millisecond.
    pub counter: u32,
}

impl Stamp {
    /// The form on the wire: padded to 15 and 5 digits, followed by the node (protocol, section 5).
    pub fn display<'a>(&self, node: &'a str) -> impl fmt::Display + use<'a> {
        struct Wire<'a>(Stamp, &'a str);
        impl fmt::Display for Wire<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let Stamp { wall, counter } = self.0;
                let mut head = *b"000000000000000:00000:";
                // In parts, because each digit waits for the one after it in its part.
                const PART: u64 = 100_000;
                let is_usual = write_digits(&mut head[10..15], wall % PART)
                    & write_digits(&mut head[5..10], wall / PART % PART)
                    & write_digits(&mut head[..5], wall / PART / PART)
                    & write_digits(&mut head[16..21], counter.into());
                match std::str::from_utf8(&head) {
                    // Each answer contains a version, and formatting with the standard library
                    // takes twice as long.
                    Ok(head) if is_usual => {
                        f.write_str(head)?;
                        f.write_str(self.1)
                    }
                    _ => write!(f, "{wall:015}:{counter:05}:{}", self.1),
                }
            }
        }
        Wire(*self, node)
    }

    /// The bytes of that form, unless the time or the counter has more digits.
    pub(crate) fn shown_bytes(node: &str) -> usize {
        "000000000000000:00000:".len() + node.len()
    }
}

/// Writes a number over zeros, right-aligned. Returns false if the number has too many digits.
fn write_digits(zeros: &mut [u8], mut number: u64) -> bool {
    for place in zeros.iter_mut().rev() {
        *place = b'0' + (number % 10) as u8;
        number /= 10;
    }
    number == 0
}

/// A fencing token: a reading of any clock, which protects a key. The policy defines its order
/// (wall, counter, node).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fence {
    /// Milliseconds since the Unix epoch.
    pub wall: u64,
    /// Distinguishes readings of the same millisecond.
    pub counter: u32,
    /// The node whose clock it was.
    pub node: Box<str>,
}

/// Counters must stay below this, because .NET clients parse 32 signed bits.
pub(crate) const COUNTER_END: u64 = (1 << 31) - 1;

/// The store's hybrid logical clock: the last stamp it issued.
///
/// Kulkarni, Demirbas, Madappa, Avva, Leone: *Logical Physical Clocks and Consistent Snapshots in
/// Globally Distributed Databases*, 2014, figure 5.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hlc {
    last: Stamp,
}

impl Hlc {
    /// The send or local event of the paper: a stamp above every earlier one.
    pub fn tick(&mut self, now_ms: u64) -> Stamp {
        self.receive(Stamp::default(), now_ms)
    }

    /// The receive event of the paper: a stamp above every earlier one and above `observed`.
    pub fn receive(&mut self, observed: Stamp, now_ms: u64) -> Stamp {
        let wall = self.last.wall.max(observed.wall).max(now_ms);
        let mut counter = 0;
        if wall == self.last.wall {
            counter = u64::from(self.last.counter) + 1;
        }
        if wall == observed.wall {
            counter = counter.max(u64::from(observed.counter) + 1);
        }
        self.last = match u32::try_from(counter) {
            Ok(counter) if u64::from(counter) < COUNTER_END => Stamp { wall, counter },
            _ => Stamp {
                wall: wall.saturating_add(1),
                counter: 0,
            },
        };
        self.last
    }

    /// A clock that has issued `last`.
    pub fn at(last: Stamp) -> Self {
        Self { last }
    }

    /// The last stamp.
    pub fn last(&self) -> Stamp {
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn start() -> (Arc<ManualSource>, Clock) {
        let source = Arc::new(ManualSource::at(10_000_000));
        let clock = Clock::new(source.clone());
        (source, clock)
    }

    /// `now`, how far the wall clock is behind, and the step.
    fn read(clock: &mut Clock) -> (u64, u64, u64) {
        let reading = clock.read();
        (reading.now_ms, reading.wall_behind_ms, reading.stepped_ms)
    }

    #[test]
    fn now_follows_the_wall_clock_and_never_decreases() {
        let (source, mut clock) = start();
        assert_eq!(read(&mut clock), (10_000_000, 0, 0));
        source.advance(5);
        assert_eq!(clock.read().now_ms, 10_000_005);

        // Stepped back by an hour: `now` continues, at full pace up to the first reading, and the
        // gap is reported.
        source.set_wall(10_000_005 - 3_600_000);
        source.advance(10);
        assert_eq!(read(&mut clock), (10_000_015, 3_600_000, 0));

        // Stepped ahead: followed at once.
        source.set_wall(20_000_000);
        let stepped_ms = 20_000_000 - 10_000_015;
        assert_eq!(read(&mut clock), (20_000_000, 0, stepped_ms));
        assert_eq!(clock.read().stepped_ms, 0, "said once");
    }

    #[test]
    fn steps_ahead_add_up_to_the_clock_difference() {
        let (source, mut clock) = start();
        let mut stepped_ms = 0;
        for round in 1..=100 {
            source.advance(1_000);
            source.set_wall(10_000_000 + round * 1_030);
            let reading = clock.read();
            assert_eq!(reading.now_ms, 10_000_000 + round * 1_030);
            stepped_ms += reading.stepped_ms;
            let missed_ms = round * 30 - stepped_ms;
            assert!(missed_ms < limits::CLOCK_STEP_MS_MIN, "{missed_ms} ms");
        }
        // A wall clock that is stepped back and ahead again reports no step.
        source.set_wall(1);
        assert_eq!(clock.read().stepped_ms, 0);
        source.set_wall(10_000_000 + 103_000);
        assert_eq!(clock.read().stepped_ms, 0);
    }

    #[test]
    fn wall_clock_stepped_back_catches_up_with_now() {
        let (source, mut clock) = start();
        source.set_wall(10_000_000 - 2_000);
        let mut last = clock.read();
        assert_eq!((last.now_ms, last.wall_behind_ms), (10_000_000, 2_000));
        for _ in 0..31 {
            source.advance(1_000);
            let reading = clock.read();
            assert!(reading.now_ms > last.now_ms, "{reading:?}");
            assert!(reading.wall_behind_ms > 0, "{reading:?}");
            assert_eq!(reading.stepped_ms, 0);
            last = reading;
        }
        source.advance(1_000);
        assert_eq!(read(&mut clock), (10_000_000 - 2_000 + 32_000, 0, 0));
    }

    #[test]
    fn frequent_readings_leave_out_the_same_time() {
        for step_ns in [1, 15, 17, 999_983, 7_000_000] {
            let (source, mut clock) = start();
            source.set_wall(10_000_000 - 3_600_000);
            let mut now_ms = clock.read().now_ms;
            for _ in 0..1_000 {
                source.advance_ns(step_ns);
                let reading = clock.read();
                assert!(reading.now_ms >= now_ms, "{reading:?}");
                now_ms = reading.now_ms;
            }
            let left_out_ns = 1_000 * step_ns / LEFT_OUT_PART;
            assert_eq!(clock.left_out_ns, left_out_ns, "readings each {step_ns} ns");
        }
    }

    #[test]
    fn one_late_reading_of_the_wall_clock_leaves_out_no_time() {
        let (source, mut clock) = start();
        for round in 1..=100 {
            source.advance(1_000);
            source.set_wall(10_000_000 + round * 1_000 - 90);
            let (now_ms, _, stepped_ms) = read(&mut clock);
            assert_eq!(now_ms, 10_000_000 + round * 1_000);
            source.set_wall(now_ms);
            assert_eq!(read(&mut clock), (now_ms, 0, stepped_ms));
        }
    }

    #[test]
    fn small_steps_back_and_forth_do_not_add_up() {
        let (source, mut clock) = start();
        let mut wall_ms = 10_000_000;
        for _ in 0..100 {
            source.set_wall(wall_ms - 50);
            clock.read();
            source.advance(1_000);
            clock.read();
            wall_ms += 1_000;
            source.set_wall(wall_ms);
            assert_eq!(clock.read().stepped_ms, 0);
        }
    }

    /// A key that was set after the wall clock had caught up would otherwise end early.
    #[test]
    fn step_ahead_after_a_step_back_is_reported_in_full() {
        let (source, mut clock) = start();
        source.set_wall(10_000_000 - 2_000);
        clock.read();
        source.advance(60_000);
        assert_eq!(read(&mut clock), (10_058_000, 0, 0));

        // Stepped back once more: the time before it is not left out.
        source.set_wall(10_056_000);
        assert_eq!(clock.read().now_ms, 10_058_000);
        source.advance(16_000);
        assert_eq!(clock.read().now_ms, 10_073_000);

        source.set_wall(10_075_000);
        assert_eq!(read(&mut clock), (10_075_000, 0, 2_000));
    }

    #[test]
    fn version_matches_the_published_example() {
        let mut hlc = Hlc::default();
        let (wall, counter) = (1_696_374_425_000, 0);
        let version = hlc.receive(Stamp { wall, counter }, wall);
        let shown = version.display("StateStore").to_string();
        assert_eq!(shown, "001696374425000:00001:StateStore");
    }

    #[test]
    fn version_is_padded_and_never_truncated() {
        for wall in [0, 7, 999_999_999_999_999, 1_000_000_000_000_000, u64::MAX] {
            for counter in [0, 42, 99_999, 100_000, u32::MAX] {
                let shown = Stamp { wall, counter }.display("node").to_string();
                assert_eq!(shown, format!("{wall:015}:{counter:05}:node"));
            }
        }
    }

    #[test]
    fn counter_stays_below_the_dotnet_limit() {
        let mut hlc = Hlc::default();
        for counter in [COUNTER_END as u32 - 1, COUNTER_END as u32, u32::MAX] {
            let wall = 10_000;
            let observed = Stamp { wall, counter };
            let version = hlc.receive(observed, 1);
            assert!(version > observed);
            assert!(u64::from(version.counter) < COUNTER_END, "{version:?}");
        }
    }

    proptest! {
        #[test]
        fn stamps_exceed_earlier_and_observed_ones(
            steps in prop::collection::vec((0u64..200, 0u32.., 0u64..200), 1..200)
        ) {
            let mut hlc = Hlc::default();
            let mut last = Stamp::default();
            for (wall, counter, now) in steps {
                let observed = Stamp { wall, counter };
                let version = hlc.receive(observed, now);
                prop_assert!(version > last && version > observed && version.wall >= now);
                last = version;
                let version = hlc.tick(now);
                prop_assert!(version > last);
                last = version;
            }
        }
    }
}
