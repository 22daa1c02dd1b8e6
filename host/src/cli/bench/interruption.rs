//! The signals that end a benchmark early.

use std::io::{self, IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc;
use std::thread;

use tokio::runtime::Builder;
use tokio::signal::unix::{SignalKind, signal};

use crate::cli::output::{Failure, notice};

/// SIGINT (Ctrl-C) and SIGTERM. The first signal ends the measurement, so that the keys of the
/// benchmark can be removed. The second one ends the process at once.
pub(super) struct Interruption(Arc<AtomicU8>);

impl Interruption {
    /// Replaces the default action of the signals for the rest of the process. The first signal
    /// prints its `consequence`.
    pub(super) fn watch(consequence: &'static str) -> Result<Self, Failure> {
        let received = Arc::new(AtomicU8::new(0));
        let (begun, begins) = mpsc::channel();
        let shared = received.clone();
        let work = move || {
            let runtime = Builder::new_current_thread().enable_io().build();
            let waiting = runtime.and_then(|it| it.block_on(wait(&shared, consequence, &begun)));
            if let Err(error) = waiting {
                // The receiver waits for it.
                let _ = begun.send(Err(error));
            }
        };
        let thread = thread::Builder::new().name("signals".to_owned());
        let started = match thread.spawn(work) {
            Ok(_) => begins.recv().map_err(io::Error::other).flatten(),
            Err(error) => Err(error),
        };
        match started {
            Ok(()) => Ok(Self(received)),
            Err(error) => Err(Failure::transport(format!(
                "cannot wait for signals: {error}"
            ))),
        }
    }

    /// The number of the signal that has arrived, if one has.
    pub(super) fn signal(&self) -> Option<u8> {
        Some(self.0.load(Ordering::Relaxed)).filter(|it| *it != 0)
    }
}

/// Waits for both signals without end. Fails if the system does not report signals.
async fn wait(
    received: &AtomicU8,
    consequence: &str,
    begun: &mpsc::Sender<io::Result<()>>,
) -> io::Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    // The receiver waits for it.
    let _ = begun.send(Ok(()));
    loop {
        let (name, number) = tokio::select! {
            _ = interrupt.recv() => ("SIGINT", 2),
            _ = terminate.recv() => ("SIGTERM", 15),
        };
        if received.swap(number, Ordering::Relaxed) != 0 {
            std::process::exit(128 + i32::from(number));
        }
        if io::stderr().is_terminal() {
            // The line has a bar. If stderr fails, there is no other place to report to.
            let _ = writeln!(io::stderr());
        }
        notice(&format!("{name}: {consequence}"));
    }
}
