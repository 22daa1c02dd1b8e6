//! One operation of a client: a request to the store, or a message to other clients.

use statehouse_core::clock::Stamp;
use statehouse_core::request::REQUEST_TOPIC;
use statehouse_tests::{Property, resp};
use statehouse_wal::simulation::Dice;

use crate::fault_plan::FaultPlan;
use crate::oracle::{Oracle, Records};
use crate::packet::Publish;

/// What a request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Set {
        px_ms: Option<u64>,
        nx: bool,
    },
    Get,
    /// Lists all keys.
    Scan,
    Delete,
    /// Deletes a key if it has the value of the operation with this number.
    DeleteIf(u64),
    /// A watch of a key, or of a prefix if the key begins with `*`.
    Watch,
    Unwatch,
    /// A watch of a prefix, from the last version that the client has.
    Follow(Option<Stamp>),
    /// A SET if the key has this version.
    SetIf(Stamp),
    Meta,
    /// A SET that the faulty policy accepts, or one at which it fails.
    Fault {
        fine: bool,
    },
    /// Writes a hidden key. Only the faulty policy knows this command.
    Hide,
}

impl Command {
    /// Whether it is not remembered, so a redelivery executes again.
    pub(crate) fn repeats(&self) -> bool {
        matches!(
            self,
            Self::Get | Self::Scan | Self::Meta | Self::Watch | Self::Follow(_)
        )
    }
}

/// The meaning of a PUBLISH.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    Request {
        key: String,
        command: Command,
    },
    Message {
        topic: String,
        retain: bool,
        empty: bool,
    },
}

/// A request that the host has just handled.
#[derive(Clone, Copy)]
pub(crate) struct Handled<'a> {
    pub(crate) who: usize,
    pub(crate) number: u64,
    pub(crate) key: &'a str,
    pub(crate) command: &'a Command,
    pub(crate) records: Records,
    /// Whether the disk was full.
    pub(crate) full: bool,
}

/// The fencing token of all requests for the fenced key.
pub(crate) const TOKEN: &str = "000000000000001:00000:lock";

/// The first number of a run with large values.
pub(crate) const LARGE: u64 = 1_000_000;

/// The value that a SET with this number writes. No two are equal. Large ones are below and above
/// the limit of captured reads.
pub(crate) fn value(number: u64) -> Vec<u8> {
    let digits = match number >= LARGE {
        true => [3_000, 9_000, 17_000][(number % 3) as usize],
        false => 0,
    };
    format!("v{number:0>digits$}").into_bytes()
}

/// Whether a request with this number asks that its record is flushed before its response is sent.
fn is_urgent(number: u64) -> bool {
    number.is_multiple_of(5)
}

impl Operation {
    /// Whether it changes the table if it is handled.
    pub(crate) fn writes(&self) -> bool {
        use Command::{Delete, DeleteIf, Fault, Hide, Set, SetIf};
        matches!(
            self,
            Self::Request {
                command: Set { .. } | SetIf(_) | Delete | DeleteIf(_) | Fault { .. } | Hide,
                ..
            }
        )
    }

    /// A request of a client.
    pub(crate) fn request(
        dice: &mut Dice,
        watches: bool,
        (plan, oracle): (&FaultPlan, &Oracle),
        number: u64,
    ) -> Self {
        // The last one is fenced.
        let key = ["k0", "k1", "k2", "f"][dice.below(4) as usize].to_owned();
        let px = plan.expiry;
        if plan.faulty && dice.once_in(3) {
            let key = format!("e{}", dice.below(2));
            let command = match dice.below(4) {
                0 | 1 => Command::Hide,
                which => Command::Fault { fine: which == 2 },
            };
            return Self::Request { key, command };
        }
        let (key, command) = match dice.below(16) {
            0..=3 => (
                key,
                Command::Set {
                    px_ms: None,
                    nx: dice.once_in(4),
                },
            ),
            4 | 5 if px => {
                // With the embedded broker, keys that expire are never watched: it is open when
                // their watchers are notified.
                let px_ms = Some([50, 2_000, 400_000][dice.below(3) as usize]);
                let key = match plan.foreign {
                    true => key,
                    false => format!("e{}", dice.below(2)),
                };
                (key, Command::Set { px_ms, nx: false })
            }
            6 if px => (format!("e{}", dice.below(2)), Command::Get),
            4..=7 => (key, Command::Get),
            8 => ("*".to_owned(), Command::Scan),
            9 => (key, Command::Delete),
            10 => {
                let back = 1 + dice.below(8);
                (key, Command::DeleteIf(number.saturating_sub(back)))
            }
            11 | 12 if watches => (watched(dice, key, plan), Command::Watch),
            13 if watches => (watched(dice, key, plan), Command::Unwatch),
            14 => (key, Command::Meta),
            15 => {
                let version = oracle.version(&key);
                (key, Command::SetIf(version))
            }
            _ => (
                key,
                Command::Set {
                    px_ms: None,
                    nx: false,
                },
            ),
        };
        Self::Request { key, command }
    }

    /// The PUBLISH of a client, without its packet id.
    pub(crate) fn publish(&self, client: &str, number: u64, qos: u8, now_ms: u64) -> Publish {
        match self {
            Self::Request { key, command } => {
                // The counter makes the timestamp unique.
                let count = number % 10_000;
                let mut publish = Publish::new(REQUEST_TOPIC, payload(key, command, number))
                    .qos(qos)
                    .with(Property::ResponseTopic(format!("r/{client}")))
                    .with(Property::CorrelationData(number.to_string().into_bytes()));
                let mut add = |name, value: &str| {
                    publish.properties.push(Property::user(name, value));
                };
                add("__protVer", "1.0");
                add("__ts", &format!("{now_ms:015}:{count:05}:{client}"));
                add("__srcId", client);
                if key.starts_with('f') {
                    add("__ft", TOKEN);
                }
                if is_urgent(number) {
                    add("aio-persistence", "true");
                }
                publish
            }
            Self::Message {
                topic,
                retain,
                empty,
            } => {
                let payload = match empty {
                    true => String::new(),
                    false => format!("m{number}"),
                };
                let publish = Publish::new(topic, payload).qos(qos);
                Publish {
                    retain: *retain,
                    ..publish
                }
            }
        }
    }
}

/// What a client watches. Behind a foreign broker it may be a prefix; with the embedded broker, the
/// clients of `followers.rs` watch a prefix.
fn watched(dice: &mut Dice, key: String, plan: &FaultPlan) -> String {
    match plan.foreign && dice.once_in(3) {
        true => "*k".to_owned(),
        false => key,
    }
}

/// Whether a watch reports the changes of a key.
pub(crate) fn covers(watched: &str, key: &str) -> bool {
    match watched.strip_prefix('*') {
        Some(prefix) => key.starts_with(prefix),
        None => watched == key,
    }
}

/// A version as a client sends it.
fn hlc(version: Stamp) -> Vec<u8> {
    format!("{}:{}:StateStore", version.wall, version.counter).into_bytes()
}

/// The value of [`Command::Fault`].
pub(crate) fn fault(fine: bool) -> Vec<u8> {
    let mode: &[u8] = if fine { b"fine" } else { b"panic" };
    mode.to_vec()
}

/// The payload of a request.
fn payload(key: &str, command: &Command, number: u64) -> Vec<u8> {
    let prefix = key.strip_prefix('*').filter(|it| !it.is_empty());
    let key = prefix.unwrap_or(key).as_bytes().to_vec();
    let mut words: Vec<Vec<u8>> = Vec::new();
    match command {
        Command::Set { px_ms, nx } => {
            words.extend([b"SET".to_vec(), key, value(number)]);
            if *nx {
                words.push(b"NX".to_vec());
            }
            if let Some(ms) = px_ms {
                words.extend([b"PX".to_vec(), ms.to_string().into_bytes()]);
            }
        }
        Command::Get => words.extend([b"GET".to_vec(), key]),
        Command::Scan => words.extend([b"SCAN".to_vec(), key]),
        Command::Delete => words.extend([b"DEL".to_vec(), key]),
        Command::DeleteIf(number) => words.extend([b"VDEL".to_vec(), key, value(*number)]),
        Command::Fault { fine } => words.extend([b"SET".to_vec(), key, fault(*fine)]),
        Command::Hide => words.extend([b"HIDE".to_vec(), key]),
        Command::Watch => words.extend([b"KEYNOTIFY".to_vec(), key]),
        Command::Unwatch => words.extend([b"KEYNOTIFY".to_vec(), key, b"STOP".to_vec()]),
        Command::Follow(since) => {
            words.extend([b"KEYNOTIFY".to_vec(), key]);
            words.extend((since.iter()).flat_map(|it| [b"FROM".to_vec(), hlc(*it)]));
        }
        Command::SetIf(version) => {
            words.extend([b"SET".to_vec(), key, value(number)]);
            words.extend([b"IFVERSION".to_vec(), hlc(*version)]);
        }
        Command::Meta => words.extend([b"META".to_vec(), key]),
    }
    if prefix.is_some() {
        words.push(b"PREFIX".to_vec());
    }
    resp::array(&words)
}
