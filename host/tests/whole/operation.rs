//! One operation of a client: a request to the store, or a message to other clients.

use statehouse_core::request::REQUEST_TOPIC;
use statehouse_wal::simulation::Dice;

use crate::packet::Publish;

/// What a request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    Set { px_ms: Option<u64>, nx: bool },
    Get,
    Delete,
    DeleteIf(Vec<u8>),
    Watch,
    Unwatch,
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

/// The value that a SET with this number writes. No two are equal.
pub(crate) fn value(number: u64) -> Vec<u8> {
    format!("v{number}").into_bytes()
}

impl Operation {
    /// Whether it changes the table if it is handled.
    pub(crate) fn writes(&self) -> bool {
        use Command::{Delete, DeleteIf, Set};
        matches!(
            self,
            Self::Request {
                command: Set { .. } | Delete | DeleteIf(_),
                ..
            }
        )
    }

    /// A request of a client.
    pub(crate) fn request(dice: &mut Dice, watches: bool, px: bool, number: u64) -> Self {
        let key = format!("k{}", dice.below(4));
        let (key, command) = match dice.below(14) {
            0..=3 => (
                key,
                Command::Set {
                    px_ms: None,
                    nx: dice.once_in(4),
                },
            ),
            4 | 5 if px => {
                // Keys that expire are never watched: it is open when their watchers learn of it.
                let px_ms = Some([50, 2_000, 400_000][dice.below(3) as usize]);
                (
                    format!("e{}", dice.below(2)),
                    Command::Set { px_ms, nx: false },
                )
            }
            6 if px => (format!("e{}", dice.below(2)), Command::Get),
            4..=8 => (key, Command::Get),
            9 => (key, Command::Delete),
            10 => {
                let back = 1 + dice.below(8);
                (key, Command::DeleteIf(value(number.saturating_sub(back))))
            }
            11 | 12 if watches => (key, Command::Watch),
            13 if watches => (key, Command::Unwatch),
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
            Self::Request { key, command } => Publish {
                topic: REQUEST_TOPIC.to_owned(),
                payload: resp(key, command, number),
                qos,
                response_topic: Some(format!("r/{client}")),
                correlation: Some(number.to_string().into_bytes()),
                user: vec![
                    ("__protVer".into(), "1.0".into()),
                    ("__ts".into(), format!("{now_ms:015}:00000:{client}")),
                    ("__srcId".into(), client.into()),
                ],
                ..Publish::default()
            },
            Self::Message {
                topic,
                retain,
                empty,
            } => Publish {
                topic: topic.clone(),
                payload: match empty {
                    true => Vec::new(),
                    false => format!("m{number}").into_bytes(),
                },
                qos,
                retain: *retain,
                ..Publish::default()
            },
        }
    }
}

fn resp(key: &str, command: &Command, number: u64) -> Vec<u8> {
    let key = key.as_bytes().to_vec();
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
        Command::Delete => words.extend([b"DEL".to_vec(), key]),
        Command::DeleteIf(value) => words.extend([b"VDEL".to_vec(), key, value.clone()]),
        Command::Watch => words.extend([b"KEYNOTIFY".to_vec(), key]),
        Command::Unwatch => words.extend([b"KEYNOTIFY".to_vec(), key, b"STOP".to_vec()]),
    }
    let mut out = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        out.extend(format!("${}\r\n", word.len()).into_bytes());
        out.extend(word);
        out.extend(b"\r\n");
    }
    out
}
