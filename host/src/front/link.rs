//! The link: a connection of each follower to the leader, over which the leader sends a byte at
//! regular intervals.
//!
//! A follower that receives nothing suspects the leader. A wrong suspicion must do no harm: it only
//! makes the cluster ask the leader for a sign of life.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout, timeout_at};

use super::Front;
use super::passing::ConnectError;
use super::preface::{HostName, Purpose};
use super::role::Leader;
use crate::limits;

/// The hosts that have links to this one, with the number of links. They live and reach this host,
/// but their names are what they claim.
#[derive(Debug, Default)]
pub struct Links(Mutex<BTreeMap<String, usize>>);

/// A link that counts until this is dropped.
struct Counted<'a> {
    links: &'a Links,
    host: String,
}

impl Links {
    /// Whether a host has a link to this one.
    #[must_use]
    pub fn contains(&self, host: &str) -> bool {
        self.locked().contains_key(host)
    }

    fn add(&self, host: &HostName) -> Counted<'_> {
        let host = host.to_string();
        *self.locked().entry(host.clone()).or_default() += 1;
        Counted { links: self, host }
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<String, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        let mut links = self.links.locked();
        if let Some(count) = links.get_mut(&self.host) {
            *count -= 1;
            if *count == 0 {
                links.remove(&self.host);
            }
        }
    }
}

/// Why a link ended. The text is for the log.
#[derive(Debug, thiserror::Error)]
enum LinkError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("it did not accept the link within {} ms", limits::CLUSTER_LINK_SILENCE.as_millis())]
    Timeout,
    #[error("it sent nothing for {} ms", limits::CLUSTER_LINK_SILENCE.as_millis())]
    Silent,
    #[error("it closed the link")]
    Closed,
    #[error("the link failed: {0}")]
    Failed(io::Error),
}

/// Keeps a link to the present leader. Each failure is a suspicion. Ends if the role has ended.
pub(super) async fn keep(front: &Front) {
    let mut role = front.role.clone();
    while let Some(leader) = Leader::wait(&mut role).await {
        let mut is_reported = false;
        let mut replacing = role.clone();
        tokio::select! {
            () = leader.replaced(&mut replacing) => {}
            () = async {
                loop {
                    let (was_linked, error) = follow(front, &leader).await;
                    // One line for each link that broke, and not for each attempt after it.
                    if was_linked || !is_reported {
                        let Leader { name, address } = &leader;
                        tracing::warn!("no link to the leader {name} at {address}: {error}");
                    }
                    is_reported = true;
                    (front.suspect)();
                    sleep(limits::CLUSTER_LINK_RETRY).await;
                }
            } => {}
        }
    }
}

/// Links with a leader until that fails. Returns whether there was a link, and why it ended.
async fn follow(front: &Front, leader: &Leader) -> (bool, LinkError) {
    let connecting = timeout(
        limits::CLUSTER_LINK_SILENCE,
        front.connect(leader, Purpose::Link),
    );
    let socket = match connecting.await {
        Ok(Ok(socket)) => socket,
        Ok(Err(error)) => return (false, error.into()),
        Err(_) => return (false, LinkError::Timeout),
    };
    tracing::debug!("linked with the leader {}", leader.name);
    (true, listen(socket).await)
}

/// Reads from a link until it is silent or ends.
async fn listen(mut socket: TcpStream) -> LinkError {
    let mut bytes = [0; 64];
    loop {
        // Polls the read before the deadline, so a pause of this process is no silence of the
        // leader.
        let deadline = Instant::now() + limits::CLUSTER_LINK_SILENCE;
        match timeout_at(deadline, socket.read(&mut bytes)).await {
            Ok(Ok(1..)) => {}
            Ok(Ok(0)) => return LinkError::Closed,
            Ok(Err(error)) => return LinkError::Failed(error),
            Err(_) => return LinkError::Silent,
        }
    }
}

/// Serves the link of a follower until this host does not lead any more, or the follower closes it.
/// A leader that does not reach the log sends nothing: it cannot serve, and another host may.
pub(super) async fn serve(front: &Front, host: &HostName, mut socket: TcpStream) {
    let _counted = front.links.add(host);
    let mut role = front.role.clone();
    let (mut reader, mut writer) = socket.split();
    let mut beat = interval(limits::CLUSTER_LINK_BEAT);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let beating = async {
        loop {
            beat.tick().await;
            if !(front.reaches_log)() {
                continue;
            }
            // The socket has room, unless the follower reads nothing.
            let written = timeout(limits::CLUSTER_LINK_SILENCE, writer.write_all(&[0])).await;
            if !matches!(written, Ok(Ok(()))) {
                return;
            }
        }
    };
    let mut unexpected = [0];
    tokio::select! {
        () = beating => {}
        // A follower sends nothing.
        _ = reader.read(&mut unexpected) => {}
        _ = role.wait_for(|role| role.broker().is_none()) => {}
    }
}
