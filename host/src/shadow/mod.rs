//! Runs live requests again beside the store: by a candidate in shadow, and now and then on a fresh instance of the
//! active policy.
//!
//! What enters: copies of requests that were handled. What leaves: a report, counts and log lines. It has a thread of
//! its own and a bounded queue: what finds no room there is not compared, and nobody waits for it.
//!
//! Architecture invariant: nothing here changes the store, and no request knows of it.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::limits;
use statehouse_core::policy::{Digest, Instance};
use statehouse_core::store::{Key, Read, Reexecution, SampledRequest, Transaction, same_writes};

mod report;

use report::Verdict;
pub use report::{CommandCounts, Example, PolicyName, Ran, ShadowReport};

/// Tells what keys held when a request began, if that can still be told.
pub type Recall = Box<dyn Fn(&SampledRequest, &[(bool, Key)]) -> Option<Vec<Read>> + Send>;

/// Where requests go that are to run again.
pub struct Observer {
    queue: OnceLock<Option<SyncSender<Job>>>,
    /// Until the thread starts.
    recall: Mutex<Option<Recall>>,
    shared: Arc<Shared>,
}

/// A request that waits.
struct Job {
    observed: Box<SampledRequest>,
    /// How many comparisons had begun when it came.
    begun: u64,
}

#[derive(Default)]
struct Shared {
    /// Whoever reads it copies it, so no request may wait for it.
    report: Mutex<Option<ShadowReport>>,
    /// Requests of this report for which there was no time.
    skipped: AtomicU64,
    /// Comparisons that somebody began. Changed only with the report.
    begun: AtomicU64,
    queued_bytes: AtomicU64,
}

impl Shared {
    /// A thread that died in the middle of a report only left it a request short.
    fn report(&self) -> MutexGuard<'_, Option<ShadowReport>> {
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self, report: &mut Option<ShadowReport>, policy: PolicyName, against: PolicyName) {
        *report = Some(ShadowReport::new(policy, against));
        self.skipped.store(0, Relaxed);
    }
}

impl Observer {
    /// Asks `recall` for what a candidate wants to know beyond what the request itself read.
    pub fn new(recall: Recall) -> Self {
        Self {
            queue: OnceLock::new(),
            recall: Mutex::new(Some(recall)),
            shared: Arc::default(),
        }
    }

    /// Takes a request. Never waits.
    pub fn offer(&self, observed: Box<SampledRequest>) {
        let cost = observed.cost_bytes();
        let compared = observed.candidate.is_some();
        let fits = self.shared.queued_bytes.load(Relaxed) + cost <= limits::SAMPLE_QUEUE_BYTES_MAX;
        let sent = match self.queue.get_or_init(|| self.start()) {
            Some(queue) if fits => {
                self.shared.queued_bytes.fetch_add(cost, Relaxed);
                let begun = self.shared.begun.load(Relaxed);
                match queue.try_send(Job { observed, begun }) {
                    Ok(()) => true,
                    Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => {
                        self.shared.queued_bytes.fetch_sub(cost, Relaxed);
                        false
                    }
                }
            }
            _ => false,
        };
        if !sent && compared {
            self.shared.skipped.fetch_add(1, Relaxed);
        }
    }

    /// The last comparison.
    pub fn report(&self) -> Option<ShadowReport> {
        let report = self.shared.report().clone()?;
        Some(ShadowReport {
            skipped: self.shared.skipped.load(Relaxed),
            ..report
        })
    }

    /// A comparison begins anew.
    pub fn begin(&self, policy: PolicyName, against: PolicyName) {
        let mut report = self.shared.report();
        self.shared.begun.fetch_add(1, Relaxed);
        self.shared.start(&mut report, policy, against);
    }

    fn start(&self) -> Option<SyncSender<Job>> {
        let recall = self
            .recall
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()?;
        let (queue, jobs) = sync_channel(limits::SAMPLE_QUEUE_MAX);
        let shared = self.shared.clone();
        let started = std::thread::Builder::new()
            .name("shadow".into())
            .spawn(move || work(&jobs, &shared, &recall));
        match started {
            Ok(_) => Some(queue),
            Err(error) => {
                tracing::error!(%error, "the thread that compares policies does not start, so nothing is compared");
                None
            }
        }
    }
}

/// Ends with its queue.
fn work(jobs: &Receiver<Job>, shared: &Shared, recall: &Recall) {
    let mut candidate: Option<Instance<Transaction>> = None;
    while let Ok(Job { observed, begun }) = jobs.recv() {
        shared
            .queued_bytes
            .fetch_sub(observed.cost_bytes(), Relaxed);
        if observed.for_purity {
            check_purity(&observed);
        }
        if let Some(policy) = &observed.candidate {
            let known = candidate
                .take()
                .filter(|it| it.policy().digest == policy.digest);
            let mut instance = known.unwrap_or_else(|| Instance::new(policy.clone()));
            let verdict = compare(&mut instance, &observed, recall);
            candidate = Some(instance);
            count(shared, &observed, begun, verdict);
        }
    }
}

fn compare(
    instance: &mut Instance<Transaction>,
    observed: &SampledRequest,
    recall: &Recall,
) -> Verdict {
    let mut told: Vec<Read> = Vec::new();
    for _ in 0..limits::SAMPLE_ROUNDS_MAX {
        match observed.execute_by_candidate(instance, &told) {
            Reexecution::Asked(keys) => match recall(observed, &keys) {
                Some(reads) => told.extend(reads),
                None => return Verdict::NotComparable("it reads keys that changed meanwhile"),
            },
            Reexecution::Ran(answer, writes) => {
                let same_answer =
                    answer.payload == observed.answer && answer.version == observed.version;
                let same_effect = same_writes(&observed.writes, &writes);
                return match (same_answer, same_effect) {
                    (true, true) => Verdict::Same,
                    (true, false) => Verdict::DifferentEffect(answer, writes),
                    (false, _) => Verdict::DifferentAnswer(answer, writes),
                };
            }
            Reexecution::Failed(failure) => return Verdict::Failed(failure),
            Reexecution::Unknown(why) => return Verdict::NotComparable(why),
        }
    }
    Verdict::NotComparable("it asks for more and more keys")
}

fn count(shared: &Shared, observed: &SampledRequest, begun: u64, verdict: Verdict) {
    let Some(policy) = &observed.candidate else {
        return;
    };
    let (is, against) = (PolicyName::of(policy), PolicyName::of(&observed.by));
    let mut report = shared.report();
    let same = |it: &ShadowReport| it.policy == is && it.against == against;
    if !report.as_ref().is_some_and(same) {
        // It waited while another comparison was begun, or another policy came to answer.
        if begun < shared.begun.load(Relaxed) {
            return;
        }
        shared.start(&mut report, is, against);
    }
    if let Some(report) = &mut *report {
        report.add(observed, verdict);
    }
}

/// Another answer on a fresh instance means that the policy keeps something to itself between requests: then nobody
/// can rely on what it answers a redelivery.
fn check_purity(observed: &SampledRequest) {
    let mut fresh = Instance::new(observed.by.clone());
    let pure = match observed.reexecute(&mut fresh) {
        Reexecution::Ran(answer, writes) => {
            answer.payload == observed.answer
                && answer.version == observed.version
                && same_writes(&observed.writes, &writes)
        }
        Reexecution::Failed(_) | Reexecution::Asked(_) => false,
        Reexecution::Unknown(_) => true,
    };
    if pure {
        return;
    }
    let policy = &observed.by;
    policy.work.impure();
    if policy.counters.may_warn(observed.context.now_ms) {
        let digest = Digest::from(policy.digest);
        let client = observed.client().escape_debug();
        tracing::error!(%policy, %digest, %client, "a policy is impure: on a fresh instance it answers a request otherwise. What it keeps between requests is lost at a restart, and duplicates are answered from the record");
    }
}
