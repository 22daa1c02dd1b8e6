//! Which outputs wait for which record.
//!
//! In come the batches of changes that were appended, with the outputs that hold packets telling of them; out goes word to
//! these outputs once the position of the batch is durable. Holds no bytes and never waits.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
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
    outputs: Vec<Arc<Output>>,
}

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
                Some(entry) => entry.outputs.push(output),
                None => told.push((output, batch)),
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

    fn release(&self, state: &mut State, position: u64) -> Vec<(Arc<Output>, BatchNumber)> {
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

fn tell(told: Vec<(Arc<Output>, BatchNumber)>) {
    for (output, batch) in told {
        output.release(batch);
    }
}
