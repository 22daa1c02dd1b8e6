//! Shows the progress of long commands on standard error: a bar on a terminal, otherwise a line
//! from time to time. It must never write to standard output.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use rustix::termios::tcgetwinsize;

/// How often a bar is drawn: often enough to look smooth, at negligible cost.
const DRAW_EVERY: Duration = Duration::from_millis(100);

/// How often a line is written if standard error is not a terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Characters of the bar.
const BAR_WIDTH: u64 = 20;

pub(super) struct Progress {
    /// The time of the first call, since earlier work does not count.
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
            is_terminal: io::stderr().is_terminal() && !is_dumb(),
            drawn: false,
        }
    }

    /// Shows that `done` of `total` records are processed, with a text.
    pub(super) fn show(&mut self, done: u64, total: u64, status: impl FnOnce() -> String) {
        let began = *self.began.get_or_insert_with(Instant::now);
        self.share(done, total, || {
            records(done, total, began.elapsed(), &status())
        });
    }

    /// Shows the share of work that is done, in any unit, with a text.
    pub(super) fn share(&mut self, done: u64, total: u64, status: impl FnOnce() -> String) {
        if self.is_due() {
            self.draw(&line(done, total, &status(), self.is_terminal));
        }
    }

    /// Shows a text about work whose end is unknown.
    pub(super) fn text(&mut self, status: impl FnOnce() -> String) {
        if self.is_due() {
            self.draw(&status());
        }
    }

    fn is_due(&mut self) -> bool {
        let every = if self.is_terminal {
            DRAW_EVERY
        } else {
            LINE_EVERY
        };
        let is_due = self.last.elapsed() >= every;
        if is_due {
            self.last = Instant::now();
        }
        is_due
    }

    fn draw(&mut self, line: &str) {
        let mut out = io::stderr();
        // An error of stderr is ignored, since there is no other place to report it.
        let _ = if self.is_terminal {
            self.drawn = true;
            let line = fitting(line, tcgetwinsize(&out).map_or(0, |it| it.ws_col));
            write!(out, "\r{line}\x1b[K").and_then(|()| out.flush())
        } else {
            writeln!(out, "{line}")
        };
    }

    /// Erases the bar before other output.
    pub(super) fn clear(&mut self) {
        if self.drawn {
            let _ = write!(io::stderr(), "\r\x1b[K");
            self.drawn = false;
        }
    }
}

/// A command that fails reports it after its progress is dropped.
impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Whether the terminal has no control sequences.
fn is_dumb() -> bool {
    std::env::var_os("TERM").is_some_and(|it| it == "dumb")
}

/// The beginning of a line that leaves the last column free, because a line that wraps could not be
/// erased. Zero columns are an unknown number.
fn fitting(line: &str, columns: u16) -> String {
    match columns {
        0 => line.to_owned(),
        columns => line.chars().take(usize::from(columns) - 1).collect(),
    }
}

fn records(done: u64, total: u64, took: Duration, status: &str) -> String {
    let done = done.min(total);
    let per_second = (done as f64 / took.as_secs_f64().max(0.001)) as u64;
    format!("{done}/{total} records  {per_second}/s  {status}")
}

fn line(done: u64, total: u64, status: &str, bar: bool) -> String {
    let done = done.min(total);
    let percent = (done * 100).checked_div(total).unwrap_or(100);
    let text = format!("{percent:3} %  {status}");
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
    fn a_line_is_cut_to_the_columns_of_the_terminal() {
        assert_eq!(fitting("█░ 50 %", 0), "█░ 50 %");
        assert_eq!(fitting("█░ 50 %", 8), "█░ 50 %");
        assert_eq!(fitting("█░ 50 %", 7), "█░ 50 ");
        assert_eq!(fitting("█░ 50 %", 1), "");
    }

    #[test]
    fn a_line_shows_the_progress() {
        let status = records(50, 200, Duration::from_secs(1), "3 differ");
        assert_eq!(
            line(50, 200, &status, false),
            " 25 %  50/200 records  50/s  3 differ"
        );
        let full = line(200, 200, "", true);
        assert!(full.starts_with(&"█".repeat(20)), "{full}");
        assert!(!full.contains('░') && full.contains("100 %"), "{full}");
        // More than the expected total, or a total of zero.
        assert!(records(201, 200, Duration::ZERO, "").contains("200/200"));
        assert!(line(201, 200, "", true).contains("100 %"));
        assert!(line(0, 0, "", true).contains("100 %"));
    }
}
