//! The campaign: one transaction that appends the first frame of a new leadership.
//!
//! Its condition is the head that this host has followed, so its success proves that nothing
//! happened since: no record and no renewal. From then on the previous leader can commit nothing.

use std::time::Duration;

use bytes::Bytes;
use statehouse_protocol::LogPosition;

use super::suspicion::Suspicion;
use super::{Follower, Seen};
use crate::cursor::Accepted;
use crate::embedder::Embedder;
use crate::error::Stop;
use crate::frame::{self, Frame, Kind, put_record};
use crate::head::Head;
use crate::host::{Decision, HeadChange};
use crate::leader::Won;
use crate::options::broken;

impl Follower<'_> {
    /// Campaigns once. Returns `None` if this host may not lead or another one was faster.
    pub(super) async fn campaign(
        &mut self,
        suspicion: &mut Suspicion,
        embedder: &mut dyn Embedder,
    ) -> Result<Option<Won>, Stop> {
        let host = self.host;
        let timing = &host.options.timing;
        if self.cursor.chain != self.seen.head.chain && !broken!(host.options, FollowerTrustsReads)
        {
            return Err(Stop::Damaged("the head and the last frame differ".into()));
        }
        if let Err(reason) = embedder.may_lead(&self.seen.head) {
            if suspicion.reports_refusal() {
                tracing::warn!("this host may not lead: {reason}");
            }
            suspicion.postpone(host.now() + timing.silence);
            return Ok(None);
        }
        if !self.is_successor() {
            host.clock.sleep(host.random(timing.delay)).await;
        }
        let serves_from = self.serves_from();
        let (head, frame) = self.candidacy(serves_from <= host.now(), embedder);
        let bytes = Bytes::from(head.encode());
        let change = HeadChange {
            from: self.seen.bytes.clone(),
            to: bytes.clone(),
            puts: vec![(host.keys.frame(head.seq), frame.clone())],
            deletes: Vec::new(),
        };
        let sent = host.now();
        let revision = match host.decide(change, true).await {
            Decision::Applied(revision) => revision,
            Decision::Replaced(value) => {
                host.check_newer(&value, &self.seen.head)?;
                self.read_head(value)?;
                suspicion.postpone(Duration::ZERO);
                return Ok(None);
            }
            Decision::NotSent(error) => {
                tracing::warn!("a campaign was given up: {error}");
                suspicion.postpone(host.now() + timing.probe);
                return Ok(None);
            }
        };
        let previous = self.seen.head.clone();
        let since = host.now().saturating_sub(self.seen.at);
        self.saw_head(bytes.clone())?;
        if self.frame(&frame, embedder)? != Accepted::Applied {
            return Err(Stop::Damaged("its own frame does not continue it".into()));
        }
        Ok(Some(Won {
            head,
            bytes,
            revision,
            previous,
            sent,
            serves_from,
            since,
            log_bytes: self.log_bytes,
        }))
    }

    /// Whether the leader has released, or was an earlier process of this host.
    pub(super) fn leader_has_ended(&self) -> bool {
        let head = &self.seen.head;
        head.released || self.host.was_own(head)
    }

    /// Whether the leader named this host as its successor.
    fn is_successor(&self) -> bool {
        self.seen.head.successor() == Some(&self.host.options.host)
    }

    /// Whether the leader named another host as its successor a moment ago. If that host does not
    /// take over in time, any host may.
    pub(super) fn yields(&self) -> bool {
        let Seen { head, at, .. } = &self.seen;
        let since = self.host.now().saturating_sub(*at);
        head.successor().is_some()
            && !self.is_successor()
            && since < self.host.options.timing.precedence
    }

    /// When the lease of the previous leader is certainly over: it sent its last change before this
    /// host saw it. A leader that released or whose process has ended answers nothing. But the
    /// leader before it may still do so, unless the head says that its lease was over too.
    fn serves_from(&self) -> Duration {
        let Seen { head, at, .. } = &self.seen;
        if self.leader_has_ended()
            && (head.serving || broken!(self.host.options, EndedLeaderNeverWaited))
        {
            return Duration::ZERO;
        }
        if broken!(self.host.options, WaitFromLastFrame) {
            return self.frame_at + head.awaited();
        }
        *at + head.awaited()
    }

    /// The head and the first frame of a leadership of this host.
    fn candidacy(&self, serving: bool, embedder: &mut dyn Embedder) -> (Head, Bytes) {
        let known = &self.seen.head;
        let options = &self.host.options;
        let lease_ms = options.timing.lease_ms();
        // Time goes on while no host leads.
        let since = self.host.now().saturating_sub(self.seen.at);
        let since_ms = u64::try_from(since.as_millis()).unwrap_or(u64::MAX);
        let now_ms = (embedder.now_ms()).max(known.now_ms.saturating_add(since_ms));
        let mut body = Vec::new();
        put_record(&mut body, &embedder.opening(known.epoch + 1));
        let frame = Frame {
            kind: Kind::Whole,
            epoch: known.epoch + 1,
            seq: known.seq + 1,
            first: LogPosition(known.position.0 + 1),
            count: 1,
            now_ms,
            previous: known.chain,
            body: &body,
        }
        .encode();
        let head = Head {
            epoch: known.epoch + 1,
            change: 0,
            writer: options.process,
            leader: options.host.clone(),
            address: options.address.clone(),
            released: false,
            serving,
            lease_ms: if serving {
                lease_ms
            } else {
                lease_ms.max(known.lease_ms)
            },
            seq: known.seq + 1,
            chain: frame::chain(&frame),
            position: LogPosition(known.position.0 + 1),
            now_ms,
            ..known.clone()
        };
        (head, frame.into())
    }
}
