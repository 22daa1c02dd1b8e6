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
use super::query::bytes;
use super::stream::{EventSink, event, event_stream};
use crate::past::json_bytes;
use statehouse_config::limits;
use statehouse_core::clock::Stamp;
use statehouse_core::store::Change;
use statehouse_server::{Read, Server};

/// A stream of the changes of keys with a prefix, from now on.
pub(super) fn stream(server: Arc<Server>, uri: &Uri) -> Result<Answer, Refusal> {
    let prefix = bytes(uri, "prefix")?;
    let (sink, answer) = event_stream();
    let mut follower = Follower {
        reached: server.last_change(),
        node: server.node(),
        server,
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
    server: Arc<Server>,
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

    /// The events since the last look. `None` if the changes are not durable in time, or the store
    /// stops.
    async fn look(&mut self) -> Option<Vec<Bytes>> {
        let mut events = Vec::new();
        for _ in 0..limits::ADMIN_CHANGES_TURNS_MAX {
            let Read { found, position } = self.server.changes_after(self.reached, &self.prefix);
            if !self.server.reach(position).await {
                return None;
            }
            let Some(changes) = found else { break };
            let room = limits::ADMIN_CHANGES_SENT_MAX - events.len();
            let is_too_much = changes.found.len() > room;
            let sent = changes.found.into_iter().take(room);
            events.extend(sent.map(|(change, client)| {
                event(
                    "change",
                    &change_json(&change, client.as_deref(), &self.node),
                )
            }));
            if is_too_much {
                break;
            }
            self.reached = changes.reached;
            if changes.are_all {
                return Some(events);
            }
        }
        self.reached = self.server.last_change();
        events.push(event("lost", &json!({})));
        Some(events)
    }
}

fn change_json(change: &Change, client: Option<&str>, node: &str) -> Json {
    json!({
        "key": json_bytes(change.key()),
        "kind": match change {
            Change::Set(_) => "set",
            Change::Deleted(..) => "deleted",
            Change::Expired(..) => "expired",
        },
        "version": change.version().display(node).to_string(),
        "client": client,
        "at": change.version().wall,
    })
}
