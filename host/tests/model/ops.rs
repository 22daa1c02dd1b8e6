//! What may happen to a store, at random.

use proptest::prelude::*;
use proptest::sample::Index;

use crate::CLIENTS;
use crate::oracle::Reading;

/// A clock reading relative to the store's time.
#[derive(Clone, Debug)]
pub(crate) enum When {
    Never,
    Off(i64, u32, &'static str),
    Nonsense(&'static str),
}

impl When {
    pub(crate) fn at(&self, now_ms: u64) -> Option<Reading> {
        match self {
            Self::Never => None,
            Self::Off(ms, counter, node) => {
                let wall = now_ms.saturating_add_signed(*ms);
                Some(Reading::Clock(wall, *counter, node))
            }
            Self::Nonsense(text) => Some(Reading::Nonsense(text)),
        }
    }
}

/// How a request comes again.
#[derive(Clone, Copy, Debug)]
pub(crate) enum How {
    /// With DUP.
    Dup,
    /// With DUP and, from a broker in between, another packet identifier.
    DupElsewhere,
    /// Without DUP, first over a new connection.
    Resumed,
}

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Ask {
        client: usize,
        dialect: usize,
        words: Vec<&'static str>,
        timestamp: When,
        token: When,
    },
    Again(Index, How),
    /// The very same request, which is a new one.
    Repeat(Index),
    /// Or a sign that it did.
    Reconnect(usize),
    EndSession(usize),
    /// A notification for this key found nobody, behind a foreign broker.
    Unheard(usize, &'static str),
    Wait(u64),
    Swap,
    SnapshotPiece,
    Restart,
}

/// Options of SET that are none.
const SLIPS: &[&[&str]] = &[&["NX", "NEX"], &["XX"], &["NX", "NX"], &["PX"]];
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
];
const PATTERNS: &[&str] = &[
    "*", "a*", "?", "a?", "", "[a-c]", "[!a]", "[c-a]*", "[", "[a", "\\a", "a\\b", "*[]", "*[!]",
    "\\",
];
const MISCOUNTED: &[&[&str]] = &[
    &["GET"],
    &["GET", "a", "b"],
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
        1 => prop::sample::select(SLIPS).prop_map(<[_]>::to_vec),
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
        2 => key().prop_map(|key| vec!["del", key]),
        2 => (key(), value()).prop_map(|(key, value)| vec!["VDEL", key, value]),
        3 => (key(), stop).prop_map(|(key, stop)| [&["KEYNOTIFY", key], stop].concat()),
        1 => prop::sample::select(PATTERNS).prop_map(|pattern| vec!["SCAN", pattern]),
        1 => prop::sample::select(MISCOUNTED).prop_map(<[_]>::to_vec),
    ]
}

fn reading(usual: bool) -> impl Strategy<Value = When> {
    let node = || prop::sample::select(&["n", "m"][..]);
    let (often, never) = if usual { (12, 1) } else { (5, 12) };
    prop_oneof![
        often => (-1_000..1_000i64, 0..3u32, node()).prop_map(|(ms, counter, node)| When::Off(ms, counter, node)),
        1 => prop::sample::select(&[60_000i64, 60_001, 1_000_000, -100_000][..]).prop_map(|ms| When::Off(ms, 0, "n")),
        never => Just(When::Never),
        1 => prop::sample::select(&["", "1", "1:2", "1:2:", "a:1:n", "1:2:3:4", "-1:0:n", "1:4294967296:n"][..]).prop_map(When::Nonsense),
    ]
}

pub(crate) fn op() -> impl Strategy<Value = Op> {
    let how = prop::sample::select(&[How::Dup, How::DupElsewhere, How::Resumed][..]);
    prop_oneof![
        24 => (0..CLIENTS, 0..3usize, words(), reading(true), reading(false)).prop_map(
            |(client, dialect, words, timestamp, token)| Op::Ask { client, dialect, words, timestamp, token }
        ),
        8 => (any::<Index>(), how).prop_map(|(which, how)| Op::Again(which, how)),
        2 => any::<Index>().prop_map(Op::Repeat),
        1 => (0..CLIENTS).prop_map(Op::Reconnect),
        1 => (0..CLIENTS).prop_map(Op::EndSession),
        1 => (0..CLIENTS, prop::sample::select(&["a", "b"][..])).prop_map(|(client, key)| Op::Unheard(client, key)),
        3 => prop::sample::select(&[0u64, 1, 99, 1_000, 30_000, 61_000, 700_000][..]).prop_map(Op::Wait),
        1 => Just(Op::Swap),
        3 => Just(Op::SnapshotPiece),
        2 => Just(Op::Restart),
    ]
}
