//! The past of a store as JSON, for `--json` of the commands and for the admin API.
//!
//! A command prints the same for a data directory and for a store on another machine, because both
//! give these documents.

mod history;
mod replay;

use data_encoding::BASE64;
use serde_json::{Value as Json, json};
use statehouse_client::parse_duration;

use crate::time;
use statehouse_core::clock::{Fence, Stamp, wall_ms};
use statehouse_core::log::record::PolicyRecord;
use statehouse_offline::{Bound, Moment, Past, PastError};
use statehouse_wal::LogPosition;

pub(crate) use history::{as_of, history};
pub(crate) use replay::{difference, summary, write};

/// Bytes in JSON: a string if they are UTF-8, else `{"base64": "..."}`.
pub(crate) fn json_bytes(bytes: &[u8]) -> Json {
    match std::str::from_utf8(bytes) {
        Ok(text) => json!(text),
        Err(_) => json!({ "base64": BASE64.encode(bytes) }),
    }
}

/// The bytes that [`json_bytes`] was given.
pub(crate) fn bytes_of(json: &Json) -> Option<Vec<u8>> {
    match json {
        Json::String(text) => Some(text.clone().into_bytes()),
        json => BASE64.decode(json["base64"].as_str()?.as_bytes()).ok(),
    }
}

/// A fencing token as the client sent it, for JSON. Its node may hold any characters.
pub(crate) fn fence_json(fence: &Fence) -> String {
    format!("{:015}:{:05}:{}", fence.wall, fence.counter, fence.node)
}

pub(crate) fn policy_json(policy: &PolicyRecord) -> Json {
    json!({
        "name": policy.name,
        "version": policy.version,
        "digest": format!("blake3:{}", policy.digest),
    })
}

/// A point of the history as an operator writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Given<T> {
    /// The point itself.
    Exactly(T),
    /// How many milliseconds ago. They count from the store's time, which is ahead of the wall
    /// clock after that was set back.
    Ago(u64),
}

/// The store's time in milliseconds since 1970, as far as its log and the wall clock show it. Reads
/// the newest snapshot and the log after it.
fn now_ms(past: &Past) -> Result<u64, PastError> {
    Ok(past.end()?.1.max(wall_ms()))
}

impl Given<Moment> {
    /// The moment in the history of this directory; `None` if it is still to come.
    pub(crate) fn within(self, past: &Past) -> Result<Option<Moment>, PastError> {
        match self {
            Self::Ago(ms) => Ok(Some(Moment::Time(now_ms(past)?.saturating_sub(ms)))),
            Self::Exactly(Moment::Time(ms)) if ms > wall_ms() => {
                Ok((ms <= now_ms(past)?).then_some(Moment::Time(ms)))
            }
            Self::Exactly(moment) => Ok(Some(moment)),
        }
    }
}

impl Given<Bound> {
    /// The end of a range in the history of this directory.
    pub(crate) fn within(self, past: &Past) -> Result<Bound, PastError> {
        match self {
            Self::Ago(ms) => Ok(Bound::Time(now_ms(past)?.saturating_sub(ms))),
            Self::Exactly(bound) => Ok(bound),
        }
    }
}

/// Parses a time, or how long ago.
pub(crate) fn time_or_ago<T>(text: &str, at: impl FnOnce(u64) -> T) -> Option<Given<T>> {
    match parse_duration(text) {
        Ok(ago) => Some(Given::Ago(time::millis(ago))),
        Err(_) => time::parse(text).map(at).map(Given::Exactly),
    }
}

/// Parses one end of a range of records: a number, a time, or how long ago.
pub(crate) fn bound(text: &str) -> Result<Given<Bound>, String> {
    if let Ok(position) = text.parse() {
        return Ok(Given::Exactly(Bound::LogPosition(LogPosition(position))));
    }
    time_or_ago(text, Bound::Time).ok_or_else(|| {
        "write a record's number, a time such as 2026-11-21T03:00:00Z, or how long ago, such as 10m".to_owned()
    })
}

/// Parses a version, a time, or how long ago. The node of a version does not matter, since a store
/// never assigns a version twice.
pub(crate) fn moment(text: &str) -> Result<Given<Moment>, String> {
    let mut parts = text.splitn(3, ':');
    let (wall, counter) = (parts.next().unwrap_or_default(), parts.next());
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if let Some(counter) = counter
        // A shorter number is a time of day without a date.
        && wall.len() >= WALL_DIGITS_MIN
        && digits(wall)
        && digits(counter)
        && let (Ok(wall), Ok(counter)) = (wall.parse(), counter.parse())
    {
        return Ok(Given::Exactly(Moment::Version(Stamp { wall, counter })));
    }
    time_or_ago(text, Moment::Time).ok_or_else(|| {
        "write a version such as 001696374425000:00001:StateStore, a time such as 2026-11-21T03:00:00Z, or how long ago, such as 10m".to_owned()
    })
}

/// Milliseconds since 1970 have had at least this many digits since January 1970.
const WALL_DIGITS_MIN: usize = 10;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data_directory::tests::{settings_of, write_start};

    #[test]
    fn bytes_survive_json() {
        for bytes in [&b"plain \n"[..], b"", b"\xFF\0"] {
            assert_eq!(bytes_of(&json_bytes(bytes)).unwrap(), bytes);
        }
        assert_eq!(json_bytes("21°".as_bytes()), json!("21°"));
        assert_eq!(bytes_of(&json!(null)), None);
        assert_eq!(bytes_of(&json!({ "base64": "?" })), None);
    }

    #[test]
    fn versions_and_times_are_distinguished() {
        let exactly = |moment| Ok(Given::Exactly(moment));
        let version = |wall, counter| exactly(Moment::Version(Stamp { wall, counter }));
        assert_eq!(
            moment("001696374425000:00001:StateStore"),
            version(1_696_374_425_000, 1)
        );
        assert_eq!(moment("1696374425000:1"), version(1_696_374_425_000, 1));
        assert_eq!(moment("1696374425000:1:a:b"), version(1_696_374_425_000, 1));
        assert_eq!(moment("1970-01-01T00:00:01Z"), exactly(Moment::Time(1000)));
        assert_eq!(moment("10m"), Ok(Given::Ago(600_000)));
        for wrong in [
            "12:30",
            "12:30:15",
            "1696374425000",
            "1696374425000:x",
            "",
            ":",
            "soon",
            "-5m",
        ] {
            assert!(moment(wrong).is_err(), "{wrong}");
        }
    }

    /// After a step back of the wall clock the last records are in its future.
    #[test]
    fn ago_counts_from_the_time_of_the_store() {
        let directory = tempfile::tempdir().unwrap();
        let ahead_ms = wall_ms() + 50_000;
        write_start(&settings_of(directory.path()), 1, ahead_ms);
        let past = Past::open(directory.path()).unwrap();
        let moment = |given: Given<Moment>| given.within(&past).unwrap();
        let at = |ms| Some(Moment::Time(ms));
        assert_eq!(moment(Given::Ago(0)), at(ahead_ms));
        assert_eq!(moment(Given::Ago(1000)), at(ahead_ms - 1000));
        assert_eq!(moment(Given::Ago(u64::MAX)), at(0));
        let exactly = |ms| moment(Given::Exactly(Moment::Time(ms)));
        assert_eq!(exactly(ahead_ms), at(ahead_ms));
        assert_eq!(exactly(ahead_ms + 1), None, "still to come");
        let bound = Given::<Bound>::Ago(1000).within(&past).unwrap();
        assert_eq!(bound, Bound::Time(ahead_ms - 1000));
    }
}
