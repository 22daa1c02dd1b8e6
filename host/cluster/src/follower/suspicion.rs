//! When a follower campaigns. A wrong suspicion costs a pause but never safety.
//!
//! A follower that suspects the leader writes the key `challenge`. A living leader answers by a
//! change of the head. If the head does not change for some time while the engine answers, the
//! follower campaigns. So an outage of the engine changes no leader, and an idle cluster writes
//! nothing.

use std::time::Duration;

use bytes::Bytes;

use super::Follower;
use crate::access::put;
use crate::error::Stop;
use crate::head::{Head, Id};

#[derive(Debug, Default)]
pub(super) struct Suspicion {
    /// The head that is observed, by its place in the order of heads.
    order: (u64, u64),
    /// The process that wrote it, and whether that process was seen to change it again.
    writer: Option<Id>,
    is_alive: bool,
    suspected: bool,
    /// When the leader was challenged. Since then the engine has always answered.
    challenged_at: Option<Duration>,
    /// The leader was silent for long enough.
    is_silent: bool,
    pub(super) next_at: Duration,
    /// No campaign before.
    not_before: Duration,
    /// How often this host was not allowed to lead after the observed head.
    refusals: u32,
}

impl Suspicion {
    pub(super) fn new(now: Duration) -> Self {
        Self {
            next_at: now,
            ..Self::default()
        }
    }

    /// The link to the leader is broken.
    pub(super) fn suspect(&mut self, now: Duration) {
        if !self.suspected {
            self.suspected = true;
            self.next_at = now;
        }
    }

    /// A changed head proves that its leader is alive.
    pub(super) fn saw(&mut self, head: &Head, host: &str) {
        if head.order() != self.order {
            let was_alive = std::mem::replace(&mut self.is_alive, self.writer == Some(head.writer));
            self.writer = Some(head.writer);
            self.order = head.order();
            self.refusals = 0;
            self.clear();
            if self.is_alive && !was_alive && head.leader == host && !head.released {
                tracing::error!(
                    "the leader has the name {host} too: give each host of the cluster a name of its own"
                );
            }
        }
    }

    /// The engine did not answer, so the silence of the leader proves nothing.
    pub(super) fn engine_failed(&mut self) {
        self.challenged_at = None;
        self.is_silent = false;
    }

    fn clear(&mut self) {
        self.suspected = false;
        self.challenged_at = None;
        self.is_silent = false;
    }

    /// A campaign failed, or this host may not lead.
    pub(super) fn postpone(&mut self, until: Duration) {
        self.clear();
        self.not_before = until;
    }

    /// This host may not lead. Returns whether to report it: at the refusals 1, 2, 4, 8 and so on,
    /// since without a leader one follows each second, perhaps for hours.
    pub(super) fn reports_refusal(&mut self) -> bool {
        self.refusals = self.refusals.saturating_add(1);
        self.refusals.is_power_of_two()
    }

    /// Whether the conditions of a campaign hold.
    pub(super) fn may_campaign(&self, follower: &Follower<'_>) -> bool {
        let now = follower.host.now();
        let head = &follower.seen.head;
        let abstains = follower.signals.abstains(head.epoch, now) || follower.yields();
        let may_try = now >= self.not_before && !abstains;
        (follower.leader_has_ended() || self.is_silent)
            && may_try
            && follower.cursor.seq == head.seq
    }

    /// Looks at the head, and challenges a leader that is suspected.
    pub(super) async fn tick(&mut self, follower: &mut Follower<'_>) -> Result<(), Stop> {
        let host = follower.host;
        let timing = &host.options.timing;
        let answered = match host.get_head().await {
            Ok(value) => {
                follower.missed += u32::from(follower.read_head(value)?);
                true
            }
            Err(_) => false,
        };
        self.saw(&follower.seen.head, &host.options.host);
        let quiet = host.now().saturating_sub(follower.seen.at);
        // This host follows, so a leader of its name was an earlier process of it, unless it lives.
        let was_this_host = follower.seen.head.leader == host.options.host && !self.is_alive;
        self.suspected |= quiet > timing.quiet || was_this_host;
        match self.challenged_at {
            _ if !answered => self.engine_failed(),
            None if self.suspected => self.challenge(follower).await,
            Some(at) if host.now().saturating_sub(at) >= timing.silence => self.is_silent = true,
            _ => {}
        }
        let is_alert = self.suspected || follower.leader_has_ended();
        let interval = if is_alert { timing.probe } else { timing.poll };
        self.next_at = host.now() + interval;
        Ok(())
    }

    async fn challenge(&mut self, follower: &Follower<'_>) {
        let host = follower.host;
        let name = Bytes::from(host.options.host.clone());
        let challenge = put(host.keys.challenge(), name);
        let call = host.engine.transact(&challenge);
        if host.attempt(call).await.is_ok() {
            self.challenged_at = Some(host.now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_to_lead_is_reported_ever_more_rarely() {
        let mut suspicion = Suspicion::new(Duration::ZERO);
        let reported = (0..3_600).filter(|_| suspicion.reports_refusal()).count();
        assert_eq!(reported, 12, "in an hour");
        let head = Head {
            epoch: 1,
            ..Head::first(Id([1; 16]), 0)
        };
        suspicion.saw(&head, "gw1");
        assert!(suspicion.reports_refusal(), "another leader has ended");
    }
}
