//! Asks for passwords on the terminal.
//!
//! The terminal must have its settings back when the process ends, also by a signal, or it shows
//! nothing that is typed and ignores Ctrl-C. rpassword restores them only when it returns, and
//! raises SIGINT before that if Ctrl-C is pressed.

use std::fs::File;
use std::io;
use std::process;
use std::thread;

use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
use tokio::runtime;
use tokio::signal::unix::{SignalKind, signal};

/// The terminal that rpassword uses.
const TERMINAL: &str = "/dev/tty";

/// Asks for passwords, which are not shown. A signal then restores the terminal and ends the
/// process, with the exit code 128 and the number of the signal.
pub(super) fn passwords<const N: usize>(texts: [&str; N]) -> io::Result<Vec<String>> {
    restore_at_signals()?;
    texts.into_iter().map(password).collect()
}

fn password(text: &str) -> io::Result<String> {
    match rpassword::prompt_password(text) {
        // SIGINT was raised, and the other thread ends the process.
        Err(error) if error.kind() == io::ErrorKind::Interrupted => loop {
            thread::park();
        },
        typed => typed,
    }
}

/// Starts the thread that waits for signals, for the rest of the process.
fn restore_at_signals() -> io::Result<()> {
    let terminal = File::open(TERMINAL)?;
    let before = tcgetattr(&terminal)?;
    let runtime = runtime::Builder::new_current_thread().enable_io().build()?;
    let kinds = [
        SignalKind::hangup(),
        SignalKind::interrupt(),
        SignalKind::terminate(),
    ];
    let [mut hangup, mut interrupt, mut terminate] = {
        let _within = runtime.enter();
        let [hangup, interrupt, terminate] = kinds.map(signal);
        [hangup?, interrupt?, terminate?]
    };
    let wait = move || {
        let kind = runtime.block_on(async {
            tokio::select! {
                _ = hangup.recv() => SignalKind::hangup(),
                _ = interrupt.recv() => SignalKind::interrupt(),
                _ = terminate.recv() => SignalKind::terminate(),
            }
        });
        // After SIGHUP there may be no terminal any more.
        let _ = tcsetattr(&terminal, OptionalActions::Now, &before);
        process::exit(128 + kind.as_raw_value())
    };
    let thread = thread::Builder::new().name("signals".to_owned());
    thread.spawn(wait).map(drop)
}
