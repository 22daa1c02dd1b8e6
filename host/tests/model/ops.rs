//! The random operations of a case.

use proptest::prelude::*;
use proptest::sample::Index;

use crate::CLIENTS;
use crate::oracle::Reading;

/// A clock reading relative to the time of the store.
#[derive(Clone, Debug)]
pub(crate) enum RelativeReading {
    Absent,
    Offset(i64, u32, &'static str),
    Malformed(&'static str),
}

impl RelativeReading {
    pub(crate) fn at(&self, now_ms: u64) -> Option<Reading> {
        match self {
            Self::Absent => None,
            Self::Offset(ms, counter, node) => {
                let wall = now_ms.saturating_add_signed(*ms);
                Some(Reading::Clock(wall, *counter, node))
            }
            Self::Malformed(text) => Some(Reading::Malformed(text)),
        }
    }
}

/// How a request is redelivered.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Redelivery {
    /// With DUP and the same packet identifier.
    Dup,
    /// With DUP and the packet identifier of an intermediate broker.
    DupNewPacketId,
    /// Without DUP, over a new connection.
    NewConnection,
}

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Request {
        client: usize,
        dialect: usize,
        words: Vec<&'static str>,
        timestamp: RelativeReading,
        token: RelativeReading,
    },
    Redeliver(Index, Redelivery),
    /// A new request that is identical to an earlier one.
    SendIdentical(Index),
    /// A client reconnects, or a foreign broker reports that it disconnected.
    Reconnect(usize),
    EndSession(usize),
    /// A foreign broker could not deliver a notification of this key to this client.
    Undeliverable(usize, &'static str),
    /// A client watches a key or prefix from the version of an earlier change, in a dialect.
    CatchUp(usize, usize, bool, &'static str, Index),
    Wait(u64),
    SwapPolicy,
    SnapshotBlock,
    Restart,
}

/// A word that stands for the version of the request's key.
pub(crate) const VERSION_OF_KEY: &str = "VERSION-OF-KEY";

const INVALID_SET_OPTIONS: &[&[&str]] = &[
    &["NX", "NEX"],
    &["XX"],
    &["NX", "NX"],
    &["PX"],
    &["IFVERSION"],
    &["IFVERSION", "1:0"],
    &["NX", "IFVERSION", "1:0:n"],
];
const KEYNOTIFY_OPTIONS: &[&[&str]] = &[
    &[],
    &[],
    &[],
    &["STOP"],
    &["get"],
    &["get"],
    &["GET", "stop"],
    &["FOO"],
    &["STOP", "STOP"],
    &["PREFIX"],
    &["prefix"],
    &["GET", "PREFIX"],
    &["PREFIX", "STOP"],
    &["stop", "get", "prefix"],
    &["PREFIX", "PREFIX"],
];
const PATTERNS: &[&str] = &[
    "*", "a*", "?", "a?", "", "[a-c]", "[!a]", "[c-a]*", "[", "[a", "\\a", "a\\b", "*[]", "*[!]",
    "\\",
];
const WRONG_ARGUMENT_COUNTS: &[&[&str]] = &[
    &["GET"],
    &["GET", "a", "b"],
    &["META", "a", "b"],
    &["DEL"],
    &["FOO", "a"],
    &["SET", "a"],
    &["VDEL", "a"],
];

fn words() -> impl Strategy<Value = Vec<&'static str>> {
    let key = || prop::sample::select(&["a", "a", "a", "b", "b", "c", "ab", "d", "e", ""][..]);
    let value = || prop::sample::select(&["", "1", "2", "\r\n", "NX"][..]);
    let ms = prop::sample::select(
        &[
            "1",
            "100",
            "5000",
            "70000",
            "9223372036854775807",
            "0",
            "-1",
            "1.5",
        ][..],
    );
    let condition = prop_oneof![
        4 => Just(vec![]),
        1 => Just(vec!["NX"]),
        1 => Just(vec!["NEX"]),
        1 => value().prop_map(|value| vec!["nex", value]),
        2 => prop::sample::select(&[VERSION_OF_KEY, "1:0:n"][..])
            .prop_map(|version| vec!["ifversion", version]),
        1 => prop::sample::select(INVALID_SET_OPTIONS).prop_map(<[_]>::to_vec),
    ];
    let expiry = prop_oneof![3 => Just(vec![]), 2 => ms.prop_map(|ms| vec!["px", ms])];
    let set = (key(), value(), condition, expiry, any::<bool>()).prop_map(
        |(key, value, condition, expiry, swap)| {
            let options = if swap {
                [expiry, condition]
            } else {
                [condition, expiry]
            };
            [vec!["SET", key, value], options.concat()].concat()
        },
    );
    let stop = prop::sample::select(KEYNOTIFY_OPTIONS);
    prop_oneof![
        8 => set,
        3 => key().prop_map(|key| vec!["GET", key]),
        2 => key().prop_map(|key| vec!["META", key]),
        2 => key().prop_map(|key| vec!["del", key]),
        2 => (key(), value()).prop_map(|(key, value)| vec!["VDEL", key, value]),
        3 => (key(), stop).prop_map(|(key, stop)| [&["KEYNOTIFY", key], stop].concat()),
        1 => prop::sample::select(PATTERNS).prop_map(|pattern| vec!["SCAN", pattern]),
        1 => prop::sample::select(WRONG_ARGUMENT_COUNTS).prop_map(<[_]>::to_vec),
    ]
}

/// A clock reading. With `usual`, nearly every request has one.
fn reading(usual: bool) -> impl Strategy<Value = RelativeReading> {
    let node = || prop::sample::select(&["n", "m"][..]);
    let (often, never) = if usual { (12, 1) } else { (5, 12) };
    prop_oneof![
        often => (-1_000..1_000i64, 0..3u32, node()).prop_map(|(ms, counter, node)| RelativeReading::Offset(ms, counter, node)),
        1 => prop::sample::select(&[60_000i64, 60_001, 1_000_000, -100_000][..]).prop_map(|ms| RelativeReading::Offset(ms, 0, "n")),
        never => Just(RelativeReading::Absent),
        1 => prop::sample::select(&["", "1", "1:2", "1:2:", "a:1:n", "1:2:3:4", "-1:0:n", "1:4294967296:n"][..]).prop_map(RelativeReading::Malformed),
    ]
}

pub(crate) fn op() -> impl Strategy<Value = Op> {
    let redelivery = prop::sample::select(
        &[
            Redelivery::Dup,
            Redelivery::DupNewPacketId,
            Redelivery::NewConnection,
        ][..],
    );
    prop_oneof![
        24 => (0..CLIENTS, 0..3usize, words(), reading(true), reading(false)).prop_map(
            |(client, dialect, words, timestamp, token)| Op::Request { client, dialect, words, timestamp, token }
        ),
        8 => (any::<Index>(), redelivery).prop_map(|(which, redelivery)| Op::Redeliver(which, redelivery)),
        2 => any::<Index>().prop_map(Op::SendIdentical),
        1 => (0..CLIENTS).prop_map(Op::Reconnect),
        1 => (0..CLIENTS).prop_map(Op::EndSession),
        1 => (0..CLIENTS, prop::sample::select(&["a", "b"][..])).prop_map(|(client, key)| Op::Undeliverable(client, key)),
        3 => prop::sample::select(&[0u64, 1, 99, 1_000, 30_000, 61_000, 700_000][..]).prop_map(Op::Wait),
        3 => (0..CLIENTS, 0..2usize, any::<bool>(), prop::sample::select(&["a", "ab", "b"][..]), any::<Index>()).prop_map(
            |(client, dialect, is_prefix, key, since)| Op::CatchUp(client, dialect, is_prefix, key, since)
        ),
        1 => Just(Op::SwapPolicy),
        3 => Just(Op::SnapshotBlock),
        2 => Just(Op::Restart),
    ]
}
