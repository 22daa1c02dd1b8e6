//! Log lines on their way to stderr, which somebody reads slowly, or nobody at all.
//!
//! What enters: lines of any thread, also of those that hold the store's lock; none of them ever waits. What leaves: the same
//! lines in their order, from a thread of its own. Lines that find no room are dropped and counted, and a line says so once
//! there is room again. What was logged before an end, a panic's included, is written before it, where somebody reads it.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use tracing_subscriber::fmt::MakeWriter;

use crate::limits;

/// The thread that writes them.
const THREAD: &str = "log";

/// Those on their way to stderr.
static LINES: OnceLock<Lines> = OnceLock::new();

/// Starts the thread that writes to stderr, once. Where lines and panics go from then on.
///
/// # Errors
/// There is no further thread or file descriptor.
pub fn start() -> io::Result<Lines> {
    // Not by the lock of `io::stderr`: who prints to it elsewhere may not wait for this thread.
    let stderr = File::from(io::stderr().as_fd().try_clone_to_owned()?);
    let lines = Lines::start(stderr, |dropped| {
        tracing::warn!(
            dropped,
            "log lines were dropped, since nobody read them in time: so many since the start"
        );
    })?;
    let lines = LINES.get_or_init(|| lines).clone();
    let told = lines.clone();
    panic::set_hook(Box::new(move |panic| {
        let thread = thread::current();
        let name = thread.name().unwrap_or("<unnamed>");
        let backtrace = Backtrace::capture();
        let backtrace = match backtrace.status() {
            BacktraceStatus::Captured => format!("{backtrace}"),
            _ => String::new(),
        };
        told.push_last(format!("\nthread '{name}' {panic}\n{backtrace}").as_bytes());
        // It may be the last thing that this process does.
        told.flush(limits::LOG_FLUSH_WAIT);
    }));
    Ok(lines)
}

/// A line that says why this process ends, behind what was logged by now.
pub fn last_words(line: &str) {
    match LINES.get() {
        Some(lines) => lines.push_last(line.as_bytes()),
        // Where even stderr is gone there is nobody to tell.
        None => _ = io::stderr().write_all(line.as_bytes()),
    }
}

/// Waits until everything that was logged by now is written, but not for long: it may be that nobody reads stderr.
pub fn flush() {
    if let Some(lines) = LINES.get() {
        lines.flush(limits::LOG_FLUSH_WAIT);
    }
}

/// Ends the process, with what was logged before.
pub fn exit(code: i32) -> ! {
    flush();
    std::process::exit(code)
}

/// Lines that found no room, since the start.
pub fn dropped() -> u64 {
    LINES.get().map_or(0, |lines| lines.lock().dropped)
}

/// Lines that wait to be written.
#[derive(Clone)]
pub struct Lines(Arc<Shared>);

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    /// Something waits.
    filled: Condvar,
    /// More is written.
    drained: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: Vec<u8>,
    /// Bytes that ever waited.
    pushed: u64,
    /// Those of them that the thread took.
    taken: u64,
    /// Those of them that it is done with.
    written: u64,
    /// Lines, not bytes.
    dropped: u64,
    /// How many of these a line told of.
    told: u64,
}

impl Lines {
    /// Starts the thread that writes to `out`. It lets `tell` say how many lines were dropped so far, once there is room.
    fn start(
        mut out: impl Write + Send + 'static,
        tell: impl Fn(u64) + Send + 'static,
    ) -> io::Result<Self> {
        let lines = Self(Arc::default());
        let writer = lines.clone();
        let mut run = move || writer.write_to(&mut out, &tell);
        // After a panic it goes on behind what it was at: else nothing would ever be logged again.
        let run = move || while panic::catch_unwind(AssertUnwindSafe(&mut run)).is_err() {};
        thread::Builder::new().name(THREAD.to_owned()).spawn(run)?;
        Ok(lines)
    }

    /// Nothing that panics is done under it.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        (self.0.queue.lock()).unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, line: &[u8]) {
        self.push_within(line, limits::LOG_QUEUE_BYTES_MAX);
    }

    /// What may be the last thing that this process says has room of its own.
    fn push_last(&self, line: &[u8]) {
        let bytes_max = limits::LOG_QUEUE_BYTES_MAX + limits::LOG_LAST_WORDS_BYTES_MAX;
        self.push_within(line, bytes_max);
    }

    fn push_within(&self, line: &[u8], bytes_max: usize) {
        let mut queue = self.lock();
        if queue.waiting.len() + line.len() > bytes_max {
            queue.dropped += 1;
            return;
        }
        queue.waiting.extend_from_slice(line);
        queue.pushed += line.len() as u64;
        drop(queue);
        self.0.filled.notify_one();
    }

    /// Waits until what was pushed by now is written. False where that takes longer.
    fn flush(&self, wait: Duration) -> bool {
        let pushed = self.lock().pushed;
        self.wait_for(pushed, wait)
    }

    /// Waits until so many bytes are written. The thread that writes them does not wait for itself.
    fn wait_for(&self, bytes: u64, wait: Duration) -> bool {
        if thread::current().name() == Some(THREAD) {
            return false;
        }
        let busy = |queue: &mut Queue| queue.written < bytes;
        let waited = self.0.drained.wait_timeout_while(self.lock(), wait, busy);
        let (_queue, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        !waited.timed_out()
    }

    /// Takes what waits, again and again. There is room for a word about what was dropped before it, so it comes behind it.
    fn write_to(&self, out: &mut impl Write, tell: &impl Fn(u64)) {
        // While it does, words about that would be one more line that cannot be written.
        let mut fails = false;
        loop {
            let (chunk, dropped) = self.take(!fails);
            let written = write(out, &chunk);
            fails = written < chunk.len();
            let lost = chunk[written..].iter().filter(|it| **it == b'\n').count();
            self.lock().dropped += lost as u64;
            if let Some(dropped) = dropped {
                tell(dropped);
            }
        }
    }

    /// What waits, once something does, where the thread is done with all that it took before; and how many lines were
    /// dropped by then, where that is to be told and is more than was told.
    fn take(&self, tells: bool) -> (Vec<u8>, Option<u64>) {
        let mut queue = self.lock();
        queue.written = queue.taken;
        self.0.drained.notify_all();
        while queue.waiting.is_empty() {
            let filled = self.0.filled.wait(queue);
            queue = filled.unwrap_or_else(PoisonError::into_inner);
        }
        queue.taken = queue.pushed;
        let dropped = (tells && queue.dropped > queue.told).then_some(queue.dropped);
        queue.told = dropped.unwrap_or(queue.told);
        (std::mem::take(&mut queue.waiting), dropped)
    }
}

/// Writes until all is out or it fails; how much is out.
fn write(out: &mut impl Write, chunk: &[u8]) -> usize {
    let mut written = 0;
    while written < chunk.len() {
        match out.write(&chunk[written..]) {
            Ok(0) => break,
            Ok(bytes) => written += bytes,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // Whoever shares the pipe made it so.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                thread::sleep(limits::LOG_RETRY_PAUSE);
            }
            Err(_) => break,
        }
    }
    written
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line(self)
    }
}

/// Takes a line, which is written to it in one piece.
pub struct Line<'a>(&'a Lines);

impl Write for Line<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    const LONG: Duration = Duration::from_secs(30);
    const SHORT: Duration = Duration::from_millis(50);

    /// Somebody who reads what was written only when told to.
    struct Reader {
        go_on: Receiver<io::Result<()>>,
        read: Sender<Vec<u8>>,
    }

    impl Write for Reader {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            // A test that is over lets everything through.
            self.go_on.recv().unwrap_or(Ok(()))?;
            _ = self.read.send(bytes.to_vec());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Rig {
        lines: Lines,
        go_on: Sender<io::Result<()>>,
        read: Receiver<Vec<u8>>,
    }

    /// What was dropped is told as a line, as the log does it.
    fn rig() -> Rig {
        let (go_on, gate) = channel();
        let (reader, read) = channel();
        let (give, given) = channel::<Lines>();
        let itself = OnceLock::new();
        let tell = move |dropped| {
            let lines = itself.get_or_init(|| given.recv().unwrap());
            lines.push(format!("{dropped} dropped\n").as_bytes());
        };
        let reader = Reader {
            go_on: gate,
            read: reader,
        };
        let lines = Lines::start(reader, tell).unwrap();
        give.send(lines.clone()).unwrap();
        Rig { lines, go_on, read }
    }

    impl Rig {
        /// The next that is read.
        fn read(&self) -> String {
            self.go_on.send(Ok(())).unwrap();
            String::from_utf8(self.read.recv_timeout(LONG).unwrap()).unwrap()
        }

        fn dropped(&self) -> u64 {
            self.lines.lock().dropped
        }

        /// Waits until the thread has taken what there is.
        fn taken(&self) {
            while !self.lines.lock().waiting.is_empty() {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    #[test]
    fn who_logs_waits_for_nobody_and_what_finds_no_room_is_told_of_when_there_is_some() {
        let rig = rig();
        rig.lines.push(b"first\n");
        rig.taken();
        // Nobody reads the first, and behind it there is room for so many.
        let line = [&[b'x'; 1023][..], b"\n"].concat();
        let room = limits::LOG_QUEUE_BYTES_MAX / line.len();
        for _ in 0..room + 7 {
            rig.lines.push(&line);
        }
        assert_eq!(rig.dropped(), 7);
        assert!(!rig.lines.flush(SHORT), "nothing is written yet");
        assert_eq!(rig.read(), "first\n");
        assert_eq!(rig.read().len(), room * line.len());
        assert_eq!(rig.read(), "7 dropped\n");
        rig.lines.push(b"last\n");
        assert_eq!(rig.read(), "last\n");
        assert!(rig.lines.flush(LONG));
        assert_eq!(rig.dropped(), 7);
    }

    #[test]
    fn what_cannot_be_written_is_counted_and_told_of_once_that_goes_on() {
        let rig = rig();
        let full = || Err(ErrorKind::StorageFull.into());
        rig.lines.push(b"one\n");
        rig.taken();
        rig.lines.push(b"two\nthree\n");
        rig.go_on.send(full()).unwrap();
        rig.taken();
        rig.go_on.send(full()).unwrap();
        assert!(rig.lines.flush(LONG), "nothing is left to be written");
        assert_eq!(rig.dropped(), 3);
        rig.lines.push(b"four\n");
        assert_eq!(rig.read(), "four\n");
        assert!(rig.lines.flush(LONG));
        rig.lines.push(b"five\n");
        assert_eq!(rig.read(), "five\n");
        assert_eq!(rig.read(), "3 dropped\n");
    }

    #[test]
    fn a_flush_does_not_wait_for_what_is_logged_after_it_began() {
        let rig = rig();
        rig.lines.push(b"one\n");
        rig.taken();
        let began = rig.lines.lock().pushed;
        rig.lines.push(b"two\n");
        assert!(!rig.lines.wait_for(began, SHORT));
        assert_eq!(rig.read(), "one\n");
        assert!(rig.lines.wait_for(began, LONG), "two waits still");
        assert!(!rig.lines.flush(SHORT));
    }

    #[test]
    fn last_words_find_room_where_lines_find_none() {
        let rig = rig();
        rig.lines.push(b"first\n");
        rig.taken();
        rig.lines.push(&[b'x'; limits::LOG_QUEUE_BYTES_MAX]);
        rig.lines.push(b"a line\n");
        assert_eq!(rig.dropped(), 1);
        rig.lines.push_last(b"why\n");
        rig.lines
            .push_last(&[b'y'; limits::LOG_LAST_WORDS_BYTES_MAX]);
        assert_eq!(rig.dropped(), 2, "there is an end to that too");
        assert_eq!(rig.read(), "first\n");
        assert!(rig.read().ends_with("xwhy\n"));
    }

    #[test]
    fn the_thread_goes_on_after_a_panic_and_never_waits_for_itself() {
        let (told, tells) = channel();
        let (read, reads) = channel();
        let lines: Arc<OnceLock<Lines>> = Arc::default();
        let itself = lines.clone();
        let tell = move |_| {
            told.send(itself.wait().flush(LONG)).unwrap();
            panic!("asked to");
        };
        let go_on = channel().1;
        let lines = lines.get_or_init(|| Lines::start(Reader { go_on, read }, tell).unwrap());
        lines.push(&[b'x'; limits::LOG_QUEUE_BYTES_MAX + 1]);
        lines.push(b"kept\n");
        assert_eq!(tells.recv_timeout(LONG / 2), Ok(false));
        lines.push(b"behind it\n");
        assert!(lines.flush(LONG));
        let read: Vec<_> = reads.try_iter().flatten().collect();
        assert_eq!(read, b"kept\nbehind it\n");
    }

    #[test]
    fn a_flush_waits_for_what_is_being_written() {
        let rig = rig();
        assert!(rig.lines.flush(SHORT), "there is nothing");
        rig.lines.push(b"last words\n");
        rig.taken();
        assert!(!rig.lines.flush(SHORT));
        rig.go_on.send(Err(ErrorKind::Interrupted.into())).unwrap();
        rig.go_on.send(Err(ErrorKind::WouldBlock.into())).unwrap();
        assert_eq!(rig.read(), "last words\n");
        assert!(rig.lines.flush(LONG));
    }
}
