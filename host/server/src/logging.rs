//! Writes log lines to stderr on a thread of its own, so that a slow or stalled reader of stderr
//! never blocks the store. Another thread does so for standard output.
//!
//! Any thread may log, including threads that hold the store's lock, so logging must never wait.
//! The writer thread keeps the order of lines. Lines that do not fit into the bounded queue are
//! dropped and counted; one line reports the count when there is room again. Everything that was
//! logged before an exit or a panic is written before the process ends, if stderr is read.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use tracing_subscriber::fmt::MakeWriter;

use statehouse_config::limits;

/// Name of the thread that writes to stderr.
const THREAD: &str = "log";

/// Name of the thread that writes to standard output.
const OUTPUT_THREAD: &str = "output";

/// The queue of lines for stderr.
static LINES: OnceLock<Lines> = OnceLock::new();

/// The queue of lines for standard output.
static OUTPUT: OnceLock<Lines> = OnceLock::new();

/// Starts the writer threads, once, and directs log lines, panics and [`print`] to them. Fails if
/// the system refuses another thread or file descriptor.
pub fn start() -> io::Result<Lines> {
    // Files of our own: through `io::stderr`, other users of its lock would wait for this thread.
    let stdout = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let output = Lines::start(OUTPUT_THREAD, Output(stdout), |dropped| {
        tracing::warn!(
            dropped,
            "lines were dropped because standard output was not read in time (total since the start)"
        );
    })?;
    // Only the first start counts.
    _ = OUTPUT.set(output);
    let stderr = File::from(io::stderr().as_fd().try_clone_to_owned()?);
    let lines = Lines::start(THREAD, stderr, |dropped| {
        tracing::warn!(
            dropped,
            "log lines were dropped because stderr was not read in time (total since the start)"
        );
    })?;
    let lines = LINES.get_or_init(|| lines).clone();
    let lines_of_panics = lines.clone();
    panic::set_hook(Box::new(move |panic| {
        let thread = thread::current();
        let name = thread.name().unwrap_or("<unnamed>");
        let backtrace = Backtrace::capture();
        let backtrace = match backtrace.status() {
            BacktraceStatus::Captured => format!("{backtrace}"),
            _ => String::new(),
        };
        lines_of_panics.push_last(format!("\nthread '{name}' {panic}\n{backtrace}").as_bytes());
        // The process may end right after this hook.
        lines_of_panics.flush(limits::LOG_FLUSH_WAIT);
    }));
    Ok(lines)
}

/// Logs the reason why this process ends, after all earlier lines.
pub fn last_words(line: &str) {
    match LINES.get() {
        Some(lines) => lines.push_last(line.as_bytes()),
        // If stderr fails too, there is no other place to report to.
        None => _ = io::stderr().write_all(line.as_bytes()),
    }
}

/// Queues lines for standard output, in the order of the calls. Never waits.
pub fn print(lines: &[String]) {
    let text: String = lines.iter().flat_map(|it| [it.as_str(), "\n"]).collect();
    match OUTPUT.get() {
        Some(output) => output.push(text.as_bytes()),
        // Before the start, as in a test of a caller.
        None => _ = io::stdout().write_all(text.as_bytes()),
    }
}

/// Waits until all lines printed and logged so far are written, but only for a limited time, since
/// nothing may read them.
pub fn flush() {
    // The log last: it says why the output cannot be written.
    for lines in [&OUTPUT, &LINES].into_iter().filter_map(OnceLock::get) {
        lines.flush(limits::LOG_FLUSH_WAIT);
    }
}

/// Flushes the log and ends the process.
pub fn exit(code: i32) -> ! {
    flush();
    std::process::exit(code)
}

/// Number of lines dropped since the start because the queue was full.
pub fn dropped() -> u64 {
    LINES.get().map_or(0, |lines| lines.lock().dropped)
}

/// A bounded queue of lines for a writer thread.
#[derive(Clone)]
pub struct Lines(Arc<Shared>);

#[derive(Default)]
struct Shared {
    /// The name of the writer thread.
    thread: &'static str,
    queue: Mutex<Queue>,
    /// Notified when lines are queued.
    filled: Condvar,
    /// Notified when lines were written.
    drained: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: Vec<u8>,
    /// Bytes queued since the start.
    pushed: u64,
    /// Bytes of `pushed` that the writer thread has taken.
    taken: u64,
    /// Bytes of `pushed` that the writer thread has written or given up.
    written: u64,
    /// Dropped lines (not bytes) since the start.
    dropped: u64,
    /// The value of `dropped` that was last reported.
    reported: u64,
}

impl Lines {
    /// Starts the thread that writes to `out`. It calls `report` with the number of dropped lines
    /// once there is room for another line.
    fn start(
        thread: &'static str,
        mut out: impl Write + Send + 'static,
        report: impl Fn(u64) + Send + 'static,
    ) -> io::Result<Self> {
        let lines = Self(Arc::new(Shared {
            thread,
            ..Shared::default()
        }));
        let writer = lines.clone();
        let mut run = move || writer.write_to(&mut out, &report);
        // After a panic the loop continues with the next chunk; otherwise nothing would be logged
        // again.
        let run = move || while panic::catch_unwind(AssertUnwindSafe(&mut run)).is_err() {};
        thread::Builder::new().name(thread.to_owned()).spawn(run)?;
        Ok(lines)
    }

    /// The code under this lock must not panic.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        (self.0.queue.lock()).unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, line: &[u8]) {
        self.push_within(line, limits::LOG_QUEUE_BYTES_MAX);
    }

    /// Queues a line that may be the last one of this process; extra room is reserved for it.
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

    /// Waits until all lines pushed so far are written. Returns false on timeout.
    fn flush(&self, wait: Duration) -> bool {
        let pushed = self.lock().pushed;
        self.wait_for(pushed, wait)
    }

    /// Waits until `bytes` are written. The writer thread itself returns at once, since it would
    /// wait for itself.
    fn wait_for(&self, bytes: u64, wait: Duration) -> bool {
        if thread::current().name() == Some(self.0.thread) {
            return false;
        }
        let busy = |queue: &mut Queue| queue.written < bytes;
        let waited = self.0.drained.wait_timeout_while(self.lock(), wait, busy);
        let (_queue, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        !waited.timed_out()
    }

    /// Writes queued lines forever. A report of dropped lines follows the lines that were queued
    /// before it.
    fn write_to(&self, out: &mut impl Write, report: &impl Fn(u64)) {
        // While writing fails, a report about dropped lines would only fail as well.
        let mut fails = false;
        loop {
            let (chunk, dropped) = self.take(!fails);
            let written = write(out, &chunk);
            fails = written < chunk.len();
            let unwritten = chunk[written..].iter().filter(|it| **it == b'\n').count();
            self.lock().dropped += unwritten as u64;
            if let Some(dropped) = dropped {
                report(dropped);
            }
        }
    }

    /// Marks the previous chunk as written and waits for the next one. Also returns the number of
    /// dropped lines if `reports` is set and the number has grown since the last report.
    fn take(&self, reports: bool) -> (Vec<u8>, Option<u64>) {
        let mut queue = self.lock();
        queue.written = queue.taken;
        self.0.drained.notify_all();
        while queue.waiting.is_empty() {
            let filled = self.0.filled.wait(queue);
            queue = filled.unwrap_or_else(PoisonError::into_inner);
        }
        queue.taken = queue.pushed;
        let dropped = (reports && queue.dropped > queue.reported).then_some(queue.dropped);
        queue.reported = dropped.unwrap_or(queue.reported);
        (std::mem::take(&mut queue.waiting), dropped)
    }
}

/// Writes until all is written or writing fails; returns the number of bytes written.
fn write(out: &mut impl Write, chunk: &[u8]) -> usize {
    let mut written = 0;
    while written < chunk.len() {
        match out.write(&chunk[written..]) {
            Ok(0) => break,
            Ok(bytes) => written += bytes,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            // Another process that shares the pipe made it non-blocking.
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                thread::sleep(limits::LOG_RETRY_PAUSE);
            }
            Err(_) => break,
        }
    }
    written
}

/// Standard output. Logs why it cannot be written: a store also serves if its output is on a full
/// disk.
struct Output(File);

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.0.write(bytes);
        if let Err(error) = &written
            && ![ErrorKind::Interrupted, ErrorKind::WouldBlock].contains(&error.kind())
        {
            tracing::warn!(%error, "cannot write to standard output; this process continues");
        }
        written
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line(self)
    }
}

/// Collects one line, which is written in one call.
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

    /// A reader that reads only when the test allows it.
    struct Reader {
        go_on: Receiver<io::Result<()>>,
        read: Sender<Vec<u8>>,
    }

    impl Write for Reader {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            // At the end of a test all writes succeed.
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

    /// Reports dropped lines as a line, like the log does.
    fn rig() -> Rig {
        let (go_on, gate) = channel();
        let (reader, read) = channel();
        let (give, given) = channel::<Lines>();
        let itself = OnceLock::new();
        let report = move |dropped| {
            let lines = itself.get_or_init(|| given.recv().unwrap());
            lines.push(format!("{dropped} dropped\n").as_bytes());
        };
        let reader = Reader {
            go_on: gate,
            read: reader,
        };
        let lines = Lines::start(THREAD, reader, report).unwrap();
        give.send(lines.clone()).unwrap();
        Rig { lines, go_on, read }
    }

    impl Rig {
        /// Returns the next text that the reader gets.
        fn read(&self) -> String {
            self.go_on.send(Ok(())).unwrap();
            String::from_utf8(self.read.recv_timeout(LONG).unwrap()).unwrap()
        }

        fn dropped(&self) -> u64 {
            self.lines.lock().dropped
        }

        /// Waits until the thread has taken all queued lines.
        fn taken(&self) {
            while !self.lines.lock().waiting.is_empty() {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    #[test]
    fn logging_never_waits_and_dropped_lines_are_reported() {
        let rig = rig();
        rig.lines.push(b"first\n");
        rig.taken();
        // The first line is not read yet, and behind it there is room for `room` lines.
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
    fn unwritable_lines_are_counted_and_reported_later() {
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
    fn a_flush_does_not_wait_for_lines_logged_after_it_began() {
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
    fn last_words_fit_into_a_full_queue() {
        let rig = rig();
        rig.lines.push(b"first\n");
        rig.taken();
        rig.lines.push(&[b'x'; limits::LOG_QUEUE_BYTES_MAX]);
        rig.lines.push(b"a line\n");
        assert_eq!(rig.dropped(), 1);
        rig.lines.push_last(b"why\n");
        rig.lines
            .push_last(&[b'y'; limits::LOG_LAST_WORDS_BYTES_MAX]);
        assert_eq!(rig.dropped(), 2, "the extra room is bounded too");
        assert_eq!(rig.read(), "first\n");
        assert!(rig.read().ends_with("xwhy\n"));
    }

    #[test]
    fn the_writer_survives_a_panic_and_never_waits_for_itself() {
        let (sent, results) = channel();
        let (read, reads) = channel();
        let lines: Arc<OnceLock<Lines>> = Arc::default();
        let itself = lines.clone();
        let report = move |_| {
            sent.send(itself.wait().flush(LONG)).unwrap();
            panic!("asked to");
        };
        let go_on = channel().1;
        let lines =
            lines.get_or_init(|| Lines::start(THREAD, Reader { go_on, read }, report).unwrap());
        lines.push(&[b'x'; limits::LOG_QUEUE_BYTES_MAX + 1]);
        lines.push(b"kept\n");
        assert_eq!(results.recv_timeout(LONG / 2), Ok(false));
        lines.push(b"behind it\n");
        assert!(lines.flush(LONG));
        let read: Vec<_> = reads.try_iter().flatten().collect();
        assert_eq!(read, b"kept\nbehind it\n");
    }

    #[test]
    fn a_flush_waits_for_a_write_in_progress() {
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
