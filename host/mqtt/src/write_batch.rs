//! Writes the results of several connections' turns together.
//!
//! Without write batches, a thread that finds many sockets readable answers each before it reads
//! the next. Every client is then woken for one answer, and a wake-up costs more than the answer.
//!
//! A connection opens a batch at its turn, lets the other ready connections have their turns, and
//! then writes to all of them. After some batches in which no other connection was ready, it
//! usually writes at once. A batch delays a write by at most [`WRITE_BATCH_TIME_MAX`] and one turn,
//! and must hold no bytes.

use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use crate::{
    limits::{DIRECT_WRITES_MAX, SINGLE_OUTPUT_BATCHES, WRITE_BATCH_TIME_MAX},
    output::Output,
};

/// The write batches of a broker, of which at most one is open.
#[derive(Debug, Default)]
pub(crate) struct WriteBatching(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// When the open batch began.
    open_since: Option<Instant>,
    gathered: Vec<Arc<Output>>,
    /// How many batches in a row had only one output.
    single_output_batches: u32,
}

/// An open batch. It ends when it is dropped, which includes the cancellation of its connection's
/// task.
pub(crate) struct WriteBatch<'a>(&'a WriteBatching);

impl WriteBatching {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code under this lock can panic half way.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a batch. Returns `None` if another one is open. Ends an overdue batch, whose
    /// connection waits behind others.
    pub(crate) fn open(&self, now: Instant) -> Option<WriteBatch<'_>> {
        let mut state = self.lock();
        let overdue = match state.open_since {
            Some(since) if now.saturating_duration_since(since) < WRITE_BATCH_TIME_MAX => {
                return None;
            }
            _ => mem::take(&mut state.gathered),
        };
        state.open_since = Some(now);
        drop(state);
        write(&overdue);
        Some(WriteBatch(self))
    }

    /// Takes outputs whose writers sleep, to write to them at the end of the batch. Does nothing if
    /// no batch is open.
    pub(crate) fn gather(&self, writers: &mut Vec<Arc<Output>>) {
        let mut state = self.lock();
        if state.open_since.is_some() {
            state.gathered.append(writers);
        }
    }

    /// Writes the outputs gathered so far.
    pub(crate) fn write_gathered(&self) {
        let gathered = mem::take(&mut self.lock().gathered);
        write(&gathered);
    }
}

impl WriteBatch<'_> {
    /// Whether the other connections should have their turns first: there is something to write,
    /// and they may add to it.
    pub(crate) fn waits(&self) -> bool {
        let state = self.0.lock();
        !state.gathered.is_empty()
            && (state.single_output_batches < SINGLE_OUTPUT_BATCHES
                || state
                    .single_output_batches
                    .is_multiple_of(SINGLE_OUTPUT_BATCHES))
    }
}

impl Drop for WriteBatch<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        // If this batch was overdue, this may end the next one early. That only splits the next
        // batch into two.
        state.open_since = None;
        let gathered = mem::take(&mut state.gathered);
        match gathered.len() {
            0 => {}
            1 => state.single_output_batches = state.single_output_batches.wrapping_add(1),
            _ => state.single_output_batches = 0,
        }
        drop(state);
        write(&gathered);
    }
}

/// Writes to sockets in place of their sleeping tasks. Beyond [`DIRECT_WRITES_MAX`] it wakes the
/// tasks instead.
pub(crate) fn write(writers: &[Arc<Output>]) {
    // The tasks write the rest in parallel, so that one change with many watchers does not occupy a
    // thread.
    let (now, later) = writers.split_at(writers.len().min(DIRECT_WRITES_MAX));
    later.iter().for_each(|writer| writer.wake_writer());
    now.iter().for_each(|writer| writer.write_now());
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;

    use super::*;
    use crate::barrier::Barrier;
    use crate::output::{Direct, Work};

    /// Accepts all bytes and records each write.
    #[derive(Debug, Default)]
    struct Socket(Mutex<Vec<Vec<u8>>>);

    impl Direct for Socket {
        fn try_write(&self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().push(bytes.to_vec());
            Ok(bytes.len())
        }
    }

    /// An output whose writer sleeps, and its socket.
    fn connection() -> (Arc<Output>, Arc<Socket>) {
        let socket = Arc::new(Socket::default());
        let output = Arc::new(Output::alone(1000, Some(socket.clone())));
        output.drain();
        (output, socket)
    }

    /// A turn: adds a packet and leaves the output to the batch.
    fn turn(batching: &WriteBatching, output: &Arc<Output>, packet: &[u8]) -> Vec<Arc<Output>> {
        let added = output
            .put(Barrier::NONE, |out| out.extend_from_slice(packet))
            .unwrap();
        let mut writers: Vec<_> = added.wake.then(|| output.clone()).into_iter().collect();
        batching.gather(&mut writers);
        writers
    }

    fn written(socket: &Socket) -> Vec<Vec<u8>> {
        socket.0.lock().unwrap().clone()
    }

    #[test]
    fn batch_writes_each_socket_once_at_its_end() {
        let batching = WriteBatching::default();
        let (first, second) = (connection(), connection());
        let begun = Instant::now();
        let batch = batching.open(begun).unwrap();
        assert!(!batch.waits());
        assert!(turn(&batching, &first.0, b"a").is_empty());
        assert!(batching.open(begun).is_none(), "a batch is open");
        assert!(turn(&batching, &second.0, b"b").is_empty());
        assert!(turn(&batching, &first.0, b"c").is_empty());
        assert!(batch.waits());
        assert!(written(&first.1).is_empty() && written(&second.1).is_empty());
        drop(batch);
        assert_eq!(written(&first.1), [b"ac"]);
        assert_eq!(written(&second.1), [b"b"]);
        assert_eq!(
            turn(&batching, &first.0, b"d").len(),
            1,
            "without a batch the caller writes"
        );
    }

    #[test]
    fn single_client_waits_for_others_only_occasionally() {
        let batching = WriteBatching::default();
        let (first, second) = (connection(), connection());
        let mut waited = 0;
        let mut one = || {
            let batch = batching.open(Instant::now()).unwrap();
            turn(&batching, &first.0, b"a");
            waited += usize::from(batch.waits());
        };
        (0..10 * SINGLE_OUTPUT_BATCHES).for_each(|_| one());
        assert_eq!(waited as u32, SINGLE_OUTPUT_BATCHES + 9);
        // Another connection was ready in this batch.
        let batch = batching.open(Instant::now()).unwrap();
        turn(&batching, &first.0, b"a");
        turn(&batching, &second.0, b"b");
        drop(batch);
        let batch = batching.open(Instant::now()).unwrap();
        turn(&batching, &first.0, b"a");
        assert!(batch.waits());
    }

    #[test]
    fn overdue_batch_ends_when_the_next_one_opens() {
        let batching = WriteBatching::default();
        let (output, socket) = connection();
        let begun = Instant::now();
        let stuck = batching.open(begun).unwrap();
        turn(&batching, &output, b"a");
        assert!(batching.open(begun + WRITE_BATCH_TIME_MAX / 2).is_none());
        assert!(written(&socket).is_empty());
        let next = batching.open(begun + WRITE_BATCH_TIME_MAX).unwrap();
        assert_eq!(written(&socket), [b"a"]);
        turn(&batching, &output, b"b");
        drop((stuck, next));
        assert_eq!(written(&socket), [b"a", b"b"]);
        assert_eq!(turn(&batching, &output, b"c").len(), 1, "no batch is open");
    }

    #[tokio::test]
    async fn direct_write_never_overtakes_the_writer() {
        let (output, socket) = connection();
        let put = |packet: &'static [u8]| {
            let encode = |out: &mut BytesMut| out.extend_from_slice(packet);
            output.put(Barrier::NONE, encode).unwrap().wake
        };
        assert!(put(b"a"), "a thread is to write in place of the writer");
        let mut chunk = BytesMut::new();
        // The writer is awake nevertheless, as after a refill.
        assert_eq!(output.take(&mut chunk).await, Work::Write);
        put(b"b");
        output.write_now();
        assert!(
            written(&socket).is_empty(),
            "the writer has not written yet"
        );
        output.written(&mut chunk);
        assert_eq!(output.take(&mut chunk).await, Work::Write);
        assert_eq!(&chunk[..], b"b");
    }

    #[test]
    fn write_gathered_does_not_wait_for_the_batch_to_end() {
        let batching = WriteBatching::default();
        let (output, socket) = connection();
        let _batch = batching.open(Instant::now()).unwrap();
        turn(&batching, &output, b"a");
        batching.write_gathered();
        assert_eq!(written(&socket), [b"a"]);
    }
}
