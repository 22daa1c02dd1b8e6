//! Logs and counts refusals.
//!
//! Hostile clients can provoke any number of refusals. So each kind has a limited number of log
//! lines (target `statehouse::audit`) per second, and then one line with the number of omitted
//! ones. It must never keep a name that a client chose, since these are unbounded.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use statehouse_mqtt::Origin;

use crate::limits;

/// The log target of refusals and of admin API calls.
pub const TARGET: &str = "statehouse::audit";

/// A refused action.
pub struct Refused<'a> {
    /// The attempted action: one of a fixed set of words, since it becomes a metric label.
    pub what: &'static str,
    /// The address of the client.
    pub peer: Option<SocketAddr>,
    /// The client id; empty if none was sent.
    pub client: &'a str,
    /// The user, if one was given or derived.
    pub user: Option<&'a str>,
    /// The reason.
    pub why: &'a dyn Display,
}

impl<'a> Refused<'a> {
    /// The refusal of a connection that is known by its address alone.
    pub fn of_peer(what: &'static str, peer: SocketAddr, why: &'a dyn Display) -> Self {
        Self {
            what,
            peer: Some(peer),
            client: "",
            user: None,
            why,
        }
    }

    /// The refusal of an action of a client.
    pub fn of_client(what: &'static str, origin: &'a Origin, why: &'a dyn Display) -> Self {
        Self {
            what,
            peer: None,
            client: &origin.client,
            user: origin.identity.user.as_deref(),
            why,
        }
    }
}

/// The key of a rate limit: lines of one kind share it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Kind {
    by: By,
    /// Whether the client is unauthenticated. Anyone can be in this group.
    is_stranger: bool,
    what: &'static str,
}

/// The component that refused. The broker and the rules use the same words for actions.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum By {
    /// The broker, which keeps its own counts.
    Broker,
    /// Any other component.
    Store,
}

/// The rate limits of log lines by kind, and the counts since the start by action.
#[derive(Default)]
pub struct Audit {
    lines: Mutex<BTreeMap<Kind, Written>>,
    counts: Mutex<BTreeMap<&'static str, u64>>,
}

/// The rate limit of one kind, so that a flood of one kind hides no line of another.
#[derive(Default)]
struct Written {
    second: Option<Instant>,
    lines: u32,
    left_out: u64,
}

impl Audit {
    /// Counts a refusal, and logs it if this second has room for another line.
    pub fn refused(&self, refused: &Refused<'_>) {
        self.count(refused.what);
        self.log(Kind::of(By::Store, refused), refused);
    }

    /// Like [`refused`](Self::refused), for a client that may be authenticated although its lines
    /// have its address: a flood of unauthenticated ones must not hide its line then.
    pub fn refused_with_proof(&self, refused: &Refused<'_>, is_proven: bool) {
        self.count(refused.what);
        self.log(Kind::of(By::Store, refused).with_proof(is_proven), refused);
    }

    /// Logs a refusal by the broker, which has already counted it. `is_proven`: the client is
    /// authenticated.
    pub fn refused_by_broker(&self, refused: &Refused<'_>, is_proven: bool) {
        self.log(Kind::of(By::Broker, refused).with_proof(is_proven), refused);
    }

    fn log(&self, kind: Kind, refused: &Refused<'_>) {
        let Some(left_out) = self.room(kind, Instant::now()) else {
            return;
        };
        if left_out > 0 {
            tracing::warn!(target: TARGET, what = refused.what, left_out, "some refusals were not logged");
        }
        // Both may be as long as a CONNECT packet.
        fn shown(name: &str) -> &str {
            &name[..name.floor_char_boundary(limits::AUDIT_NAME_BYTES_MAX)]
        }
        let peer = refused
            .peer
            .map_or_else(|| "-".to_owned(), |it| it.to_string());
        // Texts of clients must be recorded as strings: the log then quotes and escapes them, so
        // that they cannot imitate another field or line.
        tracing::warn!(
            target: TARGET,
            what = refused.what,
            client = shown(refused.client),
            user = shown(refused.user.unwrap_or("-")),
            peer,
            why = refused.why.to_string(),
            "refused"
        );
    }

    /// Counts a refusal, without a log line.
    pub(crate) fn count(&self, what: &'static str) {
        *locked(&self.counts).entry(what).or_default() += 1;
    }

    /// The number of lines omitted before this one, or `None` if this line must be omitted too.
    fn room(&self, kind: Kind, now: Instant) -> Option<u64> {
        let mut kinds = locked(&self.lines);
        let written = kinds.entry(kind).or_default();
        let is_over = (written.second)
            .is_none_or(|began| now.duration_since(began) >= Duration::from_secs(1));
        if is_over {
            (written.second, written.lines) = (Some(now), 0);
        }
        if written.lines >= limits::AUDIT_LINES_PER_SECOND_MAX {
            written.left_out += 1;
            return None;
        }
        written.lines += 1;
        Some(std::mem::take(&mut written.left_out))
    }

    /// The number of refusals by action, without those that the broker counts.
    pub fn counts(&self) -> Vec<(&'static str, u64)> {
        let counts = locked(&self.counts);
        counts.iter().map(|(what, count)| (*what, *count)).collect()
    }
}

impl Kind {
    /// Unless [`with_proof`](Self::with_proof) says otherwise, a refusal with an address is one of a
    /// client that is known by its address alone.
    fn of(by: By, refused: &Refused<'_>) -> Self {
        Self {
            by,
            is_stranger: refused.peer.is_some(),
            what: refused.what,
        }
    }

    fn with_proof(self, is_proven: bool) -> Self {
        Self {
            is_stranger: !is_proven,
            ..self
        }
    }
}

/// Code under these locks does not panic.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(what: &'static str, peer: Option<&str>) -> Refused<'static> {
        Refused {
            what,
            peer: peer.map(|it| it.parse().unwrap()),
            client: "",
            user: None,
            why: &"",
        }
    }

    #[test]
    fn flood_is_counted_in_full_and_logged_in_part() {
        let audit = Audit::default();
        let now = Instant::now();
        let max = u64::from(limits::AUDIT_LINES_PER_SECOND_MAX);
        let connect = Kind::of(By::Store, &refused("connect", None));
        let room = |now| {
            audit.count("connect");
            audit.room(connect, now)
        };
        let rooms = (0..max + 7).filter_map(|_| room(now));
        assert_eq!(
            rooms.collect::<Vec<_>>(),
            vec![0; limits::AUDIT_LINES_PER_SECOND_MAX as usize]
        );
        let later = now + Duration::from_secs(1);
        assert_eq!(room(later), Some(7));
        assert_eq!(room(later), Some(0));
        audit.refused(&refused("publish", None));
        audit.refused_by_broker(&refused("subscribe", None), true);
        assert_eq!(audit.counts(), [("connect", max + 9), ("publish", 1)]);
    }

    /// Regression: a client that sent garbage hid all lines about clients that no rule lets
    /// connect.
    #[test]
    fn flood_hides_no_lines_of_another_kind() {
        let audit = Audit::default();
        let now = Instant::now();
        let peer = Some("192.0.2.1:7");
        let flood = Kind::of(By::Broker, &refused("connect", peer));
        while audit.room(flood, now).is_some() {}
        for (by, refused) in [
            (By::Store, refused("connect", None)),
            (By::Store, refused("connect", peer)),
            (By::Broker, refused("connect", None)),
            (By::Broker, refused("publish", peer)),
        ] {
            assert_eq!(audit.room(Kind::of(by, &refused), now), Some(0));
        }
        // A client that is authenticated and not yet connected has an address too.
        let audit = Audit::default();
        for by in [By::Store, By::Broker] {
            let stranger = Kind::of(by, &refused("connect", peer));
            while audit.room(stranger, now).is_some() {}
            assert_eq!(audit.room(stranger.with_proof(true), now), Some(0));
        }
    }

    /// Regression: requests without credentials hid the refusals of users that had logged in.
    #[test]
    fn flood_of_strangers_hides_no_refused_operator() {
        let audit = Audit::default();
        let now = Instant::now();
        let peer = Some("192.0.2.1:7");
        for peer in [peer, None] {
            let flood = Kind::of(By::Store, &refused("administer", peer)).with_proof(false);
            while audit.room(flood, now).is_some() {}
        }
        let user = Refused {
            user: Some("reader"),
            ..refused("administer", peer)
        };
        let user = Kind::of(By::Store, &user).with_proof(true);
        assert_eq!(audit.room(user, now), Some(0));
    }
}
