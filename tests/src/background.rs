//! A command in the background. Drop kills it.

use std::{
    process::{Child, Command, Stdio},
    time::Duration,
};

use crate::lines::Lines;

/// Long enough to compile a policy.
const PATIENCE: Duration = Duration::from_secs(60);

/// The process of a command, and the lines of its standard output.
pub struct Background {
    /// The process.
    pub child: Child,
    /// The lines of its standard output.
    pub lines: Lines,
}

impl Background {
    /// Starts a command.
    pub fn start(command: &mut Command) -> Background {
        let started = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut child = started.unwrap_or_else(|error| {
            panic!("{command:?}: {error}. `bash tests/run --install` installs it.")
        });
        let lines = Lines::follow(child.stdout.take().unwrap());
        Background { child, lines }
    }

    /// Waits for a line that contains this text.
    pub fn wait_for(&self, text: &str) -> String {
        let line = self.lines.wait(PATIENCE, |line| line.contains(text));
        line.unwrap_or_else(|| panic!("no {text:?} in {:#?}", self.lines.all()))
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // An error means that the process has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
