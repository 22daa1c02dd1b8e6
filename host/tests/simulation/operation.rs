//! The operations of a step, to compare with its records. Recovery reads only a part of each
//! record, so this comparison also covers the parts that only history and replays read.

use statehouse_core::clock::Stamp;
use statehouse_core::log::record::{self, Record};
use statehouse_core::request::Request;
use statehouse_core::store::{Effects, Handled, Swept, WatchChanges, Write};

/// The operation that one record describes.
pub(crate) enum Operation {
    Swept {
        now_ms: u64,
        clock: Stamp,
        writes: Vec<Write>,
    },
    Watches(WatchChanges),
    Handled {
        client: String,
        payload: Vec<u8>,
        timestamp: Option<String>,
        token: Option<String>,
        repeatable: bool,
        clock: Stamp,
        writes: Vec<Write>,
    },
}

/// The writes without the positions of keys and values in the payload. A decoded record does
/// not have them.
fn without_positions(writes: &[Write]) -> Vec<Write> {
    let mut writes = writes.to_vec();
    for write in &mut writes {
        (write.key_at, write.value_at) = (None, None);
    }
    writes
}

impl Operation {
    /// The operations of a step in the order of their records.
    pub(crate) fn of(request: Option<&Request<'_>>, effects: &Effects) -> Vec<Self> {
        let swept = effects.swept.as_ref().map(Self::swept);
        let watches = effects.watches.as_deref().cloned().map(Self::Watches);
        let handled = effects.handled.as_ref().zip(request);
        let handled = handled.map(|(handled, request)| Self::handled(request, handled));
        swept.into_iter().chain(watches).chain(handled).collect()
    }

    fn swept(it: &Swept) -> Self {
        Self::Swept {
            now_ms: it.now_ms,
            clock: it.clock,
            writes: without_positions(&it.writes),
        }
    }

    fn handled(request: &Request<'_>, it: &Handled) -> Self {
        Self::Handled {
            client: request.peer.client.to_string(),
            payload: request.payload.to_vec(),
            timestamp: request.timestamp.map(str::to_owned),
            token: request.fencing_token.map(str::to_owned),
            repeatable: it.repeatable,
            clock: it.clock,
            writes: without_positions(&it.writes),
        }
    }

    /// Checks that a record describes the operation.
    pub(crate) fn check(operation: Option<&Self>, position: u64, record: &[u8]) {
        let record = record::read(record).expect("the store wrote this record");
        match (operation, &record) {
            (
                Some(Self::Swept {
                    now_ms,
                    clock,
                    writes,
                }),
                Record::Swept {
                    now_ms: found_ms,
                    clock: found_clock,
                    writes: found,
                },
            ) => {
                assert_eq!((now_ms, clock, writes), (found_ms, found_clock, found));
            }
            (
                Some(Self::Handled {
                    client,
                    payload,
                    timestamp,
                    token,
                    repeatable,
                    clock,
                    writes,
                }),
                Record::Handled(found),
            ) => {
                assert_eq!((&client[..], &payload[..]), (found.client, found.payload));
                let texts = (timestamp.as_deref(), token.as_deref());
                assert_eq!(texts, (found.timestamp, found.fencing_token));
                assert_eq!((*repeatable, *clock), (found.repeatable, found.clock));
                assert_eq!(*writes, found.writes, "at {position}");
            }
            (Some(Self::Watches(changes)), Record::Watches(found)) => assert_eq!(changes, found),
            (
                None,
                Record::Started { .. }
                | Record::Stopped { .. }
                | Record::Policy(_)
                | Record::Assignment(_)
                | Record::Sessions(_)
                | Record::ReceiveMax { .. },
            ) => {}
            (_, record) => panic!("record {position} does not match its operation: {record:?}"),
        }
    }
}
