//! Locks: a key that holds its holder's name, with a lease. Enters: a name, a holder, a lease.
//! Leaves: a held lock with a fencing token. It never claims a lock whose lease may have run out.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, timeout};

use crate::client::{Client, Condition, SetOptions, SetResult, VdelResult};
use crate::duration::later;
use crate::error::Error;
use crate::limits;
use crate::version::Version;
use crate::watch::WatchEvent;

/// How to acquire a lock.
#[derive(Debug, Clone)]
pub struct LockOptions {
    /// The name that the lock's key will hold; default the client id. Whoever uses the same name
    /// has the same lock.
    pub holder: Option<Bytes>,
    /// How long the lock is held without a renewal; default 10 s.
    pub lease: Duration,
    /// How long to wait for another holder; default for ever.
    pub wait: Option<Duration>,
}

impl Default for LockOptions {
    fn default() -> Self {
        Self {
            holder: None,
            lease: Duration::from_secs(10),
            wait: None,
        }
    }
}

/// A held lock, from [`Client::lock`]. Dropping it does not release it: that needs a request, and
/// the lease ends anyway.
#[derive(Debug)]
pub struct Lock {
    client: Client,
    name: Bytes,
    holder: Bytes,
    lease: Duration,
    fencing_token: Version,
    /// Counted from before the request left, so it is never later than the store's.
    held_until: Instant,
}

impl Client {
    /// Acquires a lock, waiting for its holder to release it or for its lease to end. `None` where
    /// [`LockOptions::wait`] is over before. At least a third of the lease remains on return: an
    /// answer that arrives later is no lock, and the client tries again.
    ///
    /// # Errors
    /// See [`Error`]. After one, and after `None`, the lock may be held until its lease ends, for the
    /// request may have arrived.
    pub async fn lock(
        &self,
        name: impl AsRef<[u8]>,
        options: LockOptions,
    ) -> Result<Option<Lock>, Error> {
        let name = Bytes::copy_from_slice(name.as_ref());
        let holder = options
            .holder
            .unwrap_or_else(|| Bytes::copy_from_slice(self.id().as_bytes()));
        let give_up = options.wait.map(|wait| later(Instant::now(), wait));
        let lease = options.lease;

        // Watching comes before trying: a release between the two must not go unnoticed.
        let mut watch = self.watch(&name).await?;
        loop {
            let asked_at = Instant::now();
            let set = self.hold(&name, &holder, lease).await?;
            let spent_max = lease - lease / limits::LOCK_LEASE_LEFT_DIVISOR;
            if set.applied && asked_at.elapsed() <= spent_max {
                return Ok(Some(Lock {
                    client: self.clone(),
                    name,
                    holder,
                    lease,
                    fencing_token: set.version,
                    held_until: later(asked_at, lease),
                }));
            }
            let mut pause = match set.applied {
                // The answer was late, and no other client has the lock.
                true => limits::LOCK_RETRY_MIN,
                false => lease.max(limits::LOCK_RETRY_MIN),
            };
            if let Some(give_up) = give_up {
                let left = give_up.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Ok(None);
                }
                pause = pause.min(left);
            }
            // The delete event of a release or an expiry should come first. The pause is for a
            // store that loses it.
            let freed = async {
                loop {
                    match watch.next().await {
                        Ok(WatchEvent::Set { .. }) => {}
                        Ok(WatchEvent::Deleted { .. } | WatchEvent::Gap(_))
                        | Err(Error::Protocol(_)) => return Ok(()),
                        Err(error) => return Err(error),
                    }
                }
            };
            timeout(pause, freed).await.unwrap_or(Ok(()))?;
        }
    }

    /// One attempt to take or to keep a lock.
    async fn hold(
        &self,
        name: &Bytes,
        holder: &Bytes,
        lease: Duration,
    ) -> Result<SetResult, Error> {
        let options = SetOptions {
            condition: Condition::IfAbsentOrEqual,
            expiry: Some(lease),
            fencing_token: None,
        };
        self.set(name, holder, options).await
    }
}

impl Lock {
    /// The version of the SET that acquired the lock: above that of every earlier holder. Given
    /// with every SET, DEL and VDEL of what the lock protects, it keeps out a holder that lost its
    /// lease without noticing.
    #[must_use]
    pub fn fencing_token(&self) -> &Version {
        &self.fencing_token
    }

    /// The name in the lock's key.
    #[must_use]
    pub fn holder(&self) -> &[u8] {
        &self.holder
    }

    /// When the lease ends, if it is not renewed before.
    #[must_use]
    pub fn held_until(&self) -> Instant {
        self.held_until
    }

    /// Starts the lease anew. False where the lock is lost: somebody else has it, or the lease ended
    /// before this was answered, so that somebody may have had it.
    ///
    /// # Errors
    /// See [`Error`]. After one the lock is still held until [`Lock::held_until`].
    pub async fn renew(&mut self) -> Result<bool, Error> {
        let asked_at = Instant::now();
        if asked_at >= self.held_until {
            return Ok(false);
        }
        let set = self
            .client
            .hold(&self.name, &self.holder, self.lease)
            .await?;
        if !set.applied || Instant::now() >= self.held_until {
            return Ok(false);
        }
        self.held_until = later(asked_at, self.lease);
        Ok(true)
    }

    /// Gives the lock back. False where it was not held any more.
    ///
    /// # Errors
    /// See [`Error`]. After one the lock stays held until its lease ends.
    pub async fn release(self) -> Result<bool, Error> {
        let vdel = self.client.vdel(&self.name, &self.holder, None).await?;
        Ok(matches!(vdel, VdelResult::Deleted(_)))
    }
}
