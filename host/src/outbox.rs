//! Holds what is to leave until the journal releases its position, then lets it go in order.
//!
//! What enters: what a step leads to, with the position it rests on. What leaves: the same, to the transport,
//! never before the journal says so, and for each client in the order it was decided. What one step leads to
//! leaves in its order also where it is for several clients, so that no PUBACK overtakes a notification. What
//! rests on nothing that still waits, such as the answer to a GET of a key nobody just wrote, does not wait for
//! others.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustc_hash::FxHashMap;

use crate::journal::Position;
use crate::transport::{Outbound, Transport};

/// The queue between the store and a transport.
#[derive(Default)]
pub struct Outbox {
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    /// Rests on nothing that waits.
    ready: Vec<Outbound>,
    /// By position.
    waiting: VecDeque<(Position, u64, Outbound)>,
    /// How many wait, by the connection they are for.
    lanes: FxHashMap<u64, usize>,
    released: Position,
}

impl Outbox {
    /// Queues what one step leads to, each with the number of the connection it is for. Steps must come in
    /// order, so the store's lock is held.
    pub fn push(&self, position: Position, out: impl IntoIterator<Item = (u64, Outbound)>) {
        let mut queue = self.lock();
        let Queue {
            ready,
            waiting,
            lanes,
            released,
        } = &mut *queue;
        let mut waits = position > *released;
        for (lane, out) in out {
            waits |= lanes.contains_key(&lane);
            if !waits {
                ready.push(out);
                continue;
            }
            // Behind something of its own, or of its step: as late as what is last.
            let last = waiting.back().map_or(position, |(last, ..)| *last);
            waiting.push_back((position.max(last), lane, out));
            *lanes.entry(lane).or_default() += 1;
        }
    }

    /// Queues what rests on nothing and need not wait for what was decided before it. A client may send any number of
    /// requests that nobody acknowledges, so their refusals must not pile up behind a slow disk.
    pub fn push_out_of_order(&self, out: Outbound) {
        self.lock().ready.push(out);
    }

    /// Lets everything go that the journal releases by now. Whoever calls may carry out what others queued:
    /// the transport runs one delivery at a time, so the order is that of the queue.
    pub fn release(&self, released: Position, transport: &dyn Transport) {
        {
            let mut queue = self.lock();
            queue.released = queue.released.max(released);
            if !queue.has_ready() {
                return;
            }
        }
        transport.deliver(&mut |out| self.lock().ready(out));
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Every update under this lock is whole, so a poisoned one still holds a good queue.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    fn has_ready(&self) -> bool {
        let first = self.waiting.front();
        !self.ready.is_empty() || first.is_some_and(|(position, ..)| *position <= self.released)
    }

    /// Fills an empty list. Its allocation serves the next time.
    fn ready(&mut self, out: &mut Vec<Outbound>) {
        std::mem::swap(&mut self.ready, out);
        while let Some((_, lane, next)) = self
            .waiting
            .pop_front_if(|(position, ..)| *position <= self.released)
        {
            if let Some(count) = self.lanes.get_mut(&lane) {
                *count -= 1;
                if *count == 0 {
                    self.lanes.remove(&lane);
                }
            }
            out.push(next);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Peer;
    use statehouse_mqtt::ReasonCode;

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
        outbox.push(Position(1), [kick(10), kick(11)]);
        outbox.push(Position(2), [kick(20)]);
        outbox.push(Position(3), [kick(30)]);
        outbox.release(Position(0), &notebook);
        assert!(notebook.0.lock().unwrap().is_empty());
        outbox.release(Position(2), &notebook);
        assert_eq!(*notebook.0.lock().unwrap(), [10, 11, 20]);
        // A late, lower word takes nothing back and lets nothing more go.
        outbox.release(Position(1), &notebook);
        assert_eq!(*notebook.0.lock().unwrap(), [10, 11, 20]);
        outbox.release(Position(3), &notebook);
        assert_eq!(*notebook.0.lock().unwrap(), [10, 11, 20, 30]);
    }

    #[test]
    fn what_may_leave_out_of_order_waits_for_nobody() {
        let (outbox, notebook) = (Outbox::default(), Notebook::default());
        outbox.push(Position(5), [kick(1)]);
        outbox.push_out_of_order(kick(1).1);
        outbox.release(Position(4), &notebook);
        assert_eq!(*notebook.0.lock().unwrap(), [1]);
        assert_eq!(outbox.lock().waiting.len(), 1);
    }

    #[test]
    fn what_one_step_leads_to_keeps_its_order_across_clients() {
        let (outbox, notebook) = (Outbox::default(), Notebook::default());
        outbox.push(Position(5), [kick(1)]);
        // The second waits for the first client's own, and the third for its sibling.
        outbox.push(Position(0), [kick(2), kick(1), kick(3)]);
        outbox.release(Position(4), &notebook);
        assert_eq!(*notebook.0.lock().unwrap(), [2]);
        outbox.release(Position(5), &notebook);
        assert_eq!(*notebook.0.lock().unwrap(), [2, 1, 1, 3]);
    }

    #[test]
    fn what_rests_on_nothing_waits_only_behind_its_own() {
        let (outbox, notebook) = (Outbox::default(), Notebook::default());
        let seen = || std::mem::take(&mut *notebook.0.lock().unwrap());
        outbox.push(Position(5), [kick(1)]);
        // Another client's read of something durable overtakes the write.
        outbox.push(Position(0), [kick(2)]);
        // The writer's own read does not.
        outbox.push(Position(0), [kick(1)]);
        outbox.push(Position(6), [kick(2)]);
        outbox.push(Position(3), [kick(2)]);
        outbox.release(Position(4), &notebook);
        assert_eq!(seen(), [2]);
        outbox.push(Position(4), [kick(1)]);
        outbox.release(Position(5), &notebook);
        assert_eq!(seen(), [1, 1]);
        outbox.push(Position(5), [kick(3)]);
        outbox.release(Position(6), &notebook);
        assert_eq!(seen(), [3, 2, 2, 1]);
        // Nobody waits any more, so nothing is behind anything.
        outbox.push(Position(6), [kick(1)]);
        outbox.release(Position(6), &notebook);
        assert_eq!(seen(), [1]);
        assert!(outbox.lock().lanes.is_empty());
    }
}
