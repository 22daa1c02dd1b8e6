//! A command in the background. Drop kills it.

use std::{
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use crate::lines::Lines;

/// Long enough to compile a policy.
const PATIENCE: Duration = Duration::from_secs(60);

/// The process of a command, and the lines of its standard output.
pub struct Background {
    pub child: Child,
    /// The lines of its standard output.
    pub lines: Lines,
}

impl Background {
    pub fn start(command: &mut Command) -> Background {
        let mut child = spawn(command.stdin(Stdio::null()).stdout(Stdio::piped()));
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

/// A server of another project, and its log, which is its standard error. Drop kills it, and prints
/// the end of the log if the test failed.
pub(crate) struct Foreign {
    name: String,
    pub(crate) child: Child,
    pub(crate) log: Lines,
}

impl Foreign {
    pub(crate) fn start(name: &str, command: &mut Command) -> Foreign {
        let command = command.stdin(Stdio::null()).stdout(Stdio::null());
        let mut child = spawn(command.stderr(Stdio::piped()));
        Foreign {
            name: name.to_owned(),
            log: Lines::follow(child.stderr.take().unwrap()),
            child,
        }
    }

    pub(crate) fn runs(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Ends the process with `kill -9`, unless it has ended by itself.
    pub(crate) fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        self.end();
        if thread::panicking() {
            self.log.print_last(&self.name);
        }
    }
}

fn spawn(command: &mut Command) -> Child {
    command.spawn().unwrap_or_else(|error| {
        panic!("{command:?}: {error}. `bash tests/run --install` installs it.")
    })
}
