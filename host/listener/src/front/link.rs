//! The link: a connection of each follower to the leader, over which the leader sends a beat at
//! regular intervals. A beat is the byte 0, or the byte 1 and the [`Times`] of the leader. The
//! follower sends a byte at the same intervals, and the leader is silent while these do not arrive.
//! So beats prove both directions. A link counts only while the leader receives these bytes: the
//! connection of a process that is stopped stays open. Programs before [`Purpose::TwoWayLink`]
//! send no such bytes, and end a link with them.
//!
//! A follower that receives nothing suspects the leader. A wrong suspicion must do no harm: it only
//! makes the cluster ask the leader for a sign of life. After [`Front::hold`] without a beat, the
//! follower ends the streams that it passes on: the network may acknowledge bytes that it holds, so
//! that no connection fails.

use std::collections::BTreeMap;
use std::io;
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval, sleep, timeout, timeout_at};

use super::Front;
use super::passing::ConnectError;
use super::preface::{HostName, Purpose};
use super::role::Leader;
use statehouse_config::limits;

/// The beat of a leader whose store has ended, and of programs that send no times.
const BARE: u8 = 0;
/// The beat with times: 1 | time of the store u64 | wall clock u64, in milliseconds since 1970.
const TIMED: u8 = 1;
const TIMED_BYTES: usize = 17;

/// What a follower sends. The leader looks at the number of bytes only.
const TICK: u8 = 0;

/// The clocks of a leader in milliseconds since 1970. They differ after its wall clock was stepped
/// back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// The time of the store, which never steps back.
    pub store_ms: u64,
    /// The wall clock.
    pub wall_ms: u64,
}

impl Times {
    fn encode(self) -> [u8; TIMED_BYTES] {
        let mut out = [TIMED; TIMED_BYTES];
        out[1..9].copy_from_slice(&self.store_ms.to_le_bytes());
        out[9..].copy_from_slice(&self.wall_ms.to_le_bytes());
        out
    }
}

/// A beat and the bytes after it.
type Beat<'a> = (Option<Times>, &'a [u8]);

/// A beat at the beginning of `bytes` and the bytes after it. `None` if the beat is not complete.
fn next_beat(bytes: &[u8]) -> Result<Option<Beat<'_>>, LinkError> {
    match bytes {
        [] => Ok(None),
        [BARE, rest @ ..] => Ok(Some((None, rest))),
        [TIMED, body @ ..] => {
            let Some((times, rest)) = body.split_first_chunk::<{ TIMED_BYTES - 1 }>() else {
                return Ok(None);
            };
            let times = times.as_chunks::<8>().0;
            let times = Times {
                store_ms: u64::from_le_bytes(times[0]),
                wall_ms: u64::from_le_bytes(times[1]),
            };
            Ok(Some((Some(times), rest)))
        }
        [kind, ..] => Err(LinkError::UnknownBeat(*kind)),
    }
}

/// The links of a host: those of its followers while it leads, and its own while it follows.
#[derive(Debug, Default)]
pub struct Links {
    /// The hosts that have links to this one, with the number of links. They live and reach this
    /// host, or did so less than [`limits::CLUSTER_LINK_SILENCE`] and a beat ago. Their names are
    /// what they claim.
    followers: Mutex<BTreeMap<String, usize>>,
    /// Since when the leader that this host follows has sent nothing.
    silent_since: Mutex<Option<Instant>>,
}

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

    /// The names of these hosts.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.locked().keys().cloned().collect()
    }

    /// This host begins to follow a leader, or the leader has sent a beat.
    pub fn begin_silence(&self) {
        *self.silent_since() = Some(Instant::now());
    }

    /// How long the leader that this host follows has sent nothing.
    #[must_use]
    pub fn silence(&self) -> Duration {
        self.silent_since()
            .map_or(Duration::ZERO, |it| it.elapsed())
    }

    fn add(&self, host: &HostName) -> Counted<'_> {
        let host = host.to_string();
        *self.locked().entry(host.clone()).or_default() += 1;
        Counted { links: self, host }
    }

    fn locked(&self) -> MutexGuard<'_, BTreeMap<String, usize>> {
        (self.followers.lock()).unwrap_or_else(PoisonError::into_inner)
    }

    fn silent_since(&self) -> MutexGuard<'_, Option<Instant>> {
        (self.silent_since.lock()).unwrap_or_else(PoisonError::into_inner)
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
    #[error(
        "it sent nothing for {} ms: it may not run, receive nothing from this host, or not reach the log",
        limits::CLUSTER_LINK_SILENCE.as_millis()
    )]
    Silent,
    #[error("it closed the link")]
    Closed,
    #[error("it sent a beat of the unknown kind {0}: use the same version on all hosts")]
    UnknownBeat(u8),
    #[error("the link failed: {0}")]
    Failed(io::Error),
}

/// Keeps a link to the present leader. Each failure is a suspicion. Ends if the role has ended.
pub(super) async fn keep(front: &Front) {
    let mut role = front.role.clone();
    while let Some(leader) = Leader::wait(&mut role).await {
        let (mut is_reported, mut two_way) = (false, true);
        let mut replacing = role.clone();
        tokio::select! {
            () = leader.replaced(&mut replacing) => {}
            () = async {
                loop {
                    let (was_linked, error) = follow(front, &leader, &mut two_way).await;
                    // The program of the leader may be a later one at the next attempt.
                    two_way |= was_linked;
                    // One line for each link that broke, and not for each attempt after it.
                    if was_linked || !is_reported {
                        let Leader { name, address } = &leader;
                        tracing::warn!("no link to the leader {name} at {address}: {error}");
                    }
                    is_reported = true;
                    (front.options.suspect)();
                    sleep(limits::CLUSTER_LINK_RETRY).await;
                }
            } => {}
        }
    }
}

/// Links with a leader until that fails. Returns whether there was a link, and why it ended.
async fn follow(front: &Front, leader: &Leader, two_way: &mut bool) -> (bool, LinkError) {
    let mut socket = match open(front, leader, two_way).await {
        Ok(socket) => socket,
        Err(error) => return (false, error),
    };
    tracing::debug!("linked with the leader {}", leader.name);
    let (reader, writer) = socket.split();
    let ended = tokio::select! {
        biased;
        error = listen(reader, front) => error,
        error = tick(writer), if *two_way => LinkError::Failed(error),
    };
    (true, ended)
}

/// Opens a link of both directions, or of one if the leader is a program that refuses the former.
/// `two_way` says which one to try, and then which one it is.
async fn open(front: &Front, leader: &Leader, two_way: &mut bool) -> Result<TcpStream, LinkError> {
    let mut purpose = match *two_way {
        true => Purpose::TwoWayLink,
        false => Purpose::Link,
    };
    loop {
        let connecting = front.connect(leader, purpose);
        match timeout(limits::CLUSTER_LINK_SILENCE, connecting).await {
            Ok(Err(ConnectError::Refused)) if purpose == Purpose::TwoWayLink => {
                purpose = Purpose::Link;
            }
            Ok(connected) => {
                let socket = connected?;
                *two_way = purpose == Purpose::TwoWayLink;
                return Ok(socket);
            }
            Err(_) => return Err(LinkError::Timeout),
        }
    }
}

/// Sends a byte at regular intervals. Returns why that failed.
async fn tick(mut writer: impl AsyncWrite + Unpin) -> io::Error {
    let mut beat = beats();
    loop {
        beat.tick().await;
        // The socket has room, unless the leader reads nothing.
        if let Err(error) = writer.write_all(&[TICK]).await {
            return error;
        }
    }
}

fn beats() -> Interval {
    let mut beat = interval(limits::CLUSTER_LINK_BEAT);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    beat
}

/// Reads from a link until it is silent or ends, and passes the times of the leader on.
async fn listen(mut reader: impl AsyncRead + Unpin, front: &Front) -> LinkError {
    let mut bytes = [0; 4 * TIMED_BYTES];
    let mut held = 0;
    loop {
        // Polls the read before the deadline, so a pause of this process is no silence of the
        // leader.
        let deadline = Instant::now() + limits::CLUSTER_LINK_SILENCE;
        match timeout_at(deadline, reader.read(&mut bytes[held..])).await {
            Ok(Ok(0)) => return LinkError::Closed,
            Ok(Ok(read)) => held += read,
            Ok(Err(error)) => return LinkError::Failed(error),
            Err(_) => return LinkError::Silent,
        }
        let mut rest = &bytes[..held];
        loop {
            match next_beat(rest) {
                Ok(Some((times, after))) => {
                    front.options.links.begin_silence();
                    times.map(&*front.options.compare);
                    rest = after;
                }
                Ok(None) => break,
                Err(error) => return error,
            }
        }
        let consumed = held - rest.len();
        bytes.copy_within(consumed..held, 0);
        held -= consumed;
    }
}

/// Ends the streams that are passed on each time that the leader was silent for [`Front::hold`].
pub(super) async fn end_lost(front: &Front) {
    let mut is_lost = false;
    loop {
        let left = front.hold.saturating_sub(front.options.links.silence());
        // After a pause of this process, the beats of that time are read before the second look.
        sleep(left.max(limits::CLUSTER_LINK_BEAT)).await;
        let is_silent = left.is_zero() && front.options.links.silence() >= front.hold;
        if !mem::replace(&mut is_lost, is_silent) && is_silent {
            front.lost.notify_waiters();
        }
    }
}

/// Serves the link of a follower until this host does not lead any more, or the follower closes it.
/// A leader that does not reach the log sends nothing: it cannot serve, and another host may.
pub(super) async fn serve(front: &Front, host: &HostName, two_way: bool, mut socket: TcpStream) {
    let mut role = front.role.clone();
    tokio::select! {
        () = send_beats(front, host, two_way, &mut socket) => {}
        _ = role.wait_for(|role| role.broker().is_none()) => {}
    }
}

/// Sends beats until the follower closes the link or takes none. The link counts while the follower
/// sends bytes too.
async fn send_beats(front: &Front, host: &HostName, two_way: bool, socket: &mut TcpStream) {
    let mut counted = Some(front.options.links.add(host));
    let (mut reader, mut writer) = socket.split();
    let (mut beat, mut ticks, mut ticked_at) = (beats(), [0; 64], Instant::now());
    loop {
        tokio::select! {
            biased;
            read = reader.read(&mut ticks) => match read {
                Ok(1..) if two_way => ticked_at = Instant::now(),
                // On a link of one direction a follower sends nothing.
                _ => return,
            },
            _ = beat.tick() => {
                if two_way && ticked_at.elapsed() >= limits::CLUSTER_LINK_SILENCE {
                    counted = None;
                    continue;
                }
                counted.get_or_insert_with(|| front.options.links.add(host));
                if !(front.options.reaches_log)() {
                    continue;
                }
                // The socket has room, unless the follower reads nothing.
                let times = (front.options.times)().map(Times::encode);
                let bytes = times.as_ref().map_or(&[BARE][..], |it| it);
                let written = timeout(limits::CLUSTER_LINK_SILENCE, writer.write_all(bytes)).await;
                if !matches!(written, Ok(Ok(()))) {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes bytes in portions of this size to the reader of a link.
    fn read(bytes: &[u8], portion: usize) -> Result<Vec<Option<Times>>, String> {
        let (mut beats, mut held) = (Vec::new(), Vec::new());
        for portion in bytes.chunks(portion) {
            held.extend_from_slice(portion);
            let mut rest = &held[..];
            while let Some((times, after)) = next_beat(rest).map_err(|it| it.to_string())? {
                beats.push(times);
                rest = after;
            }
            held = rest.to_vec();
        }
        Ok(beats)
    }

    #[test]
    fn beats_are_read_in_any_portions() {
        let times = Times {
            store_ms: 0x0101_0001_0000_0001,
            wall_ms: 1,
        };
        let mut bytes = vec![BARE];
        bytes.extend(times.encode());
        bytes.extend(times.encode());
        bytes.push(BARE);
        let expected = vec![None, Some(times), Some(times), None];
        for portion in 1..=bytes.len() {
            assert_eq!(read(&bytes, portion), Ok(expected.clone()), "{portion}");
        }
    }

    #[test]
    fn unknown_beat_is_an_error() {
        let error = read(&[BARE, 2, 0], 3).unwrap_err();
        assert!(error.contains("unknown kind 2"), "{error}");
    }
}
