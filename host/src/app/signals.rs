//! Waits for SIGTERM and SIGINT on a thread of its own. Ignores SIGHUP until files are reloaded at
//! it: a hook that renews certificates may send it during a long start.

use std::sync::mpsc;
use std::thread;

use anyhow::Context;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// Whether a signal asks the process to stop.
pub(super) struct Signals {
    received: watch::Receiver<Option<&'static str>>,
}

/// Replaces the default action of SIGHUP for the rest of the process. Must be called within a
/// runtime.
pub(super) fn ignore_hangup() -> anyhow::Result<()> {
    let ignored = signal(SignalKind::hangup()).context("cannot ignore SIGHUP")?;
    drop(ignored);
    Ok(())
}

impl Signals {
    /// Starts to wait. From now on a signal does not end the process on its own.
    pub(super) fn start() -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .context("cannot wait for signals")?;
        let (mut terminate, mut interrupt) = {
            let _entered = runtime.enter();
            // This replaces the default action for the rest of the process.
            (
                signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?,
                signal(SignalKind::interrupt()).context("cannot wait for SIGINT")?,
            )
        };
        let (send, received) = watch::channel(None);
        let (begin, begun) = mpsc::channel::<Runtime>();
        let wait = move || {
            let Ok(runtime) = begun.recv() else { return };
            let signal = runtime.block_on(async {
                tokio::select! {
                    _ = terminate.recv() => "SIGTERM",
                    _ = interrupt.recv() => "SIGINT",
                }
            });
            // The receiver is dropped if the start has failed.
            _ = send.send(Some(signal));
        };
        let started = thread::Builder::new()
            .name("signals".to_owned())
            .spawn(wait);
        match started {
            Ok(_) => {
                // The thread waits for it.
                _ = begin.send(runtime);
                Ok(Self { received })
            }
            Err(error) => {
                // The caller may be a task, in which dropping a runtime panics.
                runtime.shutdown_background();
                Err(error).context("cannot start the thread that waits for signals")
            }
        }
    }

    /// Whether a signal has arrived.
    pub(super) fn received_any(&self) -> bool {
        self.received.borrow().is_some()
    }

    /// Waits for a signal and returns its name.
    pub(super) async fn wait(&self) -> &'static str {
        let mut received = self.received.clone();
        // The sender never closes the channel: its thread lives as long as the process.
        let name = received.wait_for(Option::is_some).await;
        name.ok().and_then(|it| *it).unwrap_or_default()
    }
}
