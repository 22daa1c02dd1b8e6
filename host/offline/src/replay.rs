//! Recorded requests, run again: by the policy that handled them, or by another.
//!
//! What enters: the records of a range, and a policy. What leaves: every difference in an answer or an effect,
//! and counts. The table is rebuilt record by record, so that what each request saw is at hand when its turn
//! comes; what it wrote then is what is written, whatever another policy makes of it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use bytes::Bytes;
use statehouse_wal::{Base, LogPosition, Sink};

use super::{Past, PastError};
use crate::limits;
use statehouse_core::STANDARD_POLICY;
use statehouse_core::clock::Stamp;
use statehouse_core::log::record::{self, Handled, Record};
use statehouse_core::log::{Image, Malformed};
use statehouse_core::policy::{Engine, Failure, Policy};
use statehouse_core::store::{self, Recorded, StoredPayload, Transaction, Write, replay};
use statehouse_precompiled::Modules;

/// An end of the range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// A record.
    LogPosition(LogPosition),
    /// A time, in the store's milliseconds.
    Time(u64),
}

/// A policy that requests are run by in place of those that handled them.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<'a> {
    /// Its file.
    pub file: &'a [u8],
    /// What one request may burn, beside the part for its bytes: the `max_fuel` of the store that it is meant for.
    pub fuel_max: u64,
}

/// What is told while requests run.
pub trait Observer {
    /// A record was reached; `done` of `total` were so far.
    fn progress(&mut self, done: u64, total: u64, tally: &Tally);
    /// A request differs.
    fn different(&mut self, difference: &Difference<'_>);
}

/// A request that another run answers otherwise, or that has another effect there.
pub struct Difference<'a> {
    /// Its record.
    pub position: LogPosition,
    /// When it ran, in the store's milliseconds.
    pub now_ms: u64,
    /// Whose it was.
    pub client: &'a str,
    /// The command.
    pub payload: &'a Bytes,
    /// The recorded answer.
    pub answer: &'a StoredPayload,
    /// The version that it was about.
    pub version: Option<Stamp>,
    /// What was written.
    pub writes: &'a [Write],
    /// The other run.
    pub other: &'a Other,
}

/// What the other run came to.
#[derive(Debug)]
pub struct Other {
    /// Its answer.
    pub answer: Bytes,
    /// The version that it is about.
    pub version: Option<Stamp>,
    /// What it would have written.
    pub writes: Vec<Write>,
    /// Why there is no better answer, where the policy failed.
    pub failure: Option<String>,
}

/// How requests compare.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Answer and effect are the same.
    pub same: u64,
    /// They are not.
    pub different: u64,
    /// Nobody can say.
    pub not_comparable: u64,
}

/// The sums of a replay.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// All requests.
    pub total: Counts,
    /// By the word that a request begins with, in capitals.
    pub commands: BTreeMap<String, Counts>,
    /// Why requests were not comparable.
    pub reasons: BTreeMap<&'static str, u64>,
}

/// A replay that came to its end.
#[derive(Debug)]
pub struct Replayed {
    /// The first record that was looked at.
    pub from: LogPosition,
    /// The last one.
    pub to: LogPosition,
    /// The times of the two, in the store's milliseconds.
    pub times_ms: (u64, u64),
    /// Whether records that were asked for are not kept any more.
    pub shortened: bool,
    /// The sums.
    pub tally: Tally,
}

/// How one request compares.
enum Comparison {
    Same,
    Different(Other),
    NotComparable(&'static str),
}

impl Past {
    /// Runs the recorded requests between two places again, each by the policy that handled it or all by a
    /// candidate.
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
        let mut scout = Scout::new(from, to);
        let range = self.read(Base::Oldest, LogPosition::END, &mut scout)?;
        // Before that the state is not exactly what it was.
        let known = LogPosition(range.complete.0 + 1);
        let first = scout.from.unwrap_or(LogPosition(range.end.0 + 1));
        let from_position = first.max(known);
        let to_position = scout.to.unwrap_or(LogPosition::NONE);
        let mut rerun = Rerun {
            image: Image::of_keys(),
            modules: self.modules(),
            engine,
            other,
            loaded: HashMap::new(),
            from: from_position,
            to: to_position,
            done: from_position.0.saturating_sub(1),
            times_ms: None,
            tally: Tally::default(),
            observer,
        };
        if from_position <= to_position {
            self.read(Base::Before(from_position), to_position, &mut rerun)?;
        }
        let asked = from.is_some_and(|from| match from {
            Bound::LogPosition(position) => position.0 > 0 && position < known,
            Bound::Time(ms) => scout.first_ms.is_some_and(|first_ms| ms < first_ms),
        });
        Ok(Replayed {
            from: from_position,
            to: to_position,
            times_ms: rerun.times_ms.unwrap_or_default(),
            shortened: asked && range.base != LogPosition::NONE,
            tally: rerun.tally,
        })
    }
}

/// Finds the places of the times that a range was given by.
struct Scout {
    bounds: (Option<Bound>, Option<Bound>),
    from: Option<LogPosition>,
    to: Option<LogPosition>,
    first_ms: Option<u64>,
    now_ms: u64,
}

impl Scout {
    fn new(from: Option<Bound>, to: Option<Bound>) -> Self {
        Self {
            bounds: (from, to),
            from: None,
            to: None,
            first_ms: None,
            now_ms: 0,
        }
    }
}

impl Sink for Scout {
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
}

fn time_of(record: &Record<'_>) -> Option<u64> {
    match record {
        Record::Handled(handled) => Some(handled.remembered.context.now_ms),
        Record::Swept { now_ms, .. }
        | Record::Started { now_ms, .. }
        | Record::Stopped { now_ms } => Some(*now_ms),
        Record::Policy(_)
        | Record::Assignment(_)
        | Record::Sessions(_)
        | Record::Watches(_)
        | Record::ReceiveMax { .. } => None,
    }
}

/// The state at each place, and what becomes of the request there.
struct Rerun<'a> {
    image: Image,
    modules: Modules,
    engine: Engine<Transaction>,
    /// Answers in place of those that are recorded, and what it may burn.
    other: Option<(Arc<Policy<Transaction>>, u64)>,
    /// Policies by digest; none where one cannot be had.
    loaded: HashMap<blake3::Hash, Option<Arc<Policy<Transaction>>>>,
    from: LogPosition,
    to: LogPosition,
    /// The last record that was compared: where the reading begins anew, it is not compared again.
    done: u64,
    times_ms: Option<(u64, u64)>,
    tally: Tally,
    observer: &'a mut dyn Observer,
}

impl Rerun<'_> {
    fn take(&mut self, position: LogPosition, record: &[u8]) -> Result<(), Malformed> {
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
                    // Whatever the bound was that it ran under.
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
        };
        let (state, again) = replay(&policy, fuel_max, state, &recorded);
        self.image.state = state;
        judge(handled, again)
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

fn judge(handled: &Handled<'_>, again: store::Replayed) -> Comparison {
    let outcome = &handled.remembered.outcome;
    if let Err(Failure::Watchdog) = again.answer {
        return Comparison::NotComparable("this machine was too slow for the policy");
    }
    if again.guessed {
        return Comparison::NotComparable(
            "the policy asks what the recorded run did not ask, and nothing else tells",
        );
    }
    let other = match again.answer {
        Ok(answer) => Other {
            answer: answer.payload,
            version: answer.version,
            writes: again.writes,
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
        Comparison::NotComparable("what it saw was too much to record")
    } else {
        Comparison::Different(other)
    }
}

impl Tally {
    fn counts(&mut self, payload: &[u8]) -> &mut Counts {
        statehouse_core::words::command_of(&mut self.commands, payload)
    }
}

impl Sink for Rerun<'_> {
    fn reset(&mut self) {
        self.image.reset();
    }

    fn block(&mut self, block: &[u8]) -> Result<(), String> {
        self.image.block(block).map_err(|error| error.to_string())
    }

    fn record(&mut self, position: LogPosition, record: &[u8]) -> Result<(), String> {
        self.take(position, record)
            .map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests;
