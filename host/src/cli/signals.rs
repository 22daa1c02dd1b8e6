//! The signals that end programs. A command that has a session must close it before it ends, since
//! each session that it leaves takes the place of another client until it expires. A closed session
//! has no subscriptions, and expires after the time that CONNECT asked for: rumqttc cannot send a
//! Session Expiry Interval with DISCONNECT.

use std::fs;
use std::future::{pending, poll_fn};
use std::sync::mpsc;
use std::task::Poll;
use std::thread;
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;
use tokio::time::sleep;

use super::output::Failure;

/// How long a command may take to end after a signal.
const END_WAIT: Duration = Duration::from_secs(3);

/// The signals that end programs: their names, their numbers on Linux, and their streams. A signal
/// that the caller ignores stays ignored, also by a command that it runs, as `nohup` demands.
pub(super) struct Signals(Vec<(Caught, Signal)>);

#[derive(Clone, Copy)]
pub(super) struct Caught {
    pub(super) name: &'static str,
    number: u8,
}

impl Caught {
    /// The failure of a command that it has interrupted.
    pub(super) fn failure(self, why: &str) -> Failure {
        Failure::new(self.exit_code(), why)
    }

    /// The exit code that shells report for a process that the signal has killed.
    fn exit_code(self) -> u8 {
        128 + self.number
    }
}

impl Signals {
    pub(super) fn listen() -> Result<Self, Failure> {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let all = [("HUP", 1), ("INT", 2), ("QUIT", 3), ("TERM", 15)];
        let caught = all.into_iter().filter(|it| !is_ignored(&status, it.1));
        let listen = |(name, number)| {
            let kind = SignalKind::from_raw(i32::from(number));
            Ok((Caught { name, number }, signal(kind)?))
        };
        caught.map(listen).collect::<Result<_, _>>().map(Self)
    }

    pub(super) async fn next(&mut self) -> Caught {
        poll_fn(|context| {
            let mut all = self.0.iter_mut();
            let caught = all.find_map(|(caught, signal)| {
                let is_caught = signal.poll_recv(context).is_ready();
                is_caught.then_some(*caught)
            });
            caught.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    /// The second signal from now on. The first one may be that which has ended the command.
    pub(super) async fn second(&mut self) -> Caught {
        self.next().await;
        self.next().await
    }
}

/// Catches signals from now on, and waits for the first one. If the process still runs [`END_WAIT`]
/// later, it ends. Further signals change nothing: `timeout` sends its signal twice, and the second
/// one must not prevent that the session is closed.
///
/// Catches them on a thread of its own, because a command may be blocked in a read of standard
/// input or a write to standard output. If no thread can be started, signals keep their default
/// action.
pub(super) fn interruption() -> impl Future<Output = Failure> {
    let (sender, caught) = oneshot::channel();
    let (begun, begins) = mpsc::channel();
    let thread = thread::Builder::new().name("signals".to_owned());
    // A failure drops the senders.
    let _ = thread.spawn(move || end_at_signal(sender, &begun));
    let _ = begins.recv();
    async move {
        match caught.await {
            Ok(caught) => caught.failure(&format!("interrupted by SIG{}", caught.name)),
            Err(_) => pending().await,
        }
    }
}

/// Sends the first signal, and ends the process if the command does not.
fn end_at_signal(command: oneshot::Sender<Caught>, begun: &mpsc::Sender<()>) {
    let Ok(runtime) = Builder::new_current_thread().enable_all().build() else {
        return;
    };
    runtime.block_on(async {
        let Ok(mut signals) = Signals::listen() else {
            return;
        };
        // The command waits for it.
        let _ = begun.send(());
        let first = signals.next().await;
        // A command that does not wait any more is about to end.
        let _ = command.send(first);
        sleep(END_WAIT).await;
        std::process::exit(first.exit_code().into());
    });
}

/// Whether the process with this `/proc/PID/status` ignores a signal.
fn is_ignored(status: &str, number: u8) -> bool {
    let mut lines = status.lines();
    let mask = lines.find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|it| u64::from_str_radix(it.trim(), 16).ok());
    mask.is_some_and(|mask| mask & (1 << (number - 1)) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_read_from_the_status_of_the_process() {
        let status = "Name:\tx\nSigBlk:\t0000000000000006\nSigIgn:\t0000000000001001\n";
        assert!(is_ignored(status, 1));
        assert!(!is_ignored(status, 2) && !is_ignored(status, 15));
        assert!(!is_ignored("", 1));
    }
}
