//! How far something is that takes a while. Enters: how much is done. Leaves: on a terminal one line of standard
//! error that is written over, elsewhere a line now and then. It never writes to standard output.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

/// How often a bar is drawn: smooth to the eye, and nothing to the work.
const DRAW_EVERY: Duration = Duration::from_millis(100);

/// How often a line is written where nobody watches it.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Characters of the bar itself.
const BAR_WIDTH: u64 = 20;

/// A bar, or lines.
pub(super) struct Progress {
    /// When it was first called: what comes before is no part of the work.
    began: Option<Instant>,
    last: Instant,
    is_terminal: bool,
    drawn: bool,
}

impl Progress {
    pub(super) fn new() -> Self {
        Self {
            began: None,
            last: Instant::now(),
            is_terminal: io::stderr().is_terminal(),
            drawn: false,
        }
    }

    /// So far: `done` of `total` records, and what else there is to say.
    pub(super) fn show(&mut self, done: u64, total: u64, says: impl FnOnce() -> String) {
        let began = *self.began.get_or_insert_with(Instant::now);
        self.share(done, total, || {
            records(done, total, began.elapsed(), &says())
        });
    }

    /// So far: this share of the work, whatever it is counted in, and all that there is to say.
    pub(super) fn share(&mut self, done: u64, total: u64, says: impl FnOnce() -> String) {
        let every = if self.is_terminal {
            DRAW_EVERY
        } else {
            LINE_EVERY
        };
        if self.last.elapsed() < every {
            return;
        }
        self.last = Instant::now();
        let line = line(done, total, &says(), self.is_terminal);
        let mut out = io::stderr();
        // Where nobody listens there is nothing to do about it.
        let _ = if self.is_terminal {
            self.drawn = true;
            write!(out, "\r{line}\x1b[K").and_then(|()| out.flush())
        } else {
            writeln!(out, "{line}")
        };
    }

    /// Makes room for a line of something else.
    pub(super) fn clear(&mut self) {
        if self.drawn {
            let _ = write!(io::stderr(), "\r\x1b[K");
            self.drawn = false;
        }
    }
}

fn records(done: u64, total: u64, took: Duration, says: &str) -> String {
    let done = done.min(total);
    let per_second = (done as f64 / took.as_secs_f64().max(0.001)) as u64;
    format!("{done}/{total} records  {per_second}/s  {says}")
}

fn line(done: u64, total: u64, says: &str, bar: bool) -> String {
    let done = done.min(total);
    let percent = (done * 100).checked_div(total).unwrap_or(100);
    let text = format!("{percent:3} %  {says}");
    if !bar {
        return text;
    }
    let filled = (percent * BAR_WIDTH / 100) as usize;
    let bar = format!(
        "{}{}",
        "█".repeat(filled),
        "░".repeat(BAR_WIDTH as usize - filled)
    );
    format!("{bar} {text}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_how_far_it_is() {
        let says = records(50, 200, Duration::from_secs(1), "3 differ");
        assert_eq!(
            line(50, 200, &says, false),
            " 25 %  50/200 records  50/s  3 differ"
        );
        let full = line(200, 200, "", true);
        assert!(full.starts_with(&"█".repeat(20)), "{full}");
        assert!(!full.contains('░') && full.contains("100 %"), "{full}");
        // More than there seemed to be, or nothing at all.
        assert!(records(201, 200, Duration::ZERO, "").contains("200/200"));
        assert!(line(201, 200, "", true).contains("100 %"));
        assert!(line(0, 0, "", true).contains("100 %"));
    }
}
