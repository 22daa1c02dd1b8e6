//! The differences and the totals of a replay, as JSON.

use serde_json::{Value as Json, json};

use super::{fence_json, json_bytes};
use crate::time::utc;
use statehouse_core::clock::Stamp;
use statehouse_core::store::{Entry, StoredPayload, Write};
use statehouse_offline::{Counts, Difference, Replayed, words};

/// A request whose replay has another result.
pub(crate) fn difference(it: &Difference<'_>, node: &str) -> Json {
    let version = |version: Option<Stamp>| version.map(|it| it.display(node).to_string());
    let writes = |writes: &[Write]| -> Vec<Json> {
        let writes = writes.iter().map(|it| write(it, node));
        writes.collect()
    };
    let arguments = words(it.payload).filter(|words| !words.is_empty());
    let payload = arguments.is_none().then(|| shown(it.payload));
    let arguments = arguments.map(|words| words.into_iter().map(shown).collect::<Vec<_>>());
    json!({
        "record": it.position.0,
        "time": utc(it.now_ms),
        "client": it.client,
        "request": arguments,
        // Of a request that is no list of words.
        "payload": payload,
        "recorded": {
            "answer": match it.answer {
                StoredPayload::Whole(bytes) => json_bytes(bytes),
                StoredPayload::Digest(digest) => json!({ "blake3": digest.to_hex().as_str() }),
            },
            "version": version(it.version),
            "writes": writes(it.writes),
        },
        "now": {
            "answer": json_bytes(&it.other.answer),
            "version": version(it.other.version),
            "writes": writes(&it.other.writes),
            "failure": it.other.failure,
        },
    })
}

pub(crate) fn write(write: &Write, node: &str) -> Json {
    let entry = write.entry();
    json!({
        "key": json_bytes(write.key()),
        "hidden": write.hidden,
        "event": match (entry, write.expired()) {
            (Some(_), _) => "set",
            (None, true) => "expired",
            (None, false) => "deleted",
        },
        "version": write.version().display(node).to_string(),
        "bytes": entry.map(|entry| entry.value().len()),
        "value": entry.map(|entry| shown(entry.value())),
        "fencing_token": entry.and_then(Entry::fence).map(|it| fence_json(&it)),
        "expires": entry.and_then(Entry::expires_ms).map(utc),
    })
}

/// The beginning of a word or a value.
fn shown(bytes: &[u8]) -> Json {
    json_bytes(statehouse_offline::shown(bytes))
}

pub(crate) fn summary(it: &Replayed) -> Json {
    let counts = |counts: &Counts| {
        json!({
            "same": counts.same,
            "different": counts.different,
            "not_comparable": counts.not_comparable,
        })
    };
    let commands = it.tally.commands.iter();
    let commands: serde_json::Map<String, Json> = commands
        .map(|(name, it)| (name.clone(), counts(it)))
        .collect();
    let has_records = it.from <= it.to;
    json!({
        "summary": counts(&it.tally.total),
        "commands": commands,
        "reasons": it.tally.reasons,
        "from": it.from.0,
        "to": has_records.then_some(it.to.0),
        "from_time": has_records.then(|| utc(it.times_ms.0)),
        "to_time": has_records.then(|| utc(it.times_ms.1)),
        "shortened": it.shortened,
        "damage": it.damage,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use statehouse_core::clock::Fence;
    use statehouse_core::store::Change;
    use statehouse_offline::Tally;
    use statehouse_wal::LogPosition;

    #[test]
    fn replay_of_no_record_has_no_end_and_no_times() {
        let nothing = Replayed {
            from: LogPosition(7),
            to: LogPosition(0),
            times_ms: (0, 0),
            shortened: true,
            damage: None,
            tally: Tally::default(),
        };
        let object = summary(&nothing);
        assert_eq!(object["from"], 7);
        for absent in ["to", "from_time", "to_time"] {
            assert!(object[absent].is_null(), "{absent}");
        }
    }

    #[test]
    fn long_text_stays_text() {
        let value = format!("a{}", "ä".repeat(4096));
        let entry = Entry::new(b"k", value.as_bytes(), Stamp::default(), None, None);
        let object = super::write(&Write::of(Change::Set(entry)), "StateStore");
        assert_eq!(object["bytes"], value.len());
        assert_eq!(object["value"], &value[..4095]);
        let binary = shown(&[0xff; 5000]);
        assert!(binary["base64"].is_string(), "{binary}");
    }

    #[test]
    fn a_write_in_json_has_its_token_unchanged() {
        let fence = Fence {
            wall: 7,
            counter: 1,
            node: "a\\b".into(),
        };
        let entry = Entry::new(b"k", b"v", Stamp::default(), Some(&fence), None);
        let write = Write::of(Change::Set(entry));
        let object = super::write(&write, "StateStore");
        assert_eq!(object["fencing_token"], "000000000000007:00001:a\\b");
    }
}
