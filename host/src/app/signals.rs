//! Waits for SIGTERM and SIGINT on a thread of its own. Ignores SIGHUP until files are reloaded at
//! it: a hook that renews certificates may send it during a long start. Ignores SIGXFSZ, so that a
//! file that grows beyond its limit is an error with words.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;

use anyhow::Context;
use rustix::process::Signal;
use tokio::runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use statehouse_server::logging;

/// Whether a signal asks the process to stop.
pub(super) struct Signals {
    received: watch::Receiver<Option<&'static str>>,
    /// Whether a part of the process waits for it.
    is_awaited: Arc<AtomicBool>,
}

/// Replaces the default action of SIGHUP for the rest of the process. Must be called within a
/// runtime.
pub(super) fn ignore_hangup() -> anyhow::Result<()> {
    drop(signal(SignalKind::hangup()).context("cannot ignore SIGHUP")?);
    Ok(())
}

/// Replaces the default action of SIGXFSZ for the rest of the process: a write beyond the limit of
/// file sizes then fails. Programs that this process starts keep the default action, because they
/// do not inherit handlers.
///
/// # Errors
/// If the system refuses the handler, or has no free file descriptor for it.
pub fn ignore_file_size() -> io::Result<()> {
    let runtime = runtime::Builder::new_current_thread().enable_io().build()?;
    let _entered = runtime.enter();
    drop(signal(SignalKind::from_raw(Signal::XFSZ.as_raw()))?);
    Ok(())
}

impl Signals {
    /// Starts to wait. Until [`Self::take_over`] a signal ends the process at once, even during a
    /// long recovery. The default action is not enough, since a process with the id 1, as in a
    /// container, has none.
    pub(super) fn start() -> anyhow::Result<Self> {
        let runtime = runtime::Builder::new_current_thread()
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
        let is_awaited = Arc::<AtomicBool>::default();
        let awaited = is_awaited.clone();
        let wait = move || {
            let signal = runtime.block_on(async {
                tokio::select! {
                    _ = terminate.recv() => "SIGTERM",
                    _ = interrupt.recv() => "SIGINT",
                }
            });
            // First, so that a part that takes over now finds the signal.
            send.send_replace(Some(signal));
            if !awaited.load(SeqCst) {
                tracing::info!("{signal}: stopping before the start is complete");
                logging::exit(0);
            }
        };
        thread::Builder::new()
            .name("signals".to_owned())
            .spawn(wait)
            .context("cannot start the thread that waits for signals")?;
        Ok(Self {
            received,
            is_awaited,
        })
    }

    /// From now on a signal does not end the process on its own, but [`Self::wait`].
    pub(super) fn take_over(&self) {
        self.is_awaited.store(true, SeqCst);
    }

    /// Waits for a signal and returns its name.
    pub(super) async fn wait(&self) -> &'static str {
        let mut received = self.received.clone();
        // The sender never closes the channel: its thread lives as long as the process.
        let name = received.wait_for(Option::is_some).await;
        name.ok().and_then(|it| *it).unwrap_or_default()
    }
}
