//! Locks: a key that contains the name of its holder and expires with its lease.
//!
//! Invariant: the client must never report a lock as held if its lease may have expired.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, timeout};

use crate::client::{Client, Condition, SetOptions, VdelResult, unexpected};
use crate::duration::later;
use crate::error::Error;
use crate::lease::Moment;
use crate::limits;
use crate::version::Version;
use crate::watch::WatchEvent;

/// How to acquire a lock.
#[derive(Debug, Clone)]
pub struct LockOptions {
    /// The value of the lock's key; default the client id. Clients with the same holder name share
    /// the lock, also two tasks of one client. The first one that releases it does so for all.
    pub holder: Option<Bytes>,
    /// How long the lock is held without a renewal; default 10 s. A lock whose lease is not longer
    /// than the time of a response is never acquired.
    pub lease: Duration,
    /// How long to wait while another client holds the lock; default for ever.
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

/// A held lock, from [`Client::lock`]. Dropping it does not release the lock, because a release
/// needs a request. The lease expires anyway.
#[derive(Debug)]
pub struct Lock {
    client: Client,
    name: Bytes,
    holder: Bytes,
    lease: Duration,
    fencing_token: Version,
    /// Measured from before the request was sent, so it is never later than the expiry at the
    /// store.
    held_until: Moment,
}

impl Client {
    /// Acquires a lock. Waits until the current holder releases it or its lease expires, and
    /// returns `None` after [`LockOptions::wait`]. At least a third of the lease remains on return:
    /// if the response arrives later, the client tries again.
    ///
    /// # Errors
    /// See [`Error`]. After an error or `None`, the lock may be held until its lease expires,
    /// because the request may have taken effect.
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

        // The watch must precede the SET, so that a release between the two requests is noticed.
        let mut watch = self.watch(&name).await?;
        loop {
            let asked_at = Moment::now();
            let (applied, version) = self.hold(&name, &holder, lease).await?;
            let spent_max = lease - lease / limits::LOCK_LEASE_LEFT_DIVISOR;
            if applied && asked_at.elapsed() <= spent_max {
                return Ok(Some(Lock {
                    client: self.clone(),
                    name,
                    holder,
                    lease,
                    fencing_token: version,
                    held_until: asked_at.later(lease),
                }));
            }
            let mut pause = match applied {
                // The response was late, but no other client holds the lock.
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
            // The delete event of a release or an expiry should arrive first. The pause covers a
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

    /// Sends one request to acquire or renew a lock. Returns whether this client holds it, and the
    /// version of the lock's key.
    async fn hold(
        &self,
        name: &Bytes,
        holder: &Bytes,
        lease: Duration,
    ) -> Result<(bool, Version), Error> {
        let options = SetOptions {
            condition: Condition::IfAbsentOrEqual,
            expiry: Some(lease),
            fencing_token: None,
        };
        let set = self.set(name, holder, options).await?;
        let version = set.version.ok_or_else(|| unexpected("SET"))?;
        Ok((set.applied, version))
    }
}

impl Lock {
    /// The version of the SET that acquired the lock, which is above that of every earlier holder.
    /// If every SET, DEL and VDEL of the protected data carries it, a former holder that did not
    /// notice the end of its lease is refused.
    #[must_use]
    pub fn fencing_token(&self) -> &Version {
        &self.fencing_token
    }

    /// The value of the lock's key.
    #[must_use]
    pub fn holder(&self) -> &[u8] {
        &self.holder
    }

    /// Whether the lease has not expired. Time during which the machine was suspended counts.
    #[must_use]
    pub fn is_held(&self) -> bool {
        !self.held_until.is_over()
    }

    /// When the lease expires unless it is renewed. After that, this returns the current time.
    ///
    /// tokio's clock stands still while the machine is suspended, and the lease does not. So the
    /// result is only valid until a suspension: do not store it, and sleep for short times. To
    /// renew in time, wait for [`Lock::renewal_due`].
    #[must_use]
    pub fn held_until(&self) -> Instant {
        self.held_until.instant()
    }

    /// Waits until a third of the remaining time of the lease has passed, which is when to renew
    /// it. Time during which the machine was suspended counts.
    pub async fn renewal_due(&self) {
        let left = self.held_until.left();
        Moment::now().later(left / 3).passed().await;
    }

    /// Renews the lease. Returns false if the lock is lost: another client holds it, or the lease
    /// expired before the response, so that another client may have held it. This does not wait for
    /// the response for longer than the lease lasts.
    ///
    /// A lock whose key was deleted is acquired again, although another client may have held it in
    /// between. Then that client's fencing token is higher, and the store refuses this one's.
    ///
    /// # Errors
    /// See [`Error`]. After an error the lock is still held until [`Lock::held_until`].
    pub async fn renew(&mut self) -> Result<bool, Error> {
        let asked_at = Moment::now();
        if !self.is_held() {
            return Ok(false);
        }
        let (applied, _) = tokio::select! {
            held = self.client.hold(&self.name, &self.holder, self.lease) => held?,
            () = self.held_until.passed() => return Ok(false),
        };
        if !applied || !self.is_held() {
            return Ok(false);
        }
        self.held_until = asked_at.later(self.lease);
        Ok(true)
    }

    /// Releases the lock. Returns false if it was not held any more.
    ///
    /// # Errors
    /// See [`Error`]. After an error the lock is held until its lease expires.
    pub async fn release(self) -> Result<bool, Error> {
        let vdel = self.client.vdel(&self.name, &self.holder, None).await?;
        Ok(matches!(vdel, VdelResult::Deleted(_)))
    }
}
