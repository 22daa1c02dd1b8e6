//! Log lines on their way to stderr, which somebody reads slowly, or nobody at all.
//!
//! What enters: lines of any thread, also of those that hold the store's lock; none of them ever waits. What leaves: the same
//! lines in their order, from a thread of its own. Lines that find no room are dropped and counted, and a line says so once
//! there is room again. What was logged before an end, a panic's included, is written before it.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::panic;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use tracing_subscriber::fmt::MakeWriter;

use crate::limits;

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
        told.push(format!("\nthread '{name}' {panic}\n{backtrace}").as_bytes());
        // It may be the last thing that this process does.
        told.flush(limits::LOG_FLUSH_WAIT);
    }));
    Ok(lines)
}

/// Waits until everything that was logged by now is written. False where that takes too long: nobody reads stderr.
pub fn flush() -> bool {
    let lines = LINES.get();
    lines.is_none_or(|lines| lines.flush(limits::LOG_FLUSH_WAIT))
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
    /// Nothing does, and all is written.
    drained: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: Vec<u8>,
    /// Whether the thread is at what it took before.
    writing: bool,
    dropped: u64,
}

impl Lines {
    /// Starts the thread that writes to `out`. It lets `tell` say how many lines were dropped so far, once there is room.
    fn start(
        out: impl Write + Send + 'static,
        tell: impl Fn(u64) + Send + 'static,
    ) -> io::Result<Self> {
        let lines = Self(Arc::default());
        let writer = lines.clone();
        let run = move || writer.write_to(out, tell);
        thread::Builder::new().name("log".to_owned()).spawn(run)?;
        Ok(lines)
    }

    /// Nothing that panics is done under it.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        (self.0.queue.lock()).unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, line: &[u8]) {
        let mut queue = self.lock();
        if queue.waiting.len() + line.len() > limits::LOG_QUEUE_BYTES_MAX {
            queue.dropped += 1;
            return;
        }
        queue.waiting.extend_from_slice(line);
        drop(queue);
        self.0.filled.notify_one();
    }

    fn flush(&self, wait: Duration) -> bool {
        let busy = |queue: &mut Queue| queue.writing || !queue.waiting.is_empty();
        let waited = self.0.drained.wait_timeout_while(self.lock(), wait, busy);
        let (_queue, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        !waited.timed_out()
    }

    /// Takes what waits, again and again. There is room for a word about what was dropped before it, so it comes behind it.
    fn write_to(&self, mut out: impl Write, tell: impl Fn(u64)) {
        let mut told = 0;
        // While it does, words about that would be one more line that cannot be written.
        let mut fails = false;
        loop {
            let (chunk, dropped) = self.take();
            if dropped > told && !fails {
                told = dropped;
                tell(dropped);
            }
            let written = write(&mut out, &chunk);
            fails = written < chunk.len();
            let lost = chunk[written..].iter().filter(|it| **it == b'\n').count();
            self.lock().dropped += lost as u64;
        }
    }

    /// What waits, once something does; and how many lines were dropped by then.
    fn take(&self) -> (Vec<u8>, u64) {
        let mut queue = self.lock();
        queue.writing = false;
        while queue.waiting.is_empty() {
            self.0.drained.notify_all();
            let filled = self.0.filled.wait(queue);
            queue = filled.unwrap_or_else(PoisonError::into_inner);
        }
        queue.writing = true;
        (std::mem::take(&mut queue.waiting), queue.dropped)
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
