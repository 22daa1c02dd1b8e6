//! Holds what is to leave until its position is durable, then lets it go in order.
//!
//! What enters: what a step leads to, with its position. What leaves: the same, to the transport,
//! never before the journal says so and never out of order.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::journal::Position;
use crate::transport::{Outbound, Transport};

/// The queue between the store and a transport.
#[derive(Default)]
pub struct Outbox {
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<(Position, Outbound)>,
    released: Position,
}

impl Outbox {
    /// Queues what a step leads to. Steps must come in order, so the store's lock is held.
    pub fn push(&self, position: Position, out: impl IntoIterator<Item = Outbound>) {
        self.lock()
            .waiting
            .extend(out.into_iter().map(|out| (position, out)));
    }

    /// Lets everything go that the journal releases by now. Whoever calls may carry out what others queued:
    /// the transport runs one delivery at a time, so the order is that of the queue.
    pub fn release(&self, released: Position, transport: &dyn Transport) {
        {
            let mut queue = self.lock();
            queue.released = queue.released.max(released);
        }
        transport.deliver(&mut || self.ready());
    }

    fn ready(&self) -> VecDeque<Outbound> {
        let mut queue = self.lock();
        let released = queue.released;
        let count = queue
            .waiting
            .partition_point(|(position, _)| *position <= released);
        queue.waiting.drain(..count).map(|(_, out)| out).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        // Every update under this lock is whole, so a poisoned one still holds a good queue.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
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
        fn deliver(&self, ready: &mut dyn FnMut() -> VecDeque<Outbound>) {
            loop {
                let out = ready();
                if out.is_empty() {
                    break;
                }
                let mut notes = self.0.lock().unwrap();
                notes.extend(out.into_iter().map(|out| match out {
                    Outbound::Kick(peer, ..) => peer.connection,
                    _ => panic!("the test queues nothing else"),
                }));
            }
        }
    }

    fn kick(connection: u64) -> Outbound {
        let peer = Peer {
            client: "c".into(),
            connection,
            session: 1,
        };
        Outbound::Kick(peer, ReasonCode::ADMINISTRATIVE_ACTION, "")
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
}
