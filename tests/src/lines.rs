//! Reads the output lines of a process in the background, so that a test can wait for a line with a
//! timeout.

use std::{
    io::{BufRead, BufReader, Read},
    sync::{Arc, Condvar, Mutex},
    thread,
    time::{Duration, Instant},
};

/// The lines so far, and whether the stream has ended.
#[derive(Clone, Default)]
pub struct Lines(Arc<(Mutex<Written>, Condvar)>);

#[derive(Default)]
struct Written {
    lines: Vec<String>,
    ended: bool,
}

impl Lines {
    /// Reads a stream to its end.
    pub fn follow(stream: impl Read + Send + 'static) -> Lines {
        let lines = Lines::default();
        let writer = lines.clone();
        thread::spawn(move || {
            let mut reader = BufReader::new(stream);
            let mut line = Vec::new();
            while reader.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
                if line.ends_with(b"\n") {
                    line.pop();
                }
                let text = String::from_utf8_lossy(&line).into_owned();
                line.clear();
                writer.0.0.lock().unwrap().lines.push(text);
                writer.0.1.notify_all();
            }
            writer.0.0.lock().unwrap().ended = true;
            writer.0.1.notify_all();
        });
        lines
    }

    pub fn all(&self) -> Vec<String> {
        self.0.0.lock().unwrap().lines.clone()
    }

    /// Waits for a line that `wanted` accepts. Returns `None` at the end of the stream or the
    /// timeout.
    pub fn wait(&self, timeout: Duration, wanted: impl Fn(&str) -> bool) -> Option<String> {
        self.until(timeout, |lines| {
            lines.iter().find(|line| wanted(line)).cloned()
        })
    }

    /// Waits for the line with this number, counted from 0. Returns `None` at the end of the stream
    /// or the timeout.
    pub fn at(&self, number: usize, timeout: Duration) -> Option<String> {
        self.until(timeout, |lines| lines.get(number).cloned())
    }

    /// Prints the last 60 lines of the log of `process`, which has ended, after a failed test.
    pub(crate) fn print_last(&self, process: &str) {
        // The reading thread may lag behind the end of the process.
        self.wait(Duration::from_secs(1), |_| false);
        eprintln!("--- {process} logged (its last 60 lines)");
        let log = self.all();
        for line in &log[log.len().saturating_sub(60)..] {
            eprintln!("{line}");
        }
        eprintln!("---");
    }

    fn until(
        &self,
        timeout: Duration,
        look: impl Fn(&[String]) -> Option<String>,
    ) -> Option<String> {
        let end = Instant::now() + timeout;
        let mut state = self.0.0.lock().unwrap();
        loop {
            if let Some(line) = look(&state.lines) {
                return Some(line);
            }
            let left = end.saturating_duration_since(Instant::now());
            if state.ended || left.is_zero() {
                return None;
            }
            state = self.0.1.wait_timeout(state, left).unwrap().0;
        }
    }
}
