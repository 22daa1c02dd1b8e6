//! Measures the cost of requests for several policies and the built-in one, in the same run.
//!
//! The requests are a few basic ones and those of transcripts. Fuel is the same on every machine.
//! Times are medians; on another machine only their ratios are meaningful.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use statehouse_mqtt::Properties;

use super::check::median;
use super::client::array;
use super::harness::{Harness, NOW_MS};
use super::setup::{self, KitError};
use super::transcript;
use statehouse_core::STANDARD_POLICY;
use statehouse_core::policy::{self, Call, Engine, Instance, Policy};
use statehouse_core::request::{Delivery, Dialect, Request};
use statehouse_core::store::{Peer, Quota, State, Transaction};

/// The cost of one kind of request for one policy.
#[derive(Clone, Debug, Default)]
pub struct Cost {
    /// The fuel of one request; 0 for rows without fuel.
    pub fuel: u64,
    /// The time of one request, in nanoseconds.
    pub ns: u64,
    /// Why the policy failed, if it did.
    pub failure: Option<String>,
}

/// One kind of request, with its cost for every policy. The policies have the given order, and the
/// built-in one is the last.
#[derive(Clone, Debug)]
pub struct Row {
    /// The name of the row.
    pub what: String,
    /// The costs.
    pub costs: Vec<Cost>,
}

/// The results of a benchmark.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The names of the policies.
    pub policies: Vec<String>,
    /// The measured kinds of requests.
    pub rows: Vec<Row>,
}

/// The number of samples per figure, of which the median counts.
const SAMPLES: usize = 101;

/// The approximate duration of a sample, which consists of many calls. It is much shorter than a
/// time slice of the scheduler, so most samples run without interruption even on a busy machine.
const SAMPLE: Duration = Duration::from_micros(200);

/// The maximum number of calls in one sample.
const CALLS_MAX: u32 = 2_000;

/// Measures policies and the built-in one. `transcripts` are names and texts.
pub fn bench(files: &[Vec<u8>], transcripts: &[(String, String)]) -> Result<Measured, KitError> {
    let engine = setup::engine()?;
    let mut subjects = Vec::new();
    for file in files.iter().map(Vec::as_slice).chain([STANDARD_POLICY]) {
        subjects.push(Subject::new(&engine, file)?);
    }
    let mut rows = Vec::new();
    for (size, bytes) in [("64 B", 64), ("4 KiB", 4096)] {
        let value = vec![b'v'; bytes];
        let set = Bytes::from(array::<&[u8]>(&[b"SET", b"bench/key", &value]));
        let get = Bytes::from(array(&["GET", "bench/key"]));
        for subject in &mut subjects {
            subject.call(&set);
        }
        rows.push(row(&mut subjects, &format!("GET of {size}"), &get));
        rows.push(row(&mut subjects, &format!("SET of {size}"), &set));
    }
    rows.push(starts(&subjects)?);
    for (name, text) in transcripts {
        let found = conversation(&subjects, name, text);
        rows.extend(found.map_err(|error| KitError::Transcript(name.clone(), error))?);
    }
    Ok(Measured {
        policies: subjects.iter().map(|it| it.policy.to_string()).collect(),
        rows,
    })
}

/// A policy under measurement.
struct Subject {
    policy: Arc<Policy<Transaction>>,
    instance: Instance<Transaction>,
    /// Each call borrows the state and returns it, as in the store.
    state: Option<Box<State>>,
    peer: Peer,
    properties: Properties,
}

impl Subject {
    fn new(engine: &Engine<Transaction>, file: &[u8]) -> Result<Self, KitError> {
        let policy = Arc::new(engine.load(file)?);
        Ok(Self {
            instance: Instance::warm(policy.clone())?,
            policy,
            state: None,
            peer: Peer::numbered("bench", 1),
            properties: Properties::default(),
        })
    }

    /// Makes one call, from the request to the commit. Returns its fuel and its failure.
    fn call(&mut self, payload: &Bytes) -> (u64, Option<String>) {
        const TIMESTAMP: &str = "001700000000000:00000:bench";
        let request = Request {
            dialect: Dialect::Sdk,
            payload,
            timestamp: Some(TIMESTAMP),
            fencing_token: None,
            peer: &self.peer,
            properties: &self.properties,
            delivery: Delivery::default(),
            grants: None,
        };
        let state = self.state.take().unwrap_or_default();
        let transaction = Transaction::begin(state, Quota::default(), NOW_MS, &request);
        let mut call: Call<'_, Transaction> = self.instance.begin(transaction, payload.clone());
        let outcome = call.handle(policy::Request {
            payload,
            dialect: policy::Dialect::Sdk,
            timestamp: Some(TIMESTAMP),
            fencing_token: None,
            client: self.peer.known(),
            now: NOW_MS,
        });
        let fuel = call.fuel_used();
        let transaction = call.end();
        let (state, failure) = match std::hint::black_box(outcome) {
            Ok(_) => (transaction.commit().0, None),
            Err(failure) => (transaction.roll_back(), Some(failure.to_string())),
        };
        self.state = Some(state);
        (fuel, failure)
    }
}

/// Measures one request for all subjects. They take turns, so a slowdown of the machine affects all
/// of them.
fn row(subjects: &mut [Subject], what: &str, payload: &Bytes) -> Row {
    let mut costs = Vec::new();
    let mut calls = Vec::new();
    for subject in subjects.iter_mut() {
        // The first calls of an instance do more work than later ones.
        for _ in 0..20 {
            subject.call(payload);
        }
        let begin = Instant::now();
        let (fuel, failure) = subject.call(payload);
        let once = begin.elapsed().max(Duration::from_nanos(100));
        let fit = u32::try_from(SAMPLE.as_nanos() / once.as_nanos()).unwrap_or(CALLS_MAX);
        calls.push(fit.clamp(1, CALLS_MAX));
        costs.push(Cost {
            fuel,
            ns: 0,
            failure,
        });
    }
    let mut times = vec![Vec::with_capacity(SAMPLES); subjects.len()];
    for round in 0..SAMPLES {
        for turn in 0..subjects.len() {
            // The order changes in each round, so that periodic interruptions do not always affect
            // the same subject.
            let at = (turn + round) % subjects.len();
            let subject = &mut subjects[at];
            let begin = Instant::now();
            for _ in 0..calls[at] {
                subject.call(payload);
            }
            times[at].push(nanos(begin.elapsed()) / u64::from(calls[at]));
        }
    }
    for (cost, times) in costs.iter_mut().zip(&mut times) {
        cost.ns = median(times);
    }
    Row {
        what: what.to_owned(),
        costs,
    }
}

/// Measures the start of a fresh instance. Each redelivery needs one, and so does the request after
/// a failure.
fn starts(subjects: &[Subject]) -> Result<Row, KitError> {
    let mut times = vec![Vec::with_capacity(SAMPLES); subjects.len()];
    for _ in 0..SAMPLES {
        for (at, subject) in subjects.iter().enumerate() {
            let begin = Instant::now();
            drop(Instance::warm(subject.policy.clone())?);
            times[at].push(nanos(begin.elapsed()));
        }
    }
    let cost = |times: &mut Vec<u64>| Cost {
        ns: median(times),
        ..Cost::default()
    };
    Ok(Row {
        what: "a fresh instance".into(),
        costs: times.iter_mut().map(cost).collect(),
    })
}

/// The requests of a transcript with the same first word.
#[derive(Default)]
struct Samples {
    fuel: Vec<u64>,
    /// In nanoseconds.
    times: Vec<u64>,
    /// The first failure of the policy.
    failure: Option<String>,
}

/// Measures the requests of a transcript by their first words, including all work of the store.
fn conversation(subjects: &[Subject], name: &str, text: &str) -> Result<Vec<Row>, String> {
    let mut rows: BTreeMap<String, Vec<Cost>> = BTreeMap::new();
    for (at, subject) in subjects.iter().enumerate() {
        let harness = Harness::with(subject.policy.clone()).once();
        let mut verbs: BTreeMap<String, Samples> = BTreeMap::new();
        for _ in 0..SAMPLES {
            for request in transcript::costs(&harness, text)? {
                let samples = verbs.entry(request.verb).or_default();
                samples.fuel.push(request.fuel);
                samples.times.push(nanos(request.time));
                samples.failure = samples.failure.take().or(request.failure);
            }
        }
        for (verb, mut samples) in verbs {
            let costs = rows.entry(verb).or_default();
            costs.resize(at, Cost::default());
            costs.push(Cost {
                fuel: median(&mut samples.fuel),
                ns: median(&mut samples.times),
                failure: samples.failure,
            });
        }
    }
    Ok(rows
        .into_iter()
        .map(|(verb, mut costs)| {
            costs.resize(subjects.len(), Cost::default());
            Row {
                what: format!("{verb} in {name}"),
                costs,
            }
        })
        .collect())
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
