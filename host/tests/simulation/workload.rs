//! The random requests of a run.

use bytes::Bytes;
use statehouse_core::request::{Dialect, PREVIEW_TOPIC, REQUEST_TOPIC};
use statehouse_core::store::Key;
use statehouse_mqtt::{Properties, PropertiesBuilder};
use statehouse_wal::simulation::Dice;

/// The kinds of requests in a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Workload {
    pub(crate) keys: u64,
    /// Whether values have several kilobytes, so that a snapshot has many blocks.
    pub(crate) large_values: bool,
    /// One of so many requests carries a fencing token.
    pub(crate) fencing_once_in: u64,
    /// Whether a new request may be identical to an earlier one.
    pub(crate) identical_requests: bool,
    /// Whether to use the policy that fails on request, and commands that only it knows.
    pub(crate) faulty_policy: bool,
    /// Whether there are many watches, and many keys that expire soon.
    pub(crate) many_watches: bool,
}

/// A request without its packet identifier and delivery state.
#[derive(Clone)]
pub(crate) struct NewRequest {
    pub(crate) topic: &'static str,
    pub(crate) payload: Bytes,
    pub(crate) properties: Properties,
    /// The beginning of the command, for the trace.
    pub(crate) summary: String,
    pub(crate) subject: ReadSubject,
}

/// The part of the state that the answer to a read describes, unless it is an error.
#[derive(Clone)]
pub(crate) enum ReadSubject {
    Key(Key),
    /// The client's watch of a key.
    Watch(Key),
    All,
    Nothing,
}

impl ReadSubject {
    fn of(words: &[String]) -> Self {
        match &words[0][..] {
            "GET" | "SET" | "DEL" | "VDEL" => Self::Key(Key::from(words[1].clone())),
            "KEYNOTIFY" => Self::Watch(Key::from(words[1].clone())),
            "SCAN" => Self::All,
            _ => Self::Nothing,
        }
    }
}

impl NewRequest {
    pub(crate) fn random(
        client: &str,
        id: u64,
        now_ms: u64,
        workload: Workload,
        dice: &mut Dice,
    ) -> Self {
        let words = command(id, workload, dice);
        let dialect = match dice.below(6) {
            0 => Dialect::Documents,
            1 => Dialect::Preview,
            _ => Dialect::Sdk,
        };
        let properties = properties(client, id, now_ms, dialect, workload, dice);
        let arguments: Vec<&[u8]> = words.iter().map(String::as_bytes).collect();
        let payload = statehouse_policy::resp::request(&arguments).into();
        let topic = match dialect {
            Dialect::Preview => PREVIEW_TOPIC,
            _ => REQUEST_TOPIC,
        };
        let mut summary = words.join(" ");
        summary.truncate(60);
        Self {
            topic,
            payload,
            properties,
            summary,
            subject: ReadSubject::of(&words),
        }
    }
}

/// A random command and its arguments.
fn command(id: u64, workload: Workload, dice: &mut Dice) -> Vec<String> {
    let key = format!("key {}", dice.below(workload.keys));
    let value = |dice: &mut Dice| match dice.below(4) {
        0 => format!("value {}", dice.below(3)),
        _ if workload.large_values => {
            // Just below and just above the limit for captured reads.
            let bytes = [14_000, 9_000, 17_000][dice.below(3) as usize];
            format!("{id:04}").repeat(bytes / 4)
        }
        _ => format!("value of {id}"),
    };
    let set_below = if workload.large_values { 12 } else { 10 };
    let mut words: Vec<String> = match dice.below(20) {
        kind if kind < set_below => {
            let mut words = vec!["SET".into(), key, value(dice)];
            match dice.below(6) {
                0 => words.push("NX".into()),
                1 => words.push("NEX".into()),
                2 => words.extend(["NEX".into(), value(dice)]),
                _ => {}
            }
            if dice.once_in(3) {
                let ms = [1, 50, 1_000, 30_000, 400_000][dice.below(5) as usize];
                words.extend(["PX".into(), ms.to_string()]);
            }
            words
        }
        10..=12 => vec!["GET".into(), key],
        13 | 14 => vec!["DEL".into(), key],
        15 | 16 => vec!["VDEL".into(), key, value(dice)],
        17 => vec!["KEYNOTIFY".into(), key],
        18 => vec!["KEYNOTIFY".into(), key, "STOP".into()],
        _ => vec!["SCAN".into(), "key *".into()],
    };
    if workload.faulty_policy && dice.once_in(2) {
        let key = format!("key {}", dice.below(workload.keys));
        words = match dice.below(4) {
            0 => vec!["SET".into(), key, "panic".into()],
            1 => vec!["SET".into(), key, "fine".into()],
            _ => vec!["HIDE".into(), key],
        };
    }
    if workload.many_watches && dice.once_in(2) {
        let key = format!("key {}", dice.below(workload.keys));
        words = match dice.below(3) {
            0 => vec!["SET".into(), key, "v".into(), "PX".into(), "50".into()],
            _ => vec!["KEYNOTIFY".into(), key],
        };
    }
    words
}

/// Random MQTT properties of a request: some without a timestamp, or with one that the store
/// refuses.
fn properties(
    client: &str,
    id: u64,
    now_ms: u64,
    dialect: Dialect,
    workload: Workload,
    dice: &mut Dice,
) -> Properties {
    let mut properties = PropertiesBuilder::new()
        .response_topic(&format!("answers/{client}"))
        .correlation_data(&id.to_be_bytes());
    if dialect == Dialect::Sdk {
        properties = properties.user("__protVer", "1.0");
    }
    let mut add_reading = |name, wall: u64, dice: &mut Dice| {
        let reading = format!("{wall:015}:{:05}:{client}", dice.below(3));
        properties = std::mem::take(&mut properties).user(name, &reading);
    };
    if !dice.once_in(30) {
        let wall = match dice.below(20) {
            0 => now_ms + 61_000,
            1 => now_ms + 59_000,
            2 => now_ms.saturating_sub(1_000_000),
            _ => now_ms + dice.below(2_000) - 1_000,
        };
        add_reading(dialect.version_property(), wall, dice);
    }
    if dice.once_in(workload.fencing_once_in) {
        add_reading(
            dialect.fencing_property(),
            now_ms + dice.below(1_000) - 500,
            dice,
        );
    }
    if dice.once_in(5) {
        properties = properties.user("aio-persistence", "true");
    }
    let properties = properties.finish().expect("short properties");
    Properties::parse(properties).expect("valid properties")
}
