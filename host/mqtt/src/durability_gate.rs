//! Holds back packets until the batch of changes that they depend on is durable.
//!
//! For each appended batch the gate remembers the outputs that wait for it, and notifies them once
//! the log position of the batch is durable. It must not hold bytes, keep an ended connection's
//! socket open, or wait.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use statehouse_protocol::LogPosition;

use crate::{
    barrier::{Barrier, BatchNumber},
    output::Output,
};

/// The outputs that wait for the log.
#[derive(Debug, Default)]
pub(crate) struct DurabilityGate {
    state: Mutex<State>,
    /// Every batch up to this is durable. Written with the lock held, read without it.
    released: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    /// Rising in both position and batch.
    waiting: VecDeque<Waiting>,
    released_position: LogPosition,
}

#[derive(Debug)]
struct Waiting {
    position: LogPosition,
    batch: BatchNumber,
    /// Weak, because a stalled log must not hold the sockets of connections that have ended.
    outputs: Vec<Weak<Output>>,
}

impl Waiting {
    fn push(&mut self, output: &Arc<Output>) {
        if self.outputs.len() == self.outputs.capacity() {
            // Removes the outputs of ended connections, so that they do not pile up while the log
            // stalls. Doubling the room keeps this rare.
            self.outputs.retain(|output| output.strong_count() > 0);
            self.outputs.reserve(self.outputs.len().max(4));
        }
        self.outputs.push(Arc::downgrade(output));
    }
}

type ReadyOutputs = Vec<(Weak<Output>, BatchNumber)>;

impl DurabilityGate {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code under this lock can panic half way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every batch up to this is durable. The value may lag behind but is never too high.
    pub(crate) fn released(&self) -> BatchNumber {
        BatchNumber(self.released.load(Ordering::Acquire))
    }

    /// Registers the outputs that wait for the appended batch, if there is one, or for earlier
    /// ones. Must be called in the order of the batches. `released_position` is the log's current
    /// position, since the log may release a batch before this call.
    pub(crate) fn register(
        &self,
        appended: Option<(LogPosition, BatchNumber)>,
        released_position: LogPosition,
        outputs: &mut Vec<(Arc<Output>, Barrier)>,
    ) {
        let mut state = self.lock();
        if let Some((position, batch)) = appended {
            match state
                .waiting
                .back_mut()
                .filter(|last| last.outputs.is_empty())
            {
                // No output waits for the last batch alone, so this one replaces it. That bounds
                // the list while the log releases nothing.
                Some(last) => (last.position, last.batch) = (position, batch),
                None => state.waiting.push_back(Waiting {
                    position,
                    batch,
                    outputs: Vec::new(),
                }),
            }
        }
        let mut ready = self.release(&mut state, released_position);
        for (output, barrier) in outputs.drain(..) {
            let batch = barrier.batch();
            let at = state.waiting.partition_point(|entry| entry.batch < batch);
            match state.waiting.get_mut(at) {
                Some(entry) => entry.push(&output),
                None => ready.push((Arc::downgrade(&output), batch)),
            }
        }
        drop(state);
        notify(ready);
    }

    pub(crate) fn is_waiting(&self) -> bool {
        let state = self.lock();
        let mut outputs = state.waiting.iter().flat_map(|it| &it.outputs);
        outputs.any(|it| it.strong_count() > 0)
    }

    /// Everything up to this position is durable.
    pub(crate) fn release_to(&self, position: LogPosition) {
        let ready = self.release(&mut self.lock(), position);
        notify(ready);
    }

    fn release(&self, state: &mut State, position: LogPosition) -> ReadyOutputs {
        state.released_position = state.released_position.max(position);
        let mut ready = Vec::new();
        while let Some(first) = state
            .waiting
            .pop_front_if(|first| first.position <= state.released_position)
        {
            self.released.store(first.batch.0, Ordering::Release);
            ready.extend(
                first
                    .outputs
                    .into_iter()
                    .map(|output| (output, first.batch)),
            );
        }
        ready
    }
}

fn notify(ready: ReadyOutputs) {
    for (output, batch) in ready {
        if let Some(output) = output.upgrade() {
            output.release(batch);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn register(gate: &DurabilityGate, output: &Arc<Output>, batch: BatchNumber) {
        let appended = Some((LogPosition(batch.0), batch));
        let outputs = &mut vec![(output.clone(), Barrier::after(batch))];
        gate.register(appended, LogPosition::NONE, outputs);
    }

    #[test]
    fn stalled_log_does_not_hold_outputs_of_ended_connections() {
        let gate = DurabilityGate::default();
        let stays = Arc::new(Output::alone(1000, None));
        let first = BatchNumber(1);
        assert!(stays.put(Barrier::after(first), |_| {}).is_some());
        register(&gate, &stays, first);
        for _ in 0..1000 {
            let ends = Arc::new(Output::alone(1000, None));
            // It has no record of its own and waits for the batch before it.
            let outputs = &mut vec![(ends.clone(), Barrier::after(first))];
            gate.register(None, LogPosition::NONE, outputs);
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
                .put(Barrier::NONE, |out| out.extend_from_slice(b"answer"))
                .is_some()
        );
        assert!(stays.drain().is_empty());
        gate.release_to(LogPosition(1));
        assert_eq!(&stays.drain()[..], b"answer");
    }
}
