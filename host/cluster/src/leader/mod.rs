//! The leader: appends frames to the log, one transaction at a time, and renews its lease by them.
//!
//! Every transaction has one shape: if the head has the value that this leader wrote last, write
//! and change the head. A lease counts from the sending of the first attempt, because the engine
//! may have applied any attempt right after that.

mod chores;
mod gathering;
mod log;
mod snapshot;
mod space;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use statehouse_protocol::LogPosition;

use crate::embedder::{Embedder, Ended, Takeover};
use crate::engine::{KeyRange, Revision};
use crate::error::Stop;
use crate::figures::After;
use crate::frame::{self, Frame, Kind};
use crate::head::Head;
use crate::host::{Decision, HeadChange, Host};
use crate::limits;
use crate::member::Signals;
use crate::options::broken;
use crate::presence::Role;
use chores::Chores;
use gathering::{Answered, Gathering};
use log::Taken;
pub use log::{LeaderLog, NotLeading, TooLarge};
use snapshot::Snapshots;

#[derive(Debug)]
pub(crate) struct Won {
    /// The new head, with its encoding.
    pub(crate) head: Head,
    pub(crate) bytes: Bytes,
    pub(crate) revision: Revision,
    /// The head that the campaign replaced.
    pub(crate) previous: Head,
    /// When the first attempt was sent, and when the lease of the previous leader is over.
    pub(crate) sent: Duration,
    pub(crate) serves_from: Duration,
    /// The time since the last change by the previous leader.
    pub(crate) since: Duration,
    /// Bytes of frames since the last snapshot.
    pub(crate) log_bytes: u64,
}

impl Won {
    /// How the leadership before ended, if there was one.
    fn after(&self, host: &Host) -> Option<After> {
        let previous = &self.previous;
        if previous.leader.is_empty() {
            return None;
        }
        Some(match previous.released {
            true => After::Handover,
            false if host.was_own(previous) => After::Restart,
            false => After::Silence,
        })
    }
}

/// Ends the leadership of a handle, even if the loop is dropped.
struct EndOnDrop(Arc<LeaderLog>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Leads until another host takes over, or until the handover.
pub(crate) async fn lead(
    host: &Host,
    signals: &Signals,
    won: Won,
    embedder: &mut dyn Embedder,
) -> Result<Ended, Stop> {
    if let Some(after) = won.after(host) {
        host.figures.took_over(after);
    }
    let log = Arc::new(LeaderLog::new(host, &won));
    let _end = EndOnDrop(Arc::clone(&log));
    log.decided(&won.head, won.sent + host.options.timing.trusted());
    embedder.leading(Takeover {
        log: Arc::clone(&log),
        previous: won.previous,
        since: won.since,
    });
    let chores = Chores::new(host, &log, won.revision);
    let presence = &signals.presence;
    presence.describe(host, Role::Leading, won.head.epoch, embedder);
    let mut leader = Leader {
        host,
        signals,
        log: &log,
        head: won.head,
        bytes: won.bytes,
        snapshots: Snapshots::new(won.log_bytes),
        gathering: Gathering::default(),
        chores: &chores,
    };
    tokio::select! {
        biased;
        ended = leader.run(embedder) => ended,
        () = chores.run() => Ok(Ended::Deposed),
    }
}

struct Leader<'a> {
    host: &'a Host,
    signals: &'a Signals,
    log: &'a LeaderLog,
    /// The last decided head, with its encoding.
    head: Head,
    bytes: Bytes,
    snapshots: Snapshots,
    gathering: Gathering,
    chores: &'a Chores<'a>,
}

/// The next change of the head and what changes with it.
struct Step {
    head: Head,
    puts: Vec<(Vec<u8>, Bytes)>,
    deletes: Vec<KeyRange>,
    frame: Option<Bytes>,
    answered: Answered,
    removed_modules: Vec<[u8; 32]>,
}

impl Leader<'_> {
    async fn run(&mut self, embedder: &mut dyn Embedder) -> Result<Ended, Stop> {
        let mut answered = Answered::default();
        loop {
            if let Some(position) = self.log.release() {
                embedder.released(position);
                self.gather(answered).await;
            }
            let Some(step) = self.next_step(embedder) else {
                if self.wait().await {
                    let (presence, epoch) = (&self.signals.presence, self.head.epoch);
                    presence.describe(self.host, Role::Leading, epoch, embedder);
                }
                continue;
            };
            let hands_over = step.head.released;
            answered = step.answered;
            if !self.commit(step).await? {
                return Ok(Ended::Deposed);
            }
            if hands_over {
                return Ok(Ended::HandedOver);
            }
        }
    }

    /// Waits a moment for the next requests of clients that were just answered.
    async fn gather(&mut self, answered: Answered) {
        let bytes = answered.bytes as u64 + self.log.space().waiting_bytes();
        if bytes > self.host.options.sizes.frame_bytes as u64 {
            // They would not fit one frame, so a wait saves no transaction.
            return;
        }
        let waiting = self.log.waiting();
        let Some(target) = self.gathering.target(answered.groups, waiting) else {
            return;
        };
        self.log.wake_at(target);
        let mut end = self.host.clock.sleep(limits::GATHER);
        let is_late = loop {
            if self.log.waiting() >= target || self.log.is_asked() {
                break false;
            }
            tokio::select! {
                biased;
                () = self.log.work.notified() => {}
                () = &mut end => break true,
            }
        };
        self.log.wake_at(1);
        self.gathering.ended(!is_late);
    }

    /// Waits for work. Returns true if the description of this host has changed.
    async fn wait(&self) -> bool {
        let now = self.host.now();
        let piece = self.snapshots.next_at().map(|it| it.saturating_sub(now));
        let wakes = [self.log.deferred(), piece];
        let idle = self.host.options.timing.poll;
        let wait = wakes.into_iter().flatten().min().unwrap_or(idle);
        tokio::select! {
            biased;
            () = self.log.work.notified() => false,
            () = self.signals.describe.notified() => true,
            () = self.host.clock.sleep(wait) => false,
        }
    }

    /// Collects the next change. Returns `None` if there is nothing to change.
    fn next_step(&mut self, embedder: &mut dyn Embedder) -> Option<Step> {
        let log = self.log;
        let appended = log.appended();
        self.snapshots.measure_if_due(self.host, log, embedder);
        self.snapshots.cancel_if_too_large(self.host, log);
        if log.is_between_groups() {
            self.snapshots
                .begin_if_due(self.host, &self.head, log, appended, embedder);
        }
        let piece = self.snapshots.piece(self.host, log, embedder);
        let work = log.take(&self.host.options.sizes);
        let mut head = self.head.clone();
        let deletes = snapshot::truncate(self.host, &mut head);
        let named = self.snapshots.complete(self.head.position);
        // A handover before the lease of the previous leader is over would let the next leader
        // answer too early.
        let may_hand_over =
            log.deferred().is_none() || broken!(self.host.options, EndedLeaderNeverWaited);
        let handover = work.handover.filter(|_| may_hand_over);
        let raises = work.log_format > head.log_format;
        let clears = self.snapshots.has_leftovers() && log.space().is_tight();
        let is_asked = work.renewal || handover.is_some() || raises || !work.unneeded.is_empty();
        let is_idle = work.taken.is_none() && !is_asked;
        if is_idle && !clears && piece.is_none() && named.is_none() && deletes.is_empty() {
            return None;
        }
        head.change += 1;
        head.serving = log.deferred().is_none();
        if head.serving {
            head.lease_ms = self.host.options.timing.lease_ms();
        }
        head.log_format = head.log_format.max(work.log_format);
        // Also without a frame: clients read with this time, which must not step back later.
        head.now_ms = head.now_ms.max(embedder.now_ms());
        if let Some(successor) = handover {
            head.released = true;
            if !successor.is_empty() {
                head.leader = successor;
                head.address = String::new();
            }
        }
        let mut step = Step {
            puts: Vec::new(),
            deletes,
            frame: None,
            answered: Answered::default(),
            head,
            removed_modules: work.unneeded,
        };
        if named.is_some() {
            step.head.snapshot = named;
        }
        step.deletes
            .extend(self.snapshots.leftovers(self.host, &step.head));
        if let Some(piece) = piece {
            step.puts.push(piece);
        }
        if let Some(taken) = work.taken {
            step.answered = Answered {
                groups: taken.groups,
                bytes: taken.body.len(),
            };
            self.add_frame(&mut step, &taken);
        }
        Some(step)
    }

    fn add_frame(&self, step: &mut Step, taken: &Taken) {
        let head = &mut step.head;
        let encoded = Frame {
            kind: taken.kind,
            epoch: head.epoch,
            seq: head.seq + 1,
            first: taken.first,
            count: taken.count,
            now_ms: head.now_ms,
            previous: head.chain,
            body: &taken.body,
        }
        .encode();
        head.seq += 1;
        head.chain = frame::chain(&encoded);
        if taken.kind != Kind::Part {
            head.position = LogPosition(taken.first.0 + u64::from(taken.count) - 1);
        }
        let encoded = Bytes::from(encoded);
        step.frame = Some(encoded.clone());
        step.puts.push((self.host.keys.frame(head.seq), encoded));
    }

    /// Commits a step. Returns false if another host has taken over.
    async fn commit(&mut self, step: Step) -> Result<bool, Stop> {
        let bytes = Bytes::from(step.head.encode());
        let puts = step.puts.iter().map(|(key, value)| key.len() + value.len());
        let written = puts.sum::<usize>() + bytes.len() + self.host.keys.head().len();
        let truncates = !step.deletes.is_empty();
        let keys = &self.host.keys;
        let modules = step.removed_modules.iter();
        let modules = modules.flat_map(|it| [keys.module_pieces(it), keys.module_sizes(it)]);
        if step.head.released {
            self.log.end_lease();
        }
        self.log.begin();
        let mut sent = self.host.now();
        let change = HeadChange {
            from: self.bytes.clone(),
            to: bytes.clone(),
            puts: step.puts,
            deletes: step.deletes.into_iter().chain(modules).collect(),
        };
        let revision = match self.host.decide(change, false).await {
            Decision::Applied(revision) => revision,
            Decision::Replaced(value) => {
                self.host.check_newer(&value, &self.head)?;
                return Ok(false);
            }
            Decision::NotSent(_) => return Ok(false),
        };
        if broken!(self.host.options, LeaseFromAnswer) {
            sent = self.host.now();
        }
        let released = step.head.released;
        self.head = step.head;
        self.bytes = bytes;
        if let Some(frame) = &step.frame {
            self.snapshots.frame(frame.len() as u64);
            self.host.feed.frame(frame);
        }
        self.host.feed.saw(&self.head);
        let figures = &self.host.figures;
        figures.saw(&self.head, self.snapshots.log_bytes());
        figures.applied(self.head.position, self.snapshots.log_bytes());
        self.log.space().written(written as u64);
        let oldest = self.head.oldest;
        if truncates && (self.head.snapshot).is_some_and(|it| it.first_seq == oldest) {
            self.chores.truncated(revision);
        }
        self.log.removed(&step.removed_modules);
        if !released {
            let lease_end = sent + self.host.options.timing.trusted();
            self.log.decided(&self.head, lease_end);
        }
        Ok(true)
    }
}
