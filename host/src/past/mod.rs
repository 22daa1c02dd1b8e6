//! The past of a store as JSON, for `--json` of the commands and for the admin API.
//!
//! A command prints the same for a data directory and for a store on another machine, because both
//! give these documents.

mod history;
mod replay;

use data_encoding::BASE64;
use serde_json::{Value as Json, json};

use crate::time;
use statehouse_core::clock::{Fence, Stamp, wall_ms};
use statehouse_core::log::record::PolicyRecord;
use statehouse_offline::{Bound, Moment};
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

pub(crate) fn policy_json(policy: &PolicyRecord) -> serde_json::Value {
    serde_json::json!({
        "name": policy.name,
        "version": policy.version,
        "digest": format!("blake3:{}", policy.digest),
    })
}

/// Parses one end of a range of records: a number or a time.
pub(crate) fn bound(text: &str) -> Result<Bound, String> {
    if let Ok(position) = text.parse() {
        return Ok(Bound::LogPosition(LogPosition(position)));
    }
    time::parse(text, wall_ms()).map(Bound::Time).ok_or_else(|| {
        "write a record's number, a time such as 2026-11-21T03:00:00Z, or how long ago, such as 10m".to_owned()
    })
}

/// Parses a version or a time. The node of a version does not matter, since a store never assigns a
/// version twice.
pub(crate) fn moment(text: &str) -> Result<Moment, String> {
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
        return Ok(Moment::Version(Stamp { wall, counter }));
    }
    time::parse(text, wall_ms()).map(Moment::Time).ok_or_else(|| {
        "write a version such as 001696374425000:00001:StateStore, a time such as 2026-11-21T03:00:00Z, or how long ago, such as 10m".to_owned()
    })
}

/// Milliseconds since 1970 have had at least this many digits since January 1970.
const WALL_DIGITS_MIN: usize = 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_survive_json() {
        for bytes in [&b"plain \n"[..], b"", b"\xFF\0"] {
            assert_eq!(bytes_of(&json_bytes(bytes)).unwrap(), bytes);
        }
        assert_eq!(bytes_of(&json!(null)), None);
        assert_eq!(bytes_of(&json!({ "base64": "?" })), None);
    }

    #[test]
    fn versions_and_times_are_distinguished() {
        let version = |wall, counter| Ok(Moment::Version(Stamp { wall, counter }));
        assert_eq!(
            moment("001696374425000:00001:StateStore"),
            version(1_696_374_425_000, 1)
        );
        assert_eq!(moment("1696374425000:1"), version(1_696_374_425_000, 1));
        assert_eq!(moment("1696374425000:1:a:b"), version(1_696_374_425_000, 1));
        assert_eq!(moment("1970-01-01T00:00:01Z"), Ok(Moment::Time(1000)));
        assert!(matches!(moment("10m"), Ok(Moment::Time(_))));
        for wrong in [
            "12:30",
            "12:30:15",
            "1696374425000",
            "1696374425000:x",
            "",
            ":",
            "soon",
        ] {
            assert!(moment(wrong).is_err(), "{wrong}");
        }
    }
}
