//! SIGTERM and SIGINT, waited for on a thread of its own.

use std::thread;

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// Whether the process is told to stop.
pub(super) struct Signals {
    told: watch::Receiver<Option<&'static str>>,
}

impl Signals {
    /// From now on a signal does not end the process by itself.
    pub(super) fn start() -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .build()
            .context("cannot wait for signals")?;
        let (mut terminate, mut interrupt) = {
            let _entered = runtime.enter();
            (
                signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?,
                signal(SignalKind::interrupt()).context("cannot wait for SIGINT")?,
            )
        };
        let (tell, told) = watch::channel(None);
        let wait = move || {
            let signal = runtime.block_on(async {
                tokio::select! {
                    _ = terminate.recv() => "SIGTERM",
                    _ = interrupt.recv() => "SIGINT",
                }
            });
            // Nobody listens where the start failed meanwhile.
            _ = tell.send(Some(signal));
        };
        thread::Builder::new()
            .name("signals".to_owned())
            .spawn(wait)
            .context("cannot start the thread that waits for signals")?;
        Ok(Self { told })
    }

    /// Whether one has come.
    pub(super) fn came(&self) -> bool {
        self.told.borrow().is_some()
    }

    /// Waits for one, and says which.
    pub(super) async fn wait(&self) -> &'static str {
        let mut told = self.told.clone();
        // It ends with a word: the thread that gives it lives as long as the process.
        let said = told.wait_for(Option::is_some).await;
        said.ok().and_then(|it| *it).unwrap_or_default()
    }
}
