//! Who was refused, and why: for the log and the metrics.
//!
//! What enters: refusals, as many as hostile clients care to provoke. What leaves: log lines (target `statehouse::audit`), of
//! each kind a bounded number in a second and then how many were left out, and counts. It holds no name that a client chose.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::limits;

/// Where refusals are found in the log, and acts of the administration.
pub(crate) const TARGET: &str = "statehouse::audit";

/// Something that was refused.
pub struct Refused<'a> {
    /// What somebody wanted: a word that is known beforehand, since it becomes a label of a metric.
    pub what: &'static str,
    /// Where they are.
    pub peer: Option<SocketAddr>,
    /// The client id; empty where none was said.
    pub client: &'a str,
    /// The user, where one was said or found.
    pub user: Option<&'a str>,
    /// Why not.
    pub why: &'a dyn Display,
}

/// By what was wanted: the lines of this second, and counts since the start.
#[derive(Default)]
pub struct Audit(Mutex<BTreeMap<&'static str, Written>>);

/// Of one kind, so that a loud client hides nothing of another.
#[derive(Default)]
struct Written {
    second: Option<Instant>,
    lines: u32,
    left_out: u64,
    refused: u64,
}

impl Audit {
    /// Counts a refusal, and logs it where this second has room for another line.
    pub fn refused(&self, refused: &Refused<'_>) {
        self.count(refused.what);
        self.log(refused);
    }

    /// Logs a refusal that is counted elsewhere, in the same way.
    pub fn log(&self, refused: &Refused<'_>) {
        let Some(left_out) = self.room(refused.what, Instant::now()) else {
            return;
        };
        if left_out > 0 {
            tracing::warn!(target: TARGET, what = refused.what, left_out, "more was refused than is logged");
        }
        // Both may be as long as a CONNECT, and hold what would look like another line.
        let shown = |name: &str| {
            let end = name.floor_char_boundary(limits::AUDIT_NAME_BYTES_MAX);
            name[..end].escape_debug().to_string()
        };
        let (client, user) = (shown(refused.client), shown(refused.user.unwrap_or("-")));
        let peer = refused
            .peer
            .map_or_else(|| "-".to_owned(), |it| it.to_string());
        tracing::warn!(
            target: TARGET,
            what = refused.what,
            %client,
            %user,
            peer,
            why = %refused.why.to_string().escape_debug(),
            "refused"
        );
    }

    fn count(&self, what: &'static str) {
        self.kinds().entry(what).or_default().refused += 1;
    }

    /// The number of lines that were left out before this one, or none where this one is.
    fn room(&self, what: &'static str, now: Instant) -> Option<u64> {
        let mut kinds = self.kinds();
        let written = kinds.entry(what).or_default();
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

    /// How often each was refused, but for those that are counted elsewhere.
    pub fn counts(&self) -> Vec<(&'static str, u64)> {
        let kinds = self.kinds();
        let counted = kinds.iter().filter(|(_, it)| it.refused > 0);
        counted.map(|(what, it)| (*what, it.refused)).collect()
    }

    fn kinds(&self) -> MutexGuard<'_, BTreeMap<&'static str, Written>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_counted_whole_and_logged_in_part_and_hides_nothing_else() {
        let audit = Audit::default();
        let now = Instant::now();
        let max = u64::from(limits::AUDIT_LINES_PER_SECOND_MAX);
        let count = |what, now| {
            audit.count(what);
            audit.room(what, now)
        };
        let said = (0..max + 7).filter_map(|_| count("connect", now));
        assert_eq!(
            said.collect::<Vec<_>>(),
            vec![0; limits::AUDIT_LINES_PER_SECOND_MAX as usize]
        );
        assert_eq!(count("publish", now), Some(0));
        let later = now + Duration::from_secs(1);
        assert_eq!(count("connect", later), Some(7));
        assert_eq!(count("connect", later), Some(0));
        // Logged, and counted elsewhere.
        assert_eq!(audit.room("subscribe", now), Some(0));
        assert_eq!(audit.counts(), [("connect", max + 9), ("publish", 1)]);
    }
}
