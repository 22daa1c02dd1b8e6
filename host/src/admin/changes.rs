//! The changes of keys as they happen, for operators.
//!
//! A stream looks at the store's last changes some times per second, so a request does no work for
//! it. A stream that cannot follow skips changes, and says so by the event `lost`.

use std::sync::Arc;

use bytes::Bytes;
use hyper::Uri;
use serde_json::{Value as Json, json};
use tokio::time::sleep;

use super::answer::{Answer, Refusal};
use super::api::Api;
use super::query::bytes;
use super::stream::{EventSink, event, event_stream};
use crate::past::json_bytes;
use statehouse_config::limits;
use statehouse_core::clock::Stamp;
use statehouse_core::store::Change;
use statehouse_server::Read;

/// A stream of the changes of keys with a prefix, from now on.
pub(super) async fn stream(api: Arc<Api>, uri: &Uri) -> Result<Answer, Refusal> {
    let prefix = bytes(uri, "prefix")?;
    api.sources().check_lease().await?;
    let server = &api.sources().server;
    let (sink, answer) = event_stream();
    let mut follower = Follower {
        reached: server.last_change(),
        node: server.node(),
        api,
        prefix,
    };
    tokio::spawn(async move {
        while follower.send(&sink).await {
            tokio::select! {
                () = sleep(limits::ADMIN_CHANGES_INTERVAL) => {}
                () = sink.ended() => return,
            }
        }
    });
    Ok(answer)
}

/// Follows the changes of keys.
struct Follower {
    api: Arc<Api>,
    node: String,
    prefix: Vec<u8>,
    /// The version up to which changes were sent.
    reached: Stamp,
}

impl Follower {
    /// Sends what changed since the last look. False if the stream has ended.
    async fn send(&mut self, sink: &EventSink) -> bool {
        let Some(events) = self.look().await else {
            return false;
        };
        for event in events {
            if !sink.send(event).await {
                return false;
            }
        }
        true
    }

    /// The events since the last look. `None` if the changes are not durable in time, the store
    /// stops, or this host does not reach the log of its cluster. Another host may lead then, and a
    /// stream without changes would hide that.
    async fn look(&mut self) -> Option<Vec<Bytes>> {
        let sources = self.api.sources();
        if !sources.reaches_log() {
            return None;
        }
        let server = &sources.server;
        let mut events = Events::default();
        'turns: for _ in 0..limits::ADMIN_CHANGES_TURNS_MAX {
            let Read { found, position } = server.changes_after(self.reached, &self.prefix);
            if !server.reach(position).await {
                return None;
            }
            let Some(changes) = found else { break };
            let now_ms = server.now_ms();
            for (change, client) in changes.found {
                let document = change_json(&change, client.as_deref(), &self.node, now_ms);
                if !events.push(event("change", &document)) {
                    break 'turns;
                }
            }
            self.reached = changes.reached;
            if changes.are_all {
                return Some(events.all);
            }
        }
        self.reached = server.last_change();
        events.all.push(event("lost", &json!({})));
        Some(events.all)
    }
}

/// The events of one look, limited in number and bytes.
#[derive(Default)]
struct Events {
    all: Vec<Bytes>,
    bytes: usize,
}

impl Events {
    /// Adds an event. False if there is no room for it.
    fn push(&mut self, event: Bytes) -> bool {
        self.bytes += event.len();
        let has_room = self.all.len() < limits::ADMIN_CHANGES_SENT_MAX
            && self.bytes <= limits::ADMIN_CHANGES_BYTES_MAX;
        if has_room {
            self.all.push(event);
        }
        has_room
    }
}

/// A change that happened before `now_ms`, in milliseconds of the store's time.
fn change_json(change: &Change, client: Option<&str>, node: &str, now_ms: u64) -> Json {
    json!({
        "key": json_bytes(change.key()),
        "kind": match change {
            Change::Set(_) => "set",
            Change::Deleted(..) => "deleted",
            Change::Expired(..) => "expired",
        },
        "version": change.version().display(node).to_string(),
        "client": client,
        "bytes": match change {
            Change::Set(entry) => Some(entry.value().len()),
            Change::Deleted(..) | Change::Expired(..) => None,
        },
        // A version may be ahead of the store's time.
        "at": change.version().wall.min(now_ms),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use statehouse_core::store::Key;

    /// Regression: a hundred changes of long keys took megabytes for each stream.
    #[test]
    fn events_of_one_look_are_limited_in_number_and_bytes() {
        let count_of = |bytes: usize| {
            let event = Bytes::from(vec![b'x'; bytes]);
            let mut events = Events::default();
            while events.push(event.clone()) {}
            events.all.len()
        };
        assert_eq!(count_of(1), limits::ADMIN_CHANGES_SENT_MAX);
        assert_eq!(count_of(limits::ADMIN_CHANGES_BYTES_MAX / 3), 3);
    }

    #[test]
    fn change_is_never_in_the_future() {
        let at = |wall: u64| {
            let key = Key::from_static(b"k");
            let change = Change::Deleted(key, Stamp { wall, counter: 0 });
            change_json(&change, None, "StateStore", 1_000)["at"].clone()
        };
        assert_eq!((at(900), at(61_000)), (json!(900), json!(1_000)));
    }
}
