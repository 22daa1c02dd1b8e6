//! Replays recorded requests with the policy that handled them, or with a candidate.
//!
//! The table is rebuilt record by record, so each request runs on its original state. The table
//! must receive the recorded writes, never those of the replay. Otherwise one difference would
//! cause more of them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use bytes::Bytes;
use statehouse_wal::{Base, Damage, Error, LogPosition, Sink};

use super::{Past, PastError};
use crate::limits;
use statehouse_core::STANDARD_POLICY;
use statehouse_core::clock::Stamp;
use statehouse_core::log::record::{self, Handled, Record};
use statehouse_core::log::{Image, Malformed};
use statehouse_core::policy::{Engine, Failure, Policy};
use statehouse_core::store::{self, Recorded, StoredPayload, Transaction, Write, replay};
use statehouse_precompiled::Modules;

/// One end of the range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// A record.
    LogPosition(LogPosition),
    /// A time, in milliseconds of the store's time.
    Time(u64),
}

/// A policy that replays all requests instead of the policies that handled them.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// The bytes of its file.
    pub file: &'a [u8],
    /// The `max_fuel` of the store that the candidate is meant for: the fuel of one request,
    /// without the part for its bytes.
    pub fuel_max: u64,
}

/// Receives the progress and the differences of a replay.
pub trait Observer {
    /// Reports that `done` of `total` records are read.
    fn progress(&mut self, done: u64, total: u64, tally: &Tally);
    /// Reports a request with another result.
    fn different(&mut self, difference: &Difference<'_>);
    /// Whether the replay should end with an error before its next record.
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// A request whose replay has another answer or other writes.
pub struct Difference<'a> {
    /// The record of the request.
    pub position: LogPosition,
    /// When the request was handled, in milliseconds of the store's time.
    pub now_ms: u64,
    /// The client that sent it.
    pub client: &'a str,
    /// The payload of the request.
    pub payload: &'a Bytes,
    /// The recorded answer.
    pub answer: &'a StoredPayload,
    /// The version in the recorded answer.
    pub version: Option<Stamp>,
    /// The recorded writes.
    pub writes: &'a [Write],
    /// The result of the replay.
    pub other: &'a Other,
}

/// The result of a replayed request.
#[derive(Debug)]
pub struct Other {
    /// The answer.
    pub answer: Bytes,
    /// The version in the answer.
    pub version: Option<Stamp>,
    /// The writes that the replay would make.
    pub writes: Vec<Write>,
    /// Why the policy failed, if it did. The answer is then the internal error.
    pub failure: Option<String>,
}

/// How many requests gave the same result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// The answer and the writes are the same.
    pub same: u64,
    /// The answer or the writes differ.
    pub different: u64,
    /// The recording is not enough for a comparison.
    pub not_comparable: u64,
}

/// The totals of a replay.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// The counts of all requests.
    pub total: Counts,
    /// The counts by the first word of the request, in upper case.
    pub commands: BTreeMap<String, Counts>,
    /// Why requests were not comparable.
    pub reasons: BTreeMap<&'static str, u64>,
}

/// The result of a replay.
#[derive(Debug)]
pub struct Replayed {
    /// The first replayed record.
    pub from: LogPosition,
    /// The last replayed record.
    pub to: LogPosition,
    /// The times of the first and the last record, in milliseconds of the store's time.
    pub times_ms: (u64, u64),
    /// Whether the requested range begins before the recorded history.
    pub shortened: bool,
    /// The damage because of which earlier records of the range cannot be read, if there is any.
    pub damage: Option<String>,
    /// The totals.
    pub tally: Tally,
}

/// The result of the comparison of one request.
enum Comparison {
    Same,
    Different(Other),
    NotComparable(&'static str),
}

impl Past {
    /// Replays the recorded requests of a range, each with the policy that handled it, or all with
    /// a candidate.
    pub fn replay(
        &self,
        from: Option<Bound>,
        to: Option<Bound>,
        candidate: Option<Candidate<'_>>,
        observer: &mut dyn Observer,
    ) -> Result<Replayed, PastError> {
        let engine = Engine::without_watchdog()?;
        let load = |it: Candidate<'_>| {
            let policy = engine.load(it.file)?;
            Ok::<_, PastError>((Arc::new(policy), it.fuel_max))
        };
        let other = candidate.map(load).transpose()?;
        let mut replayer = Replayer {
            image: Image::of_keys(),
            modules: self.modules(),
            engine,
            other,
            loaded: HashMap::new(),
            from: LogPosition::NONE,
            to: LogPosition::NONE,
            done: 0,
            times_ms: None,
            tally: Tally::default(),
            observer,
        };
        let mut attempt = 0;
        let (finder, range, known) = loop {
            let mut finder = RangeFinder::new(from, to);
            let range = self.read(Base::Oldest, LogPosition::END, &mut finder)?;
            // Before this position, the state is not known exactly.
            let known = LogPosition(range.complete.0 + 1);
            // A server may remove the oldest records before they are read a second time.
            let spared =
                range.end.0.saturating_sub(known.0) / limits::REPLAY_ATTEMPTS_MAX * attempt;
            let first = finder.from.unwrap_or(LogPosition(range.end.0 + 1));
            replayer.from = first.max(LogPosition(known.0 + spared));
            replayer.to = finder.to.unwrap_or(LogPosition::NONE);
            replayer.done = replayer.from.0.saturating_sub(1);
            if replayer.from > replayer.to {
                break (finder, range, known);
            }
            match self.read(Base::Before(replayer.from), replayer.to, &mut replayer) {
                Err(PastError::Log(_, Error::NotRetained { .. }))
                    if !matches!(from, Some(Bound::LogPosition(_)))
                        && replayer.times_ms.is_none()
                        && attempt + 1 < limits::REPLAY_ATTEMPTS_MAX =>
                {
                    attempt += 1;
                }
                read => {
                    read.map_err(|error| not_read(error, from))?;
                    break (finder, range, known);
                }
            }
        };
        let is_early = range.base != LogPosition::NONE && finder.begins_before(known);
        let damage = finder.damage.filter(|_| is_early || from.is_none());
        Ok(Replayed {
            from: replayer.from,
            to: replayer.to,
            times_ms: replayer.times_ms.unwrap_or_default(),
            shortened: attempt > 0 || is_early,
            damage,
            tally: replayer.tally,
        })
    }
}

/// The error of a replay. A server that writes fast may remove each record that is found before it
/// is read. Only a caller that named a position could name a later one.
fn not_read(error: PastError, from: Option<Bound>) -> PastError {
    match (error, from) {
        (error, Some(Bound::LogPosition(_))) => error,
        (PastError::Log(path, Error::NotRetained { .. }), _) => PastError::Log(path, Error::Moved),
        (error, _) => error,
    }
}

/// Finds the log positions of the two ends of a range.
#[derive(Default)]
struct RangeFinder {
    bounds: (Option<Bound>, Option<Bound>),
    from: Option<LogPosition>,
    to: Option<LogPosition>,
    first_ms: Option<u64>,
    now_ms: u64,
    /// The damage because of which earlier records cannot be read.
    damage: Option<String>,
}

impl RangeFinder {
    fn new(from: Option<Bound>, to: Option<Bound>) -> Self {
        Self {
            bounds: (from, to),
            ..Self::default()
        }
    }

    /// Whether the range was to begin before this record, the first one whose state is known.
    fn begins_before(&self, known: LogPosition) -> bool {
        match self.bounds.0 {
            None => false,
            Some(Bound::LogPosition(from)) => from.0 > 0 && from < known,
            // Records of the time in which the snapshot was taken are before it.
            Some(Bound::Time(from_ms)) => {
                self.from.is_some_and(|from| from < known)
                    || self.first_ms.is_some_and(|first_ms| from_ms < first_ms)
            }
        }
    }
}

impl Sink for RangeFinder {
    fn reset(&mut self) {
        *self = Self::new(self.bounds.0, self.bounds.1);
    }

    fn block(&mut self, _: &[u8]) -> Result<(), String> {
        Ok(())
    }

    fn record(&mut self, position: LogPosition, record: &[u8]) -> Result<(), String> {
        let record = record::read(record).map_err(|error| error.to_string())?;
        if let Some(now_ms) = time_of(&record) {
            self.now_ms = now_ms;
            self.first_ms.get_or_insert(now_ms);
        }
        let reached = self.bounds.0.is_none_or(|from| match from {
            Bound::LogPosition(from) => position >= from,
            Bound::Time(from_ms) => self.now_ms >= from_ms,
        });
        if reached {
            self.from.get_or_insert(position);
        }
        let within = self.bounds.1.is_none_or(|to| match to {
            Bound::LogPosition(to) => position <= to,
            Bound::Time(to_ms) => self.now_ms <= to_ms,
        });
        if within {
            self.to = Some(position);
        }
        Ok(())
    }

    fn gap(&mut self, damage: &Damage) {
        self.damage = Some(damage.place());
    }
}

/// The store's time of a record, in milliseconds since 1970, if it has one.
pub(crate) fn time_of(record: &Record<'_>) -> Option<u64> {
    match record {
        Record::Handled(handled) => Some(handled.remembered.context.now_ms),
        Record::Swept { now_ms, .. }
        | Record::Started { now_ms, .. }
        | Record::Postponed { now_ms, .. }
        | Record::Deadlines { now_ms, .. }
        | Record::Stopped { now_ms } => Some(*now_ms),
        Record::Policy(_)
        | Record::Assignment(_)
        | Record::Sessions(_)
        | Record::Watches(_)
        | Record::ReceiveMax { .. } => None,
    }
}

/// Rebuilds the state record by record, and replays the requests of the range.
struct Replayer<'a> {
    image: Image,
    modules: Modules,
    engine: Engine<Transaction>,
    /// The candidate and its fuel limit.
    other: Option<(Arc<Policy<Transaction>>, u64)>,
    /// Policies by digest; `None` if the policy cannot be loaded.
    loaded: HashMap<blake3::Hash, Option<Arc<Policy<Transaction>>>>,
    from: LogPosition,
    to: LogPosition,
    /// The last record that was compared. If reading restarts, earlier records are not compared
    /// again.
    done: u64,
    times_ms: Option<(u64, u64)>,
    tally: Tally,
    observer: &'a mut dyn Observer,
}

impl Replayer<'_> {
    fn handle_record(&mut self, position: LogPosition, record: &[u8]) -> Result<(), Malformed> {
        let record = record::read(record)?;
        if position.0 > self.done {
            self.done = position.0;
            if let Some(now_ms) = time_of(&record) {
                self.times_ms = Some((self.times_ms.map_or(now_ms, |(from, _)| from), now_ms));
            }
            if let Record::Handled(handled) = &record {
                self.handled(position, handled);
            }
            let (done, total) = (position.0 - self.from.0 + 1, self.to.0 - self.from.0 + 1);
            self.observer.progress(done, total, &self.tally);
        }
        self.image.apply(record)
    }

    fn handled(&mut self, position: LogPosition, handled: &Handled<'_>) {
        let payload = Bytes::copy_from_slice(handled.payload);
        let comparison = self.compare(handled, &payload);
        let counts = self.tally.counts(&payload);
        let total = match &comparison {
            Comparison::Same => {
                counts.same += 1;
                &mut self.tally.total.same
            }
            Comparison::Different(_) => {
                counts.different += 1;
                &mut self.tally.total.different
            }
            Comparison::NotComparable(reason) => {
                counts.not_comparable += 1;
                *self.tally.reasons.entry(reason).or_default() += 1;
                &mut self.tally.total.not_comparable
            }
        };
        *total += 1;
        if let Comparison::Different(other) = &comparison {
            self.observer.different(&Difference {
                position,
                now_ms: handled.remembered.context.now_ms,
                client: handled.client,
                payload: &payload,
                answer: &handled.remembered.outcome.payload,
                version: handled.remembered.outcome.version,
                writes: &handled.writes,
                other,
            });
        }
    }

    fn compare(&mut self, handled: &Handled<'_>, payload: &Bytes) -> Comparison {
        let (policy, fuel_max) = match &self.other {
            Some(other) => other.clone(),
            None => {
                let known = self.image.policies.get(handled.policy as usize);
                let Some(digest) = known.map(|known| known.digest) else {
                    return Comparison::NotComparable("no record names the policy that handled it");
                };
                match self.policy(&digest) {
                    // The fuel limit of the recorded run is not known.
                    Some(policy) => (policy, statehouse_core::limits::FUEL_PER_CALL_MAX),
                    None => {
                        return Comparison::NotComparable(
                            "the policy that handled it is not in the data directory any more",
                        );
                    }
                }
            }
        };
        let remembered = &handled.remembered;
        let state = std::mem::take(&mut self.image.state);
        let recorded = Recorded {
            client: handled.client,
            payload,
            timestamp: handled.timestamp,
            fencing_token: handled.fencing_token,
            delivery: remembered.delivery,
            context: &remembered.context,
            captured: remembered.captured.as_ref(),
            by_candidate: self.other.is_some(),
        };
        let (state, replayed) = replay(&policy, fuel_max, state, &recorded);
        self.image.state = state;
        classify(handled, replayed)
    }

    fn policy(&mut self, digest: &blake3::Hash) -> Option<Arc<Policy<Transaction>>> {
        if let Some(known) = self.loaded.get(digest) {
            return known.clone();
        }
        if self.loaded.len() >= limits::REPLAY_POLICIES_MAX {
            self.loaded.clear();
        }
        let file = if *digest == blake3::hash(STANDARD_POLICY) {
            Some(STANDARD_POLICY.to_vec())
        } else {
            self.modules.load(digest).ok()
        };
        let policy = file.and_then(|file| self.engine.load(&file).ok().map(Arc::new));
        self.loaded.insert(*digest, policy.clone());
        policy
    }
}

fn classify(handled: &Handled<'_>, replayed: store::Replayed) -> Comparison {
    let outcome = &handled.remembered.outcome;
    if replayed.answer.as_ref().is_err_and(Failure::is_of_machine) {
        return Comparison::NotComparable(
            "this machine was too slow for the policy, or lacked a resource such as memory",
        );
    }
    if replayed.guessed {
        return Comparison::NotComparable(
            "the policy asks what the recorded run did not ask, and nothing else tells",
        );
    }
    let other = match replayed.answer {
        Ok(answer) => Other {
            answer: answer.payload,
            version: answer.version,
            writes: replayed.writes,
            failure: None,
        },
        Err(failure) => Other {
            answer: Bytes::from_static(store::INTERNAL_ERROR),
            version: None,
            writes: Vec::new(),
            failure: Some(failure.to_string()),
        },
    };
    let same = outcome.payload.is(&other.answer)
        && outcome.version == other.version
        && other.failure.is_none()
        && store::same_writes(&handled.writes, &other.writes);
    if same {
        Comparison::Same
    } else if handled.remembered.captured.is_none() {
        Comparison::NotComparable(
            "what it saw was not recorded: it was too much, or the policy failed",
        )
    } else {
        Comparison::Different(other)
    }
}

impl Tally {
    fn counts(&mut self, payload: &[u8]) -> &mut Counts {
        statehouse_core::words::command_of(&mut self.commands, payload)
    }
}

impl Sink for Replayer<'_> {
    fn reset(&mut self) {
        self.image.reset();
    }

    fn block(&mut self, block: &[u8]) -> Result<(), String> {
        self.image.block(block).map_err(|error| error.to_string())
    }

    fn record(&mut self, position: LogPosition, record: &[u8]) -> Result<(), String> {
        if self.observer.is_cancelled() {
            return Err("the replay was cancelled".to_owned());
        }
        self.handle_record(position, record)
            .map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests;
