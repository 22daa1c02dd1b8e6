//! Holds what is to leave until the journal releases its position, then lets it go in order.
//!
//! What enters: what a step leads to, with the position it rests on. What leaves: the same, to the transport,
//! never before the journal says so, and for each client in the order it was decided. What one step leads to
//! leaves in its order also where it is for several clients, so that no PUBACK overtakes a notification. What
//! rests on nothing that still waits, such as the answer to a GET of a key nobody just wrote, does not wait for
//! others.
//!
//! What waits is counted for the connection whose request led to it, with what it leads to for watchers: one that writes
//! faster than the disk is not read from until what it caused has left.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustc_hash::FxHashMap;

use crate::limits;
use crate::transport::{Outbound, Transport};
use statehouse_core::log::LogPosition;

/// The queue between the store and a transport.
#[derive(Default)]
pub struct Outbox {
    queue: Mutex<Queue>,
    /// What waits, in bytes: the sum in the queue, to be asked without its lock.
    bytes: AtomicUsize,
}

#[derive(Default)]
struct Queue {
    /// Rests on nothing that waits.
    ready: Vec<Outbound>,
    /// By position.
    waiting: VecDeque<Waiting>,
    /// How many wait, by the connection they are for.
    lanes: FxHashMap<u64, usize>,
    /// Bytes that wait, by the connection whose requests led to them.
    owed: FxHashMap<u64, usize>,
    released: LogPosition,
}

struct Waiting {
    position: LogPosition,
    lane: u64,
    owner: u64,
    bytes: usize,
    out: Outbound,
}

impl Outbox {
    /// Queues what one step leads to, each with the number of the connection it is for. It counts for `owner`, the connection
    /// that asked. Steps must come in order, so the store's lock is held. Returns the bytes of it.
    pub fn push(
        &self,
        position: LogPosition,
        owner: u64,
        out: impl IntoIterator<Item = (u64, Outbound)>,
    ) -> usize {
        let mut queue = self.lock();
        let Queue {
            ready,
            waiting,
            lanes,
            owed,
            released,
        } = &mut *queue;
        let mut waits = position > *released;
        // Watchers share payload and properties, which are counted once.
        let (mut shared, mut sum, mut waiting_bytes) = (std::ptr::null(), 0, 0);
        for (lane, out) in out {
            let bytes = out.own_bytes() + out.shared_bytes(&mut shared);
            sum += bytes;
            waits |= lanes.contains_key(&lane);
            if !waits {
                ready.push(out);
                continue;
            }
            // Behind something of its own, or of its step: as late as what is last.
            let position = waiting
                .back()
                .map_or(position, |last| position.max(last.position));
            waiting.push_back(Waiting {
                position,
                lane,
                owner,
                bytes,
                out,
            });
            waiting_bytes += bytes;
            *lanes.entry(lane).or_default() += 1;
        }
        if waiting_bytes > 0 {
            *owed.entry(owner).or_default() += waiting_bytes;
            self.bytes.fetch_add(waiting_bytes, Relaxed);
        }
        sum
    }

    /// Whether a connection may ask for more: what its requests led to and all that waits are within their bounds.
    pub fn has_room(&self, owner: u64, bytes_max: u64) -> bool {
        let all = self.bytes.load(Relaxed);
        let own_max = match all as u64 <= bytes_max {
            true => limits::UNRELEASED_BYTES_PER_CLIENT_MAX,
            false => limits::UNRELEASED_BYTES_FREE,
        };
        all <= own_max
            || self
                .lock()
                .owed
                .get(&owner)
                .is_none_or(|own| *own <= own_max)
    }

    /// Queues what rests on nothing and need not wait for what was decided before it. A client may send any number of
    /// requests that nobody acknowledges, so their refusals must not pile up behind a slow disk.
    pub fn push_out_of_order(&self, out: Outbound) {
        self.lock().ready.push(out);
    }

    /// Lets everything go that the journal releases by now. Whoever calls may carry out what others queued:
    /// the transport runs one delivery at a time, so the order is that of the queue.
    pub fn release(&self, released: LogPosition, transport: &dyn Transport) {
        {
            let mut queue = self.lock();
            queue.released = queue.released.max(released);
            if !queue.has_ready() {
                return;
            }
        }
        transport.deliver(&mut |out| {
            let left_bytes = self.lock().ready(out);
            if left_bytes > 0 {
                self.bytes.fetch_sub(left_bytes, Relaxed);
            }
        });
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Every update under this lock is whole, so a poisoned one still holds a good queue.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    fn has_ready(&self) -> bool {
        let first = self.waiting.front();
        !self.ready.is_empty() || first.is_some_and(|first| first.position <= self.released)
    }

    /// Fills an empty list, whose allocation serves the next time. Returns the bytes that waited.
    fn ready(&mut self, out: &mut Vec<Outbound>) -> usize {
        std::mem::swap(&mut self.ready, out);
        let mut bytes = 0;
        while let Some(next) = self
            .waiting
            .pop_front_if(|next| next.position <= self.released)
        {
            less(&mut self.lanes, next.lane, 1);
            less(&mut self.owed, next.owner, next.bytes);
            bytes += next.bytes;
            out.push(next.out);
        }
        bytes
    }
}

/// Takes so many off a count, which is removed at zero.
fn less(counts: &mut FxHashMap<u64, usize>, connection: u64, by: usize) {
    if let Some(count) = counts.get_mut(&connection) {
        *count -= by;
        if *count == 0 {
            counts.remove(&connection);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use statehouse_core::store::Peer;
    use statehouse_mqtt::{Message, QoS, ReasonCode};

    /// Writes down what it was asked to carry out.
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
                let mut notes = self.0.lock().unwrap();
                notes.extend(out.drain(..).map(|out| match out {
                    Outbound::Kick(peer, ..) => peer.connection,
                    _ => panic!("the test queues nothing else"),
                }));
            }
        }
    }

    fn kick(connection: u64) -> (u64, Outbound) {
        let peer = Peer {
            client: "c".into(),
            connection,
            session: 1,
        };
        let kick = Outbound::Kick(peer, ReasonCode::ADMINISTRATIVE_ACTION, "");
        (connection, kick)
    }

    #[test]
    fn nothing_leaves_before_its_position_is_durable() {
        let (outbox, notebook) = (Outbox::default(), Notebook::default());
        outbox.push(LogPosition(1), 9, [kick(10), kick(11)]);
        outbox.push(LogPosition(2), 9, [kick(20)]);
        outbox.push(LogPosition(3), 9, [kick(30)]);
        outbox.release(LogPosition(0), &notebook);
        assert!(notebook.0.lock().unwrap().is_empty());
        outbox.release(LogPosition(2), &notebook);
        assert_eq!(*notebook.0.lock().unwrap(), [10, 11, 20]);
        // A late, lower word takes nothing back and lets nothing more go.
        outbox.release(LogPosition(1), &notebook);
        assert_eq!(*notebook.0.lock().unwrap(), [10, 11, 20]);
        outbox.release(LogPosition(3), &notebook);
        assert_eq!(*notebook.0.lock().unwrap(), [10, 11, 20, 30]);
    }

    #[test]
    fn what_may_leave_out_of_order_waits_for_nobody() {
        let (outbox, notebook) = (Outbox::default(), Notebook::default());
        outbox.push(LogPosition(5), 9, [kick(1)]);
        outbox.push_out_of_order(kick(1).1);
        outbox.release(LogPosition(4), &notebook);
        assert_eq!(*notebook.0.lock().unwrap(), [1]);
        assert_eq!(outbox.lock().waiting.len(), 1);
    }

    #[test]
    fn what_one_step_leads_to_keeps_its_order_across_clients() {
        let (outbox, notebook) = (Outbox::default(), Notebook::default());
        outbox.push(LogPosition(5), 9, [kick(1)]);
        // The second waits for the first client's own, and the third for its sibling.
        outbox.push(LogPosition(0), 9, [kick(2), kick(1), kick(3)]);
        outbox.release(LogPosition(4), &notebook);
        assert_eq!(*notebook.0.lock().unwrap(), [2]);
        outbox.release(LogPosition(5), &notebook);
        assert_eq!(*notebook.0.lock().unwrap(), [2, 1, 1, 3]);
    }

    #[test]
    fn what_rests_on_nothing_waits_only_behind_its_own() {
        let (outbox, notebook) = (Outbox::default(), Notebook::default());
        let seen = || std::mem::take(&mut *notebook.0.lock().unwrap());
        outbox.push(LogPosition(5), 9, [kick(1)]);
        // Another client's read of something durable overtakes the write.
        outbox.push(LogPosition(0), 9, [kick(2)]);
        // The writer's own read does not.
        outbox.push(LogPosition(0), 9, [kick(1)]);
        outbox.push(LogPosition(6), 9, [kick(2)]);
        outbox.push(LogPosition(3), 9, [kick(2)]);
        outbox.release(LogPosition(4), &notebook);
        assert_eq!(seen(), [2]);
        outbox.push(LogPosition(4), 9, [kick(1)]);
        outbox.release(LogPosition(5), &notebook);
        assert_eq!(seen(), [1, 1]);
        outbox.push(LogPosition(5), 9, [kick(3)]);
        outbox.release(LogPosition(6), &notebook);
        assert_eq!(seen(), [3, 2, 2, 1]);
        // Nobody waits any more, so nothing is behind anything.
        outbox.push(LogPosition(6), 9, [kick(1)]);
        outbox.release(LogPosition(6), &notebook);
        assert_eq!(seen(), [1]);
        let queue = outbox.lock();
        assert!(queue.lanes.is_empty() && queue.owed.is_empty());
        assert_eq!(outbox.bytes.load(Relaxed), 0);
    }

    #[test]
    fn what_waits_counts_for_the_connection_that_asked() {
        let outbox = Outbox::default();
        let topic = vec![b't'; 1000];
        let notify = |connection, payload: &Bytes| {
            let message = Message::new(topic.clone(), payload.clone(), QoS::AtLeastOnce);
            let (_, kick) = kick(connection);
            let Outbound::Kick(peer, ..) = kick else {
                panic!("a kick")
            };
            (connection, Outbound::Notify(peer, message, None))
        };
        let payload = Bytes::from(vec![b'p'; 1 << 20]);
        let all = u64::MAX;
        // A thousand watchers share the payload; each has a topic of its own.
        let bytes = outbox.push(LogPosition(1), 7, (0..1000).map(|it| notify(it, &payload)));
        assert!((2 << 20..3 << 20).contains(&bytes), "{bytes}");
        assert!(outbox.has_room(7, all));
        for _ in 0..3 {
            outbox.push(LogPosition(1), 7, (0..1000).map(|it| notify(it, &payload)));
        }
        assert!(!outbox.has_room(7, all), "beyond its own bound");
        assert!(outbox.has_room(8, all));
        outbox.push(LogPosition(2), 8, [notify(1, &payload)]);
        assert!(outbox.has_room(8, all));
        assert!(!outbox.has_room(8, 1 << 20), "beyond that of all");
        assert!(outbox.has_room(9, 1 << 20), "who caused nothing goes on");
        // Not carried out by the notebook, which takes kicks only.
        outbox.lock().released = LogPosition(2);
        let mut out = Vec::new();
        let left = outbox.lock().ready(&mut out);
        assert_eq!((out.len(), left), (4001, outbox.bytes.load(Relaxed)));
    }
}
