//! The leader's side of the log: a handle to which the store appends, and which knows the lease.

use std::collections::VecDeque;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use statehouse_protocol::LogPosition;
use tokio::sync::Notify;

use super::Won;
use super::space::Space;
use crate::clock::Clock;
use crate::figures::Figures;
use crate::frame::{Kind, put_record};
use crate::head::Head;
use crate::host::Host;
use crate::limits;
use crate::options::{Reads, Sizes};
use crate::space::Fullness;

/// The log of one leadership. All methods but the async ones return at once. After the end of the
/// leadership nothing is released any more, and there is no lease.
#[derive(Debug)]
pub struct LeaderLog {
    epoch: u64,
    clock: Arc<dyn Clock>,
    reads: Reads,
    /// On this host's clock, when the lease of the previous leader is certainly over. Nothing may
    /// be released or answered before.
    serves_from: Duration,
    state: Mutex<State>,
    /// Wakes the loop of the leader.
    pub(super) work: Notify,
    /// Wakes waiting turns when something was released, renewed or ended.
    progress: Notify,
    released: AtomicU64,
    /// Until when the last snapshot may still make room, on this host's clock, in nanoseconds.
    makes_room_until_ns: AtomicU64,
    /// The end of the lease on this host's clock, in nanoseconds.
    lease_end_ns: AtomicU64,
    space: Space,
    fullness: Arc<Fullness>,
    figures: Arc<Figures>,
    ended: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    /// Appended and not yet in a frame.
    groups: VecDeque<Group>,
    /// An append wakes the loop of the leader if so many groups wait.
    wakes_at: usize,
    /// The bytes of the frame that is being decided.
    deciding_bytes: usize,
    /// Bytes of the first group that are in earlier frames.
    cut: usize,
    appended: u64,
    committed: u64,
    /// When each undecided group was appended, with its last position.
    appended_at: VecDeque<(u64, Duration)>,
    wants_renewal: bool,
    wants_handover: Option<Successor>,
    /// The format of the log in the decided head, and the one that the next head should have.
    log_format: u16,
    wanted_format: u16,
    /// Modules to remove, when the record at the position is committed.
    unneeded: Vec<([u8; 32], u64)>,
    /// The number of transactions that were begun, and that were decided.
    begun: u64,
    decided: u64,
    undecided_since: Option<Duration>,
}

/// The host that should lead next; any if empty.
pub(super) type Successor = String;

#[derive(Debug)]
struct Group {
    first: u64,
    count: u32,
    body: Vec<u8>,
}

#[derive(Debug)]
pub(super) struct Taken {
    pub(super) kind: Kind,
    pub(super) groups: usize,
    pub(super) first: LogPosition,
    pub(super) count: u32,
    pub(super) body: Vec<u8>,
}

#[derive(Debug, Default)]
pub(super) struct Work {
    pub(super) taken: Option<Taken>,
    pub(super) renewal: bool,
    pub(super) handover: Option<Successor>,
    pub(super) log_format: u16,
    pub(super) unneeded: Vec<[u8; 32]>,
}

/// A group of records is larger than the log can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a group of records has {bytes} bytes and exceeds the limit of the log ({} bytes)",
    limits::GROUP_BYTES_MAX
)]
pub struct TooLarge {
    /// The size of the group.
    pub bytes: usize,
}

/// The leadership is over: this host must not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this host is not the leader any more")]
pub struct NotLeading;

impl LeaderLog {
    pub(super) fn new(host: &Host, won: &Won) -> Self {
        let committed = won.head.position;
        Self {
            epoch: won.head.epoch,
            clock: Arc::clone(&host.clock),
            reads: host.options.reads,
            serves_from: won.serves_from,
            state: Mutex::new(State {
                wakes_at: 1,
                appended: committed.0,
                committed: committed.0,
                log_format: won.head.log_format,
                ..State::default()
            }),
            work: Notify::new(),
            progress: Notify::new(),
            released: AtomicU64::new(won.previous.position.0),
            makes_room_until_ns: AtomicU64::new(0),
            lease_end_ns: AtomicU64::new(0),
            space: Space::new(host.options.sizes.quota_bytes, won.log_bytes, &won.head),
            fullness: Arc::clone(&host.fullness),
            figures: Arc::clone(&host.figures),
            ended: AtomicBool::new(false),
        }
    }

    /// The number of the leadership. It increases with every change of the leader.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Appends all records or none, and returns the position of the last one. Never waits. A caller
    /// that appends much must ask [`Self::is_behind`] before. If it fails, nothing was appended.
    pub fn append(&self, records: &[&[u8]]) -> Result<LogPosition, TooLarge> {
        let bytes = records.iter().map(|it| it.len() + 4).sum();
        if bytes > limits::GROUP_BYTES_MAX {
            return Err(TooLarge { bytes });
        }
        let now = self.clock.now();
        let mut state = self.locked();
        if records.is_empty() {
            return Ok(LogPosition(state.appended));
        }
        let mut body = Vec::with_capacity(bytes);
        for record in records {
            put_record(&mut body, record);
        }
        let first = state.appended + 1;
        state.appended += records.len() as u64;
        let position = LogPosition(state.appended);
        if self.ended.load(Ordering::Acquire) {
            return Ok(position);
        }
        self.space.appended(bytes as u64);
        state.appended_at.push_back((position.0, now));
        state.groups.push_back(Group {
            first,
            count: records.len() as u32,
            body,
        });
        let wakes = state.groups.len() >= state.wakes_at;
        drop(state);
        if wakes {
            self.work.notify_one();
        }
        Ok(position)
    }

    /// The position of the last appended record.
    #[must_use]
    pub fn appended(&self) -> LogPosition {
        LogPosition(self.locked().appended)
    }

    /// The position up to which effects may be sent to clients.
    #[must_use]
    pub fn released(&self) -> LogPosition {
        LogPosition(self.released.load(Ordering::Acquire))
    }

    /// Whether there is room for more than removals: the next snapshot fits beside all that the
    /// engine holds and the reserve, and the engine refused no transaction.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.space.has_room() && !self.fullness.is_full()
    }

    /// Whether state may still grow after so many bytes of records were appended.
    #[must_use]
    pub fn fits(&self, bytes: u64) -> bool {
        self.space.fits(bytes) && !self.fullness.is_full()
    }

    pub(super) fn space(&self) -> &Space {
        &self.space
    }

    /// Whether clients that write must wait until the log has caught up.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        self.space.waiting_bytes() > limits::WAITING_BYTES_MAX as u64
            || self.space.is_short() && self.is_making_room()
    }

    /// A snapshot goes on, and will replace so many bytes.
    pub(super) fn makes_room(&self, replaced_bytes: u64) {
        self.space.replaces(replaced_bytes);
        let until = self.clock.now() + limits::MAKING_ROOM;
        let until_ns = until.as_nanos().try_into().unwrap_or(u64::MAX);
        self.makes_room_until_ns.store(until_ns, Ordering::Relaxed);
    }

    /// The snapshot was cancelled.
    pub(super) fn makes_no_room(&self) {
        self.makes_room_until_ns.store(0, Ordering::Relaxed);
    }

    fn is_making_room(&self) -> bool {
        let until = Duration::from_nanos(self.makes_room_until_ns.load(Ordering::Relaxed));
        self.clock.now() < until
    }

    /// Whether input that arrived before this call may be decided now. Always false with
    /// [`Reads::Confirmed`].
    #[must_use]
    pub fn has_lease(&self) -> bool {
        if self.reads == Reads::Confirmed || self.ended.load(Ordering::Acquire) {
            return false;
        }
        let now = self.clock.now();
        let end = Duration::from_nanos(self.lease_end_ns.load(Ordering::Acquire));
        self.serves_from <= now && now < end
    }

    /// How long the lease still lasts. Zero with [`Reads::Confirmed`], which uses none.
    #[must_use]
    pub fn lease_left(&self) -> Duration {
        if !self.has_lease() {
            return Duration::ZERO;
        }
        let end = Duration::from_nanos(self.lease_end_ns.load(Ordering::Acquire));
        end.saturating_sub(self.clock.now())
    }

    /// Waits until input that arrived before this call may be decided. The caller must then decide
    /// without another wait. Fails if the leadership ends first.
    pub async fn may_decide(&self) -> Result<(), NotLeading> {
        // A transaction that begins from now on proves that this host led after the input arrived.
        let proof = self.locked().begun + 1;
        loop {
            let mut progress = pin!(self.progress.notified());
            progress.as_mut().enable();
            if self.has_lease() {
                return Ok(());
            }
            if self.ended.load(Ordering::Acquire) {
                return Err(NotLeading);
            }
            let wait = self.serves_from.saturating_sub(self.clock.now());
            if !wait.is_zero() {
                self.clock.sleep(wait).await;
                continue;
            }
            if self.is_proven(proof) {
                return Ok(());
            }
            progress.await;
        }
    }

    /// Whether the transaction with the number `proof` was decided. Asks for one if necessary. The
    /// proof counts with [`Reads::Lease`] too: the lease is over at once if a commit outlasts it.
    fn is_proven(&self, proof: u64) -> bool {
        let mut state = self.locked();
        if state.decided >= proof {
            return true;
        }
        if state.begun < proof {
            state.wants_renewal = true;
            self.work.notify_one();
        }
        false
    }

    /// How long the engine has not decided the present transaction; zero if there is none. A leader
    /// that cannot reach the engine cannot serve, so other hosts should suspect it.
    #[must_use]
    pub fn undecided_for(&self) -> Duration {
        let since = self.locked().undecided_since;
        since.map_or(Duration::ZERO, |it| self.clock.now().saturating_sub(it))
    }

    /// Waits until `position` is released. Fails if the leadership ends first; the record may be
    /// committed nevertheless.
    pub async fn wait_released(&self, position: LogPosition) -> Result<(), NotLeading> {
        self.until(|| self.released() >= position).await
    }

    /// Ends the leadership when everything appended so far is committed, so that another host
    /// takes over without waiting for the lease: `to`, or any. If `to` does not take over within
    /// [`crate::Timing::precedence`], any host may. The embedder must decide nothing any more.
    /// Takes as long as the engine does not answer, so a process that ends must bound its wait for
    /// [`crate::Embedder::ended`].
    pub fn hand_over(&self, to: Option<&str>) {
        // A longer name would make the head unreadable.
        let to = to.filter(|it| it.len() <= limits::HOST_NAME_BYTES_MAX);
        self.locked().wants_handover = Some(to.unwrap_or_default().to_owned());
        self.work.notify_one();
    }

    /// The latest format that the log may contain.
    #[must_use]
    pub fn log_format(&self) -> u16 {
        self.locked().log_format
    }

    /// Raises the latest format that the log may contain. A host that cannot read it stops. Takes
    /// as long as the engine does not answer. Fails if the leadership ends first; the format may be
    /// raised nevertheless.
    pub(crate) async fn raise_log_format(&self, format: u16) -> Result<(), NotLeading> {
        self.locked().wanted_format = format;
        self.work.notify_one();
        self.until(|| self.log_format() >= format).await
    }

    /// Removes policy modules that no policy needs after the records that were appended so far. The
    /// removal is a part of the log's transactions, so a host that was replaced removes nothing:
    /// the next leader may need the module again. Takes as long as the engine does not answer.
    /// Fails if the leadership ends first; the modules may be removed nevertheless.
    pub async fn remove_modules(&self, unneeded: &[[u8; 32]]) -> Result<(), NotLeading> {
        {
            let mut state = self.locked();
            let after = state.appended;
            let unneeded = unneeded.iter().map(|it| (*it, after));
            state.unneeded.extend(unneeded);
        }
        self.work.notify_one();
        self.until(|| {
            let state = self.locked();
            !state.unneeded.iter().any(|it| unneeded.contains(&it.0))
        })
        .await
    }

    /// Waits until a condition holds. Fails if the leadership ends first.
    async fn until(&self, holds: impl Fn() -> bool) -> Result<(), NotLeading> {
        loop {
            let mut progress = pin!(self.progress.notified());
            progress.as_mut().enable();
            if holds() {
                return Ok(());
            }
            if self.ended.load(Ordering::Acquire) {
                return Err(NotLeading);
            }
            progress.await;
        }
    }

    /// Asks for a change of the head, which renews the lease and answers a challenge.
    pub(super) fn renew(&self) {
        self.locked().wants_renewal = true;
        self.work.notify_one();
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the last frame ended a group. A snapshot must not begin within a group, because a
    /// reader of the log after it would miss the first parts.
    pub(super) fn is_between_groups(&self) -> bool {
        self.locked().cut == 0
    }

    /// The number of groups that wait for the next frame.
    pub(super) fn waiting(&self) -> usize {
        self.locked().groups.len()
    }

    /// From now on, an append wakes the loop of the leader if so many groups wait.
    pub(super) fn wake_at(&self, groups: usize) {
        self.locked().wakes_at = groups;
    }

    /// Whether the loop of the leader has more to do than to append.
    pub(super) fn is_asked(&self) -> bool {
        let state = self.locked();
        let raises = state.wanted_format > state.log_format;
        state.wants_renewal
            || state.wants_handover.is_some()
            || raises
            || !state.unneeded.is_empty()
    }

    pub(super) fn take(&self, sizes: &Sizes) -> Work {
        let mut state = self.locked();
        let taken = state.take(sizes);
        state.deciding_bytes = taken.as_ref().map_or(0, |it| it.body.len());
        Work {
            renewal: std::mem::take(&mut state.wants_renewal),
            handover: (state.wants_handover.clone()).filter(|_| taken.is_none()),
            log_format: state.wanted_format,
            unneeded: state.unneeded(),
            taken,
        }
    }

    /// A transaction is about to be sent.
    pub(super) fn begin(&self) {
        let mut state = self.locked();
        state.begun += 1;
        state.undecided_since = Some(self.clock.now());
    }

    /// These modules are removed.
    pub(super) fn removed(&self, modules: &[[u8; 32]]) {
        let removed = |it: &([u8; 32], u64)| modules.contains(&it.0);
        self.locked().unneeded.retain(|it| !removed(it));
    }

    /// The transaction was applied: the records of `head` are committed, and the lease lasts until
    /// `lease_end`.
    pub(super) fn decided(&self, head: &Head, lease_end: Duration) {
        let (position, now) = (head.position, self.clock.now());
        let mut state = self.locked();
        while let Some((_, at)) = state.appended_at.pop_front_if(|it| it.0 <= position.0) {
            self.figures.committed(now.saturating_sub(at));
        }
        state.log_format = head.log_format;
        state.decided = state.begun;
        state.undecided_since = None;
        state.committed = position.0;
        self.space
            .decided(std::mem::take(&mut state.deciding_bytes) as u64);
        let nanos = u64::try_from(lease_end.as_nanos()).unwrap_or(u64::MAX);
        self.lease_end_ns.store(nanos, Ordering::Release);
        drop(state);
        self.progress.notify_waiters();
    }

    /// Gives up the lease, before the transaction that says so is sent.
    pub(super) fn end_lease(&self) {
        self.lease_end_ns.store(0, Ordering::Release);
        self.ended.store(true, Ordering::Release);
    }

    /// Releases what is committed, unless it is too early. Returns the new position if it advanced.
    pub(super) fn release(&self) -> Option<LogPosition> {
        if self.clock.now() < self.serves_from {
            return None;
        }
        let committed = self.locked().committed;
        if self.released.swap(committed, Ordering::AcqRel) == committed {
            return None;
        }
        self.progress.notify_waiters();
        Some(LogPosition(committed))
    }

    /// The time until something can be released, if nothing can now.
    pub(super) fn deferred(&self) -> Option<Duration> {
        let wait = self.serves_from.saturating_sub(self.clock.now());
        (!wait.is_zero()).then_some(wait)
    }

    pub(super) fn end(&self) {
        self.ended.store(true, Ordering::Release);
        let mut state = self.locked();
        state.groups = VecDeque::new();
        state.appended_at = VecDeque::new();
        drop(state);
        self.progress.notify_waiters();
    }
}

impl State {
    fn unneeded(&self) -> Vec<[u8; 32]> {
        let committed = self.unneeded.iter().filter(|it| it.1 <= self.committed);
        let modules = committed.map(|it| it.0);
        modules.take(limits::REMOVED_MODULES_MAX).collect()
    }

    /// Combines groups up to the size of a frame, or takes the next part of a long group.
    fn take(&mut self, sizes: &Sizes) -> Option<Taken> {
        let front = self.groups.front()?;
        let (first, mut count) = (LogPosition(front.first), front.count);
        let rest = front.body.len() - self.cut;
        if self.cut > 0 || rest > sizes.part_bytes {
            let part = rest.min(sizes.part_bytes);
            let body = front.body[self.cut..self.cut + part].to_vec();
            let is_last = part == rest;
            let kind = if is_last { Kind::LastPart } else { Kind::Part };
            self.cut += part;
            if is_last {
                self.cut = 0;
                self.groups.pop_front();
            }
            return Some(Taken {
                kind,
                groups: usize::from(is_last),
                first,
                count,
                body,
            });
        }
        let mut body = self.groups.pop_front()?.body;
        let mut groups = 1;
        while let Some(next) = self.groups.front() {
            if body.len() + next.body.len() > sizes.frame_bytes {
                break;
            }
            body.extend_from_slice(&next.body);
            count += next.count;
            self.groups.pop_front();
            groups += 1;
        }
        Some(Taken {
            kind: Kind::Whole,
            groups,
            first,
            count,
            body,
        })
    }
}
