//! Requests whose responses have not left, with what is measured of them.

use std::collections::VecDeque;
use std::sync::Arc;

use super::timing::Timed;
use crate::traces::Trace;
use statehouse_config::limits;
use statehouse_core::store::{Effects, RestsOn};
use statehouse_protocol::Shown;

/// Requests whose responses have not left, in the order in which they leave.
#[derive(Default)]
pub(super) struct Pending {
    requests: VecDeque<PendingRequest>,
    /// The beginnings of their keys, one behind the other. They are copies, because a waiting
    /// response must not keep a whole read buffer alive.
    keys: VecDeque<u8>,
    /// The clients of the last request that was added and of the last that left. Requests of one
    /// turn have one client, so few references are counted.
    added: Arc<str>,
    left: Arc<str>,
}

struct PendingRequest {
    timed: Timed,
    /// The length of the whole key; none if the request has no key.
    key_length: Option<u32>,
    /// If it is traced.
    trace: Option<Box<Trace>>,
    /// None if it is the client of the request before in the same queue.
    client: Option<Arc<str>>,
}

/// A request whose response leaves now.
pub(super) struct NextRequest<'a> {
    pub(super) timed: &'a Timed,
    pub(super) trace: Option<Box<Trace>>,
    pub(super) client: &'a Arc<str>,
    key_length: Option<u32>,
    /// They begin with its own key.
    keys: &'a VecDeque<u8>,
}

impl Pending {
    pub(super) fn add(
        &mut self,
        timed: Timed,
        key: &ShortKey,
        trace: Option<Box<Trace>>,
        client: &Arc<str>,
    ) {
        let is_other = !Arc::ptr_eq(&self.added, client);
        if is_other {
            self.added = client.clone();
        }
        self.keys.extend(key.shown());
        self.requests.push_back(PendingRequest {
            timed,
            key_length: key.length,
            trace,
            client: is_other.then(|| client.clone()),
        });
    }

    /// Passes the next request to `leaves`, and removes it. Returns whether there was one.
    pub(super) fn next(&mut self, leaves: impl FnOnce(NextRequest<'_>)) -> bool {
        // It is not moved before: most of it is read once.
        let Some(next) = self.requests.front_mut() else {
            return false;
        };
        if let Some(client) = next.client.take() {
            self.left = client;
        }
        leaves(NextRequest {
            timed: &next.timed,
            trace: next.trace.take(),
            client: &self.left,
            key_length: next.key_length,
            keys: &self.keys,
        });
        self.keys.drain(..shown_bytes(next.key_length));
        self.requests.pop_front();
        true
    }
}

impl NextRequest<'_> {
    /// The first key that it wrote or read as text, with an ellipsis if it was cut.
    pub(super) fn key(&self) -> Option<String> {
        let shown = shown_bytes(self.key_length);
        let is_cut = self.key_length? as usize > shown;
        let shown: Vec<u8> = self.keys.range(..shown).copied().collect();
        Some(Shown::start(&shown, is_cut).to_string())
    }
}

/// How many bytes of a key of this length are kept.
fn shown_bytes(key_length: Option<u32>) -> usize {
    key_length.map_or(0, |it| (it as usize).min(limits::SLOW_KEY_BYTES_MAX))
}

/// The beginning of the first key that the request which is decided now wrote or read.
pub(super) struct ShortKey {
    bytes: [u8; limits::SLOW_KEY_BYTES_MAX],
    /// The length of the whole key; none if the request has no key.
    length: Option<u32>,
}

impl Default for ShortKey {
    fn default() -> Self {
        Self {
            bytes: [0; limits::SLOW_KEY_BYTES_MAX],
            length: None,
        }
    }
}

impl ShortKey {
    /// Replaces the key by that of a request.
    pub(super) fn set(&mut self, effects: &Effects, payload: &[u8]) {
        self.replace(key_of(effects, payload));
    }

    fn replace(&mut self, key: Option<&[u8]>) {
        self.length = key.map(|it| u32::try_from(it.len()).unwrap_or(u32::MAX));
        let shown = shown_bytes(self.length);
        if let Some(key) = key {
            self.bytes[..shown].copy_from_slice(&key[..shown]);
        }
    }

    fn shown(&self) -> &[u8] {
        &self.bytes[..shown_bytes(self.length)]
    }
}

/// The first key that a request wrote or read, if clients can name it. A request whose condition
/// did not hold has only read it, and its reads are in its record unless they are large.
pub(super) fn key_of<'a>(effects: &'a Effects, payload: &'a [u8]) -> Option<&'a [u8]> {
    let handled = effects.handled.as_ref();
    let written = handled.and_then(|it| it.writes.first());
    if let Some(write) = written.filter(|it| !it.hidden) {
        return Some(write.key());
    }
    let captured = handled.and_then(|it| it.remembered.captured.as_ref());
    let read = match (captured, &effects.rests_on) {
        (Some(captured), _) => captured.reads.first(),
        (None, RestsOn::Keys(reads)) => reads.first(),
        (None, _) => None,
    };
    let key = read.filter(|it| !it.hidden)?.key.resolve(payload)?;
    // No key is empty, so the request was refused.
    (!key.is_empty()).then_some(key)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn requests_leave_in_order_with_their_keys_and_clients() {
        let timed = Timed::example(Instant::now());
        // Regression: each byte of such characters was escaped.
        let long = "x".to_owned() + &"ä".repeat(limits::SLOW_KEY_BYTES_MAX);
        let cut = format!("x{}…", "ä".repeat((limits::SLOW_KEY_BYTES_MAX - 1) / 2));
        let clients: [Arc<str>; 2] = ["a".into(), "b".into()];
        let added: [(Option<&[u8]>, &Arc<str>); 5] = [
            (Some(b"first"), &clients[0]),
            (None, &clients[0]),
            (Some(long.as_bytes()), &clients[1]),
            (Some(b""), &clients[1]),
            (Some("Wärme\n".as_bytes()), &clients[0]),
        ];
        let mut pending = Pending::default();
        let mut key = ShortKey::default();
        let mut seen = Vec::new();
        // The second round begins while requests of the first one wait.
        for leave in [3, 7] {
            for (name, client) in added {
                key.replace(name);
                pending.add(timed, &key, None, client);
            }
            for _ in 0..leave {
                let is_there = pending.next(|next| {
                    seen.push((next.key(), next.client.to_string()));
                });
                assert!(is_there);
            }
        }
        assert!(!pending.next(|_| panic!("nothing waits")) && pending.keys.is_empty());
        let expected = [
            (Some("first".to_owned()), "a".to_owned()),
            (None, "a".to_owned()),
            (Some(cut), "b".to_owned()),
            (Some(String::new()), "b".to_owned()),
            (Some("Wärme\n".to_owned()), "a".to_owned()),
        ];
        assert_eq!(seen, [&expected[..], &expected].concat());
    }
}
