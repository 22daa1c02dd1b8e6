//! A host's membership in a cluster: it joins, follows, leads and joins again.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use crate::clock::Clock;
use crate::embedder::{Embedder, Ended};
use crate::engine::Engine;
use crate::error::Stop;
use crate::feed::Feed;
use crate::figures::Figures;
use crate::follower::join;
use crate::host::Host;
use crate::leader::lead;
use crate::options::Options;
use crate::presence::{Presence, Role};

/// A host of a cluster.
#[derive(Debug)]
pub struct Member {
    host: Host,
    signals: Signals,
}

/// What other tasks want from the member, and what it remembers between roles.
#[derive(Debug, Default)]
pub(crate) struct Signals {
    pub(crate) suspect: Notify,
    /// The description of this host has changed.
    pub(crate) describe: Notify,
    pub(crate) presence: Presence,
    state: Mutex<State>,
}

/// After a handover other hosts should lead. It ends when one does.
#[derive(Clone, Copy, Debug)]
struct Abstention {
    epoch: u64,
    until: Duration,
}

#[derive(Debug, Default)]
struct State {
    abstention: Option<Abstention>,
    known: (u64, u64),
    has_run: bool,
}

impl Signals {
    /// Whether this host must not campaign, because it handed this leadership over a moment ago.
    pub(crate) fn abstains(&self, epoch: u64, now: Duration) -> bool {
        let abstention = self.locked().abstention;
        abstention.is_some_and(|it| it.epoch == epoch && now < it.until)
    }

    /// The newest head that this host wrote, by its place in the order of heads. An older head is
    /// a stale read.
    pub(crate) fn known(&self) -> (u64, u64) {
        self.locked().known
    }

    fn locked(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Member {
    /// A member that does nothing before [`Self::run`]. Fails if a name in `options` is invalid,
    /// with a text for the operator.
    pub fn new(
        engine: Arc<dyn Engine>,
        clock: Arc<dyn Clock>,
        options: Options,
    ) -> Result<Self, String> {
        options.check()?;
        Ok(Self {
            host: Host::new(engine, clock, options),
            signals: Signals::default(),
        })
    }

    /// What this member reads and writes of the log.
    pub(crate) fn feed(&self) -> Arc<Feed> {
        Arc::clone(&self.host.feed)
    }

    /// Reports that the leader does not answer this host. The member challenges the leader and
    /// takes over if it stays silent.
    pub fn suspect(&self) {
        self.signals.suspect.notify_one();
    }

    /// Reports that [`Embedder::describe`] has a new answer, so that this host's record in the
    /// engine is written again. Each call costs the engine a write.
    pub fn describe_again(&self) {
        self.signals.describe.notify_one();
    }

    /// Figures for operators.
    #[must_use]
    pub fn figures(&self) -> Arc<Figures> {
        Arc::clone(&self.host.figures)
    }

    /// Takes part in the cluster until an error that a repetition does not heal. If the future is
    /// dropped, a leadership ends at once; other hosts wait for its lease unless it was handed
    /// over before.
    ///
    /// A member must run only once. To run again, create a member with another
    /// [`Options::process`]: a transaction of the first run may still be applied, and must differ
    /// from those of the second.
    pub async fn run(&self, embedder: &mut dyn Embedder) -> Result<Infallible, Stop> {
        if std::mem::replace(&mut self.signals.locked().has_run, true) {
            return Err(Stop::HasRun);
        }
        tokio::select! {
            biased;
            stopped = self.take_part(embedder) => stopped,
            never = self.signals.presence.write(&self.host) => match never {},
            never = crate::space::run(&self.host) => match never {},
        }
    }

    async fn take_part(&self, embedder: &mut dyn Embedder) -> Result<Infallible, Stop> {
        self.signals
            .presence
            .describe(&self.host, Role::Joining, 0, embedder);
        loop {
            let (follower, watch) = join(&self.host, &self.signals, embedder).await?;
            let Some(won) = follower.follow(watch, embedder).await? else {
                continue;
            };
            let epoch = won.head.epoch;
            self.signals.locked().known = won.head.order();
            let ended = lead(&self.host, &self.signals, won, embedder).await?;
            if ended == Ended::HandedOver {
                self.signals.locked().abstention = Some(Abstention {
                    epoch,
                    until: self.host.now() + self.host.options.timing.abstention,
                });
            }
            embedder.ended(ended);
        }
    }
}
