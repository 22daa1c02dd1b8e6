//! Which outputs wait for which record.
//!
//! In come the batches of changes that were appended, with the outputs that hold packets telling of them; out goes word to
//! these outputs once the position of the batch is durable. Holds no bytes, keeps no connection's socket from being
//! closed, and never waits.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use crate::output::Output;

/// The number of a batch of changes, from 1. The position of its record is known only once it was appended, so packets
/// are marked with this.
pub(crate) type BatchNumber = u64;

/// What waits for the log.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    state: Mutex<State>,
    /// The same as in the state, to be asked without its lock.
    released: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    /// Rising in both numbers.
    waiting: VecDeque<Waiting>,
    released_position: u64,
    /// Every batch up to this is durable.
    released: BatchNumber,
}

#[derive(Debug)]
struct Waiting {
    position: u64,
    batch: BatchNumber,
    /// Of connections that may have ended: a log that stalls must not hold their sockets.
    outputs: Vec<Weak<Output>>,
}

impl Waiting {
    fn push(&mut self, output: &Arc<Output>) {
        if self.outputs.len() == self.outputs.capacity() {
            // Clients that come and go while the log stalls leave nothing behind. Room for as many again, so that
            // this is seldom.
            self.outputs.retain(|output| output.strong_count() > 0);
            self.outputs.reserve(self.outputs.len().max(4));
        }
        self.outputs.push(Arc::downgrade(output));
    }
}

type Told = Vec<(Weak<Output>, BatchNumber)>;

impl Gate {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing in here can panic half way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every batch up to this is durable. May be late, never early.
    pub(crate) fn released(&self) -> BatchNumber {
        self.released.load(Ordering::Acquire)
    }

    /// A batch was appended, or none, and these outputs hold packets that wait for it or for earlier ones. Called in the
    /// order of the batches. `released_position` is what the log says by now: it may have been faster than this call.
    pub(crate) fn enter(
        &self,
        appended: Option<(u64, BatchNumber)>,
        released_position: u64,
        gated: &mut Vec<(Arc<Output>, BatchNumber)>,
    ) {
        let mut state = self.lock();
        if let Some((position, batch)) = appended {
            match state
                .waiting
                .back_mut()
                .filter(|last| last.outputs.is_empty())
            {
                // Nobody waits for that one alone. Bounds the list where a log never answers.
                Some(last) => (last.position, last.batch) = (position, batch),
                None => state.waiting.push_back(Waiting {
                    position,
                    batch,
                    outputs: Vec::new(),
                }),
            }
        }
        let mut told = self.release(&mut state, released_position);
        for (output, batch) in gated.drain(..) {
            let at = state.waiting.partition_point(|entry| entry.batch < batch);
            match state.waiting.get_mut(at) {
                Some(entry) => entry.push(&output),
                None => told.push((Arc::downgrade(&output), batch)),
            }
        }
        drop(state);
        tell(told);
    }

    /// Everything up to this position is durable.
    pub(crate) fn release_to(&self, position: u64) {
        let told = self.release(&mut self.lock(), position);
        tell(told);
    }

    fn release(&self, state: &mut State, position: u64) -> Told {
        state.released_position = state.released_position.max(position);
        let mut told = Vec::new();
        while let Some(first) = state
            .waiting
            .pop_front_if(|first| first.position <= state.released_position)
        {
            state.released = first.batch;
            told.extend(
                first
                    .outputs
                    .into_iter()
                    .map(|output| (output, first.batch)),
            );
        }
        self.released.store(state.released, Ordering::Release);
        told
    }
}

fn tell(told: Told) {
    for (output, batch) in told {
        if let Some(output) = output.upgrade() {
            output.release(batch);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enter(gate: &Gate, output: &Arc<Output>, batch: BatchNumber) {
        gate.enter(Some((batch, batch)), 0, &mut vec![(output.clone(), batch)]);
    }

    #[test]
    fn a_log_that_stalls_holds_no_output_of_a_connection_that_ended() {
        let gate = Gate::default();
        let stays = Arc::new(Output::alone(1000, None));
        assert!(stays.put(1, |_| {}).is_some());
        enter(&gate, &stays, 1);
        for _ in 0..1000 {
            let ends = Arc::new(Output::alone(1000, None));
            // No record of its own: it waits for the one before it.
            gate.enter(None, 0, &mut vec![(ends.clone(), 1)]);
            let held = Arc::downgrade(&ends);
            drop(ends);
            assert!(held.upgrade().is_none());
        }
        let waiting: usize = gate
            .lock()
            .waiting
            .iter()
            .map(|entry| entry.outputs.len())
            .sum();
        assert!(waiting < 20, "{waiting}");
        assert!(
            stays
                .put(0, |out| out.extend_from_slice(b"answer"))
                .is_some()
        );
        assert!(stays.drain().is_empty());
        gate.release_to(1);
        assert_eq!(&stays.drain()[..], b"answer");
    }
}
