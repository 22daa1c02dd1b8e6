//! The way out: production's outbox between the store and what clients see, and its way into the log.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use statehouse::server::ResponseGate;
use statehouse::transport::{Outbound, Transport};
use statehouse_core::clock::Stamp;
use statehouse_core::log::{Journal, LogPosition};
use statehouse_core::store::Effects;
use statehouse_mqtt::{Message, QoS};
use statehouse_wal::{Log, Room};

use crate::client::{Arrival, Said};

/// The log as the recorder sees it.
pub(crate) struct OnLog(pub(crate) Arc<Log>);

impl Journal for OnLog {
    fn keeps(&self) -> bool {
        true
    }

    fn append(&self, records: &[&[u8]], urgent: bool) -> LogPosition {
        let appended = match urgent {
            true => self.0.append_urgent(records),
            false => self.0.append(records),
        };
        appended.expect("small records")
    }

    fn released(&self) -> LogPosition {
        self.0.released()
    }

    fn persisted(&self, _urgent: bool) -> &'static str {
        "disk"
    }

    fn has_room(&self) -> bool {
        self.0.room() == Room::Plenty
    }

    fn promise(&self) -> String {
        String::new()
    }
}

/// An answer on its way.
pub(crate) struct Out {
    /// The last record that it tells of: that must be durable before.
    pub(crate) rests_on: u64,
    /// The store's clock, where it promised anything about it.
    pub(crate) clock: Stamp,
    pub(crate) client: usize,
    pub(crate) session: u64,
    pub(crate) lane: u64,
    /// What the request came over: there its PUBACK goes.
    pub(crate) connection: u64,
    pub(crate) id: u64,
    pub(crate) copy: u32,
    pub(crate) owed: bool,
    /// It is to be on disk, whatever the mode.
    pub(crate) urgent: bool,
    pub(crate) said: Said,
}

enum Waiting {
    Answer(Box<Out>),
    Acknowledgement {
        client: usize,
        session: u64,
        connection: u64,
        id: u64,
        copy: u32,
    },
    Notification {
        record: u64,
        heard: Heard,
    },
}

/// A client hears of a change, of which no two have the same version.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Heard {
    pub(crate) client: Arc<str>,
    pub(crate) version: Stamp,
}

/// What left.
pub(crate) struct Left {
    /// What holds from now on, whatever happens to the machine.
    pub(crate) floor: u64,
    pub(crate) told: Stamp,
    /// For which client, over which session and connection.
    pub(crate) arrival: Option<(usize, u64, u64, Arrival)>,
    pub(crate) heard: Option<Heard>,
}

/// The outbox and what is in it. It is given numbers to carry, and says in which order they may go.
#[derive(Default)]
pub(crate) struct Exit {
    gate: ResponseGate,
    waiting: BTreeMap<u64, (u64, Waiting)>,
    next: u64,
    /// The last number that left, by connection.
    left: HashMap<u64, u64>,
}

/// Takes down what the outbox lets go.
#[derive(Default)]
struct Notebook(Mutex<Vec<u64>>);

impl Transport for Notebook {
    fn deliver(&self, ready: &mut dyn FnMut(&mut Vec<Outbound>)) {
        let mut out = Vec::new();
        loop {
            ready(&mut out);
            if out.is_empty() {
                break;
            }
            for out in out.drain(..) {
                let Outbound::Response(message, _) = out else {
                    panic!("nothing else is put in");
                };
                let number = message.payload[..].try_into().expect("a number");
                self.0
                    .lock()
                    .expect("one thread")
                    .push(u64::from_be_bytes(number));
            }
        }
    }
}

impl Exit {
    /// Queues what a step leads to, in the order of production: what had expired, the answer, the notifications, the
    /// PUBACK. Returns how many notifications.
    pub(crate) fn push(
        &mut self,
        position: LogPosition,
        effects: &Effects,
        record: u64,
        out: Option<Out>,
    ) -> u64 {
        let mut all = Vec::new();
        let tell = |notices: &[statehouse_core::store::Notification],
                    all: &mut Vec<(u64, Waiting)>| {
            for notice in notices {
                all.extend(notice.to.iter().map(|(peer, _)| {
                    let heard = Heard {
                        client: peer.client.clone(),
                        version: notice.version,
                    };
                    (peer.connection, Waiting::Notification { record, heard })
                }));
            }
        };
        tell(&effects.expired, &mut all);
        let acknowledgement = out.as_ref().map(|out| {
            let settle = Waiting::Acknowledgement {
                client: out.client,
                session: out.session,
                connection: out.connection,
                id: out.id,
                copy: out.copy,
            };
            (out.lane, settle)
        });
        let answer = out.map(|out| (out.lane, Waiting::Answer(Box::new(out))));
        all.extend(answer);
        tell(&effects.notifications, &mut all);
        let count = all.len() as u64;
        all.extend(acknowledgement);
        let numbered = all.into_iter().map(|(lane, waiting)| {
            self.next += 1;
            self.waiting.insert(self.next, (lane, waiting));
            let number = self.next.to_be_bytes().to_vec();
            let message = Message::new("out", number, QoS::AtLeastOnce);
            (lane, Outbound::Response(message, None))
        });
        self.gate.push(position, 0, numbered);
        count
    }

    /// The answers to a request count no more: it is a new one.
    pub(crate) fn forget(&mut self, request: u64) {
        for (_, waiting) in self.waiting.values_mut() {
            if let Waiting::Answer(out) = waiting
                && out.id == request
            {
                out.owed = false;
            }
        }
    }

    /// Lets go what may go by now, and checks that it may.
    pub(crate) fn release(
        &mut self,
        released: LogPosition,
        durable: u64,
        always: bool,
    ) -> Vec<Left> {
        let notebook = Notebook::default();
        self.gate.release(released, &notebook);
        let mut left = Vec::new();
        for number in notebook.0.into_inner().expect("one thread") {
            let (lane, waiting) = self.waiting.remove(&number).expect("it leaves once");
            let before = self.left.insert(lane, number).unwrap_or(0);
            assert!(before < number, "out of order for connection {lane}");
            left.push(go(waiting, durable, always));
        }
        left
    }
}

fn go(waiting: Waiting, durable: u64, always: bool) -> Left {
    let nothing = Left {
        floor: 0,
        told: Stamp::default(),
        arrival: None,
        heard: None,
    };
    match waiting {
        Waiting::Notification { record, heard } if always => {
            assert!(
                record <= durable,
                "told of record {record}, durable is {durable}"
            );
            Left {
                floor: record,
                told: heard.version,
                heard: Some(heard),
                ..nothing
            }
        }
        Waiting::Notification { heard, .. } => Left {
            heard: Some(heard),
            ..nothing
        },
        Waiting::Acknowledgement {
            client,
            session,
            connection,
            id,
            copy,
        } => Left {
            arrival: Some((
                client,
                session,
                connection,
                Arrival::Acknowledgement { id, copy },
            )),
            ..nothing
        },
        Waiting::Answer(out) => {
            let Out {
                id,
                owed,
                said,
                rests_on,
                ..
            } = *out;
            let promised = always || out.urgent;
            if promised {
                assert!(
                    rests_on <= durable,
                    "{id} left on {rests_on}, durable is {durable}"
                );
            }
            let version = said.1.unwrap_or_default();
            let arrival = Arrival::Answer { id, owed, said };
            Left {
                floor: if promised { rests_on } else { 0 },
                told: match (always, promised) {
                    (true, _) => out.clock.max(version),
                    (false, true) => version,
                    _ => Stamp::default(),
                },
                arrival: Some((out.client, out.session, out.connection, arrival)),
                heard: None,
            }
        }
    }
}
