//! Re-executes live requests: with a candidate in shadow, and a sample of them on a fresh instance
//! of the active policy.
//!
//! Copies of handled requests go through a bounded queue to a thread of its own. Requests that do
//! not fit into the queue are not compared, so no request ever waits for a comparison. The results
//! are a report, counters and log lines.
//!
//! Nothing here may change the store or influence a request.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use statehouse_config::{limits, part_of_memory};
use statehouse_core::policy::{Digest, Failure, Instance};
use statehouse_core::store::{Key, Read, Reexecution, SampledRequest, Transaction, same_writes};

mod report;

use report::Verdict;
pub use report::{CommandCounts, Example, PolicyName, Ran, ShadowReport};

/// Returns the values of keys at the start of a request; none if they are no longer known.
pub type Recall = Box<dyn Fn(&SampledRequest, &[(bool, Key)]) -> Option<Vec<Read>> + Send>;

/// Queues requests for re-execution and holds the report.
pub struct Observer {
    /// None if the thread could not be started.
    queue: OnceLock<Option<SyncSender<Job>>>,
    /// None once the thread has started.
    recall: Mutex<Option<Recall>>,
    /// The bytes of requests that may wait.
    bytes_max: u64,
    shared: Arc<Shared>,
}

struct Job {
    observed: Box<SampledRequest>,
    /// The value of [`Shared::begun`] when it was queued.
    begun: u64,
}

#[derive(Default)]
struct Shared {
    /// The name of the store in versions.
    node: String,
    /// A reader holds the lock for a copy of the report, so no request may take the lock.
    report: Mutex<Option<ShadowReport>>,
    /// Requests of this report that did not fit into the queue.
    skipped: AtomicU64,
    /// The number of comparisons that an operator began. Changed only under the lock of `report`.
    begun: AtomicU64,
    queued_bytes: AtomicU64,
}

impl Shared {
    /// Ignores poisoning: after a panic the report lacks at most one request.
    fn report(&self) -> MutexGuard<'_, Option<ShadowReport>> {
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self, report: &mut Option<ShadowReport>, policy: PolicyName, against: PolicyName) {
        *report = Some(ShadowReport::new(policy, against));
        self.skipped.store(0, Relaxed);
    }
}

impl Observer {
    /// Uses `recall` for the keys that a candidate reads and the request itself did not read.
    /// `node` is the name of the store in versions.
    pub fn new(node: String, recall: Recall) -> Self {
        Self {
            queue: OnceLock::new(),
            recall: Mutex::new(Some(recall)),
            bytes_max: part_of_memory(16, limits::SAMPLE_QUEUE_BYTES_MAX),
            shared: Arc::new(Shared {
                node,
                ..Shared::default()
            }),
        }
    }

    /// The bytes of requests that wait.
    pub fn queued_bytes(&self) -> u64 {
        self.shared.queued_bytes.load(Relaxed)
    }

    /// Queues a request, or skips it if the queue is full. Never waits.
    pub fn offer(&self, observed: Box<SampledRequest>) {
        let cost = observed.cost_bytes();
        let compared = observed.candidate.is_some();
        let fits = self.shared.queued_bytes.load(Relaxed) + cost <= self.bytes_max;
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

    /// The report of the last comparison.
    pub fn report(&self) -> Option<ShadowReport> {
        let report = self.shared.report().clone()?;
        Some(ShadowReport {
            skipped: self.shared.skipped.load(Relaxed),
            ..report
        })
    }

    /// Begins a new comparison with an empty report.
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
                tracing::error!(%error, "cannot start the thread that compares policies, so no request is compared");
                None
            }
        }
    }
}

/// Handles queued requests until the queue is closed.
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
    if observed
        .failure
        .as_ref()
        .is_some_and(Failure::is_of_machine)
    {
        return Verdict::NotComparable(
            "the watchdog stopped the active policy, or the machine lacked a resource",
        );
    }
    let mut recalled: Vec<Read> = Vec::new();
    for _ in 0..limits::SAMPLE_ROUNDS_MAX {
        match observed.execute_by_candidate(instance, &recalled) {
            Reexecution::Asked(keys) => match recall(observed, &keys) {
                Some(reads) => recalled.extend(reads),
                None => return Verdict::NotComparable("it reads keys that changed since"),
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
    Verdict::NotComparable("it reads further keys in too many rounds")
}

fn count(shared: &Shared, observed: &SampledRequest, begun: u64, verdict: Verdict) {
    let Some(policy) = &observed.candidate else {
        return;
    };
    let (is, against) = (PolicyName::of(policy), PolicyName::of(&observed.by));
    let mut report = shared.report();
    let same = |it: &ShadowReport| it.policy == is && it.against == against;
    if !report.as_ref().is_some_and(same) {
        // While the request was queued, another comparison began, or another policy became active.
        // The request must not replace the report of a later comparison.
        if begun < shared.begun.load(Relaxed) {
            return;
        }
        shared.start(&mut report, is, against);
    }
    if let Some(report) = &mut *report {
        report.add(observed, &shared.node, verdict);
    }
}

/// Compares a response with that of a fresh instance. If they differ, the policy has hidden state
/// between requests, so its response to a redelivery is not reliable.
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
        let client = observed.client();
        tracing::error!(%policy, %digest, client, "a policy is impure: a fresh instance gives another response to a request. Its hidden state is lost at a restart, and duplicates are answered from the record");
    }
}
