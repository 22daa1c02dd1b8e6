//! The recent log lines of the policies of one engine, for readers that follow them.
//!
//! Invariant: a writer never waits for a reader. A line that does not fit replaces the oldest one,
//! and a reader that comes too late learns how many lines it missed.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use super::bindings::statehouse::policy::log::Level;
use super::digest::Digest;
use super::locked;
use super::selector::Candidate;
use crate::{clock, limits};

/// A line that a policy wrote. The text is cut, but not escaped.
#[derive(Clone, Debug)]
pub struct Line {
    /// The time of this machine in milliseconds since 1970.
    pub at_ms: u64,
    /// The digest of the policy.
    pub digest: Digest,
    /// The policy's name, version and short digest.
    pub policy: Arc<str>,
    /// The level that the policy chose.
    pub level: Level,
    /// The text, of at most [`GUEST_LOG_BYTES_MAX`](limits::GUEST_LOG_BYTES_MAX) bytes.
    pub text: String,
}

impl Line {
    /// The name of the level.
    pub fn level_name(&self) -> &'static str {
        match self.level {
            Level::Debug => "debug",
            Level::Info => "info",
            Level::Warn => "warn",
            Level::Error => "error",
        }
    }

    /// The policy, for a selector. Name and version are empty if the policy wrote the line before
    /// it described itself.
    pub fn writer(&self) -> Candidate<'_> {
        // Neither a name nor a version contains a space.
        let (name, rest) = self.policy.split_once(' ').unwrap_or_default();
        Candidate {
            digest: self.digest,
            name,
            version: rest.rsplit_once('@').unwrap_or_default().0,
            built_in: false,
        }
    }
}

/// The lines after a position.
#[derive(Debug, Default)]
pub struct Batch {
    /// The lines, the oldest first.
    pub lines: Vec<Line>,
    /// How many lines were replaced before this reader came.
    pub lost: u64,
    /// The position after the last line, for the next read.
    pub next: u64,
}

/// A ring of recent lines.
#[derive(Debug, Default)]
pub struct Lines(Mutex<Ring>);

#[derive(Debug, Default)]
struct Ring {
    /// The number of lines written so far.
    written: u64,
    lines: VecDeque<Line>,
}

impl Lines {
    /// Adds a line, and cuts its text.
    pub(super) fn push(&self, digest: Digest, policy: &Arc<str>, level: Level, text: &str) {
        let line = Line {
            at_ms: clock::wall_ms(),
            digest,
            policy: policy.clone(),
            level,
            text: text[..text.floor_char_boundary(limits::GUEST_LOG_BYTES_MAX)].to_owned(),
        };
        let mut ring = locked(&self.0);
        let oldest = match ring.lines.len() < limits::GUEST_LOG_LINES_KEPT_MAX {
            true => None,
            false => ring.lines.pop_front(),
        };
        ring.written += 1;
        ring.lines.push_back(line);
        drop(ring);
        drop(oldest);
    }

    /// The number of lines written so far: the position after the last line.
    pub fn end(&self) -> u64 {
        locked(&self.0).written
    }

    /// The lines from position `from` on. A position of an earlier run, which lies behind the end,
    /// stands for the oldest line.
    pub fn since(&self, from: u64) -> Batch {
        let ring = locked(&self.0);
        let oldest = ring.written - ring.lines.len() as u64;
        let from = if from > ring.written { oldest } else { from };
        let skipped = usize::try_from(from.saturating_sub(oldest)).unwrap_or(usize::MAX);
        Batch {
            lines: ring.lines.iter().skip(skipped).cloned().collect(),
            lost: oldest.saturating_sub(from),
            next: ring.written,
        }
    }
}

/// A text of a policy on one line: control characters are escaped, and the rest after
/// [`GUEST_LOG_BYTES_MAX`](limits::GUEST_LOG_BYTES_MAX) bytes is cut. Backslashes stay, because the
/// text may quote bytes that are escaped already.
pub fn on_one_line(text: &str) -> String {
    let mut line = String::new();
    for c in text.chars() {
        let before = line.len();
        match c {
            '"' | '\'' | '\\' => line.push(c),
            _ => line.extend(c.escape_debug()),
        }
        if line.len() > limits::GUEST_LOG_BYTES_MAX {
            line.truncate(before);
            break;
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(batch: &Batch) -> Vec<&str> {
        batch.lines.iter().map(|line| &*line.text).collect()
    }

    #[test]
    fn reader_learns_how_many_lines_it_missed() {
        let (lines, policy) = (Lines::default(), Arc::from("a"));
        let push = |text: &str| lines.push(Digest::of(b"a"), &policy, Level::Info, text);
        push("1");
        push("2");
        let batch = lines.since(0);
        assert_eq!(texts(&batch), ["1", "2"]);
        assert_eq!((batch.lost, batch.next), (0, 2));
        assert!(lines.since(2).lines.is_empty());
        push("3");
        assert_eq!(texts(&lines.since(2)), ["3"]);
        for _ in 0..limits::GUEST_LOG_LINES_KEPT_MAX {
            push("x");
        }
        let batch = lines.since(1);
        assert_eq!(batch.lines.len(), limits::GUEST_LOG_LINES_KEPT_MAX);
        assert_eq!(batch.lost, 2);
        // After a restart of the store a reader has a position that is not written yet.
        let batch = lines.since(1 << 40);
        assert_eq!(batch.lines.len(), limits::GUEST_LOG_LINES_KEPT_MAX);
        assert_eq!((batch.lost, batch.next), (0, lines.end()));
    }

    #[test]
    fn line_names_its_writer() {
        let lines = Lines::default();
        for policy in ["rule 1.0@x@01234567", "?@01234567"] {
            lines.push(Digest::of(b"a"), &Arc::from(policy), Level::Info, "");
        }
        let lines = lines.since(0).lines;
        let writers = lines.iter().map(Line::writer);
        let names: Vec<_> = writers.map(|it| (it.name, it.version)).collect();
        assert_eq!(names, [("rule", "1.0@x"), ("", "")]);
    }

    #[test]
    fn long_line_is_cut_between_characters() {
        let (lines, policy) = (Lines::default(), Arc::from("a"));
        let long = "ä".repeat(1 << 20);
        for (text, bytes) in [(&long, 1024), (&format!("a{long}"), 1023)] {
            lines.push(Digest::of(b"a"), &policy, Level::Warn, text);
            let batch = lines.since(0);
            assert_eq!(batch.lines.last().unwrap().text.len(), bytes);
        }
    }

    #[test]
    fn text_on_one_line_is_escaped_and_cut() {
        assert_eq!(on_one_line("it's `a` \"b\" ü"), "it's `a` \"b\" ü");
        let line = on_one_line("a\nb\x1b[2J\\\u{202e}");
        assert_eq!(line, "a\\nb\\u{1b}[2J\\\\u{202e}");
        let cut = on_one_line(&"\x1b".repeat(1 << 20));
        assert!(cut.len() <= limits::GUEST_LOG_BYTES_MAX && cut.ends_with("\\u{1b}"));
    }
}
