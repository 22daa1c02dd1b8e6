//! `statehouse lock`: runs a command while it holds a lock, and exits with the command's exit code.
//! The command must never continue to run after the lease is lost.

mod status;

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::getpgrp;
use rustix::termios::tcgetpgrp;
use statehouse_client::{Client, Lock, LockOptions, parse_duration};
use tokio::process::{Child, Command};
use tokio::time::{sleep, timeout};

use super::output::{Exit, Failure, notice, one_line, printable};
use super::remote::Remote;
use super::signals::Signals;
use super::store::Place;

/// The time between SIGTERM and SIGKILL for a command that has lost its lock. It is short, since
/// another holder may already run.
const TERMINATE_GRACE: Duration = Duration::from_secs(10);

/// The time to try to release a lock whose lease has ended, since a late renewal may have acquired
/// it again.
const RELEASE_LOST_WAIT: Duration = Duration::from_secs(1);

/// The pause between two checks whether the group of a stopped command has ended.
const GROUP_PAUSE: Duration = Duration::from_millis(100);

/// Longest interruption for which the broker keeps the session. A longer one costs nothing, because
/// every request can be repeated; the session of a killed command takes a place until then.
const INTERRUPTION_MAX: Duration = Duration::from_secs(60);

/// Shortest lease. With a shorter one, most responses would arrive too late to hold the lock.
const LEASE_MIN: Duration = Duration::from_millis(100);

/// Longest pause between attempts to renew a lease.
const RENEW_PAUSE_MAX: Duration = Duration::from_secs(1);

/// Run a command while holding a lock, or show who holds it
///
/// Waits for the lock, renews its lease while the command runs, and releases it afterwards. Waiting
/// clients get a free lock in no particular order, so a short --wait may elapse although the lock
/// was free meanwhile.
///
/// The exit code is the command's (128 + the signal that killed it); 1 if --wait elapses first; 126
/// or 127 if the command cannot be run. If the lease is lost, the command gets SIGTERM, then
/// SIGKILL after ten seconds, and the exit code is 3. If this program itself is killed with
/// SIGKILL, its command keeps running, and the next holder starts when the lease ends. Only the
/// fencing token then protects what both write.
///
/// SIGHUP, SIGINT, SIGQUIT and SIGTERM are forwarded to the command. Without a controlling
/// terminal, as in a service, signals reach its whole process group. On a terminal they reach only
/// the command itself, which must end its own processes. In the foreground of a terminal SIGINT and
/// SIGQUIT are not forwarded, since the terminal sends them to the command too. To end the command
/// from elsewhere, send SIGTERM. A second signal during the release of the lock ends this program
/// within two seconds, and the lock ends with its lease.
///
/// The command gets the lock's name in STATEHOUSE_LOCK and the fencing token in
/// STATEHOUSE_FENCING_TOKEN. Earlier holders cannot overwrite what the command writes with that
/// token.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse lock nightly -- ./backup.sh
  statehouse lock nightly --wait 0s -- ./backup.sh || echo \"runs on another machine\"
  statehouse lock nightly --status
  statehouse lock valve -- sh -c \\
    'statehouse set valve/position open --fencing-token \"$STATEHOUSE_FENCING_TOKEN\"'")]
pub(super) struct Args {
    /// The name of the lock: a key of the store
    name: OsString,

    /// How long the lock stays held if this program, the machine or the network fails: at least
    /// 100ms, and several times as long as a response of the store takes
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_lease)]
    lease: Duration,

    /// How long to wait for the lock [default: without limit]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    wait: Option<Duration>,

    /// The name of the holder, stored as the value of the key [default: the client id]. Two holders
    /// with the same name hold the lock together, and the first one that ends releases it for both
    #[arg(long, value_name = "NAME", allow_hyphen_values = true)]
    holder: Option<OsString>,

    /// Print the holder of the lock, since when it holds the lock, when it renewed the lock last,
    /// and when the lock ends unless it is renewed. Exit code 1 if it is free. The lines `since`
    /// and `renewed` are from the history in the data directory or of the admin API. Without them
    /// `since` is missing, and `renewed` may be up to a minute too late
    #[arg(long, conflicts_with_all = ["wait", "holder", "command"])]
    status: bool,

    /// The command and its arguments
    #[arg(
        last = true,
        required_unless_present = "status",
        value_name = "COMMAND"
    )]
    command: Vec<OsString>,

    #[command(flatten)]
    remote: Remote,

    #[command(flatten)]
    place: Place,
}

fn parse_lease(text: &str) -> Result<Duration, String> {
    match parse_duration(text) {
        Ok(lease) if lease >= LEASE_MIN => Ok(lease),
        Ok(_) => Err(format!(
            "too short to be held: the shortest lease is {} ms",
            LEASE_MIN.as_millis()
        )),
        Err(error) => Err(error.to_string()),
    }
}

pub(super) async fn run(mut args: Args) -> Result<Exit, Failure> {
    args.remote.heed(&args.place);
    if args.status {
        return status::run(&args).await;
    }
    let interruption = args.lease.min(INTERRUPTION_MAX);
    let work = async |client: &Client| run_locked(client, &args).await;
    args.remote.ask_despite_signals(interruption, work).await
}

async fn run_locked(client: &Client, args: &Args) -> Result<Exit, Failure> {
    // Signals are caught from here on, so that none leaves the lock held. Before, they end the
    // process.
    let mut signals = Signals::listen()?;
    let Some(mut lock) = acquire(client, args, &mut signals).await? else {
        return Err(Failure::negative(format!(
            "the lock {} was not acquired in time: it is held by another client, or the store answers too slowly",
            printable(args.name.as_bytes())
        )));
    };
    let result = match spawn(args, &lock) {
        Ok(running) => supervise(running, &mut lock, args.lease, &mut signals).await,
        Err(failure) => Err(failure),
    };
    release(lock, &mut signals).await?;
    result
}

async fn acquire(
    client: &Client,
    args: &Args,
    signals: &mut Signals,
) -> Result<Option<Lock>, Failure> {
    let holder = match &args.holder {
        Some(holder) => holder.clone().into_vec(),
        None => client.id().as_bytes().to_vec(),
    };
    let options = LockOptions {
        holder: Some(holder.clone().into()),
        lease: args.lease,
        wait: args.wait,
    };
    let name = args.name.as_bytes();
    tokio::select! {
        lock = client.lock(name, options) => Ok(lock?),
        signal = signals.next() => {
            let last = tokio::select! {
                // A request that acquires the lock may be in flight; this one is executed after it.
                _ = client.vdel(name, holder, None) => signal,
                second = signals.next() => second,
            };
            Err(last.failure("interrupted while waiting for the lock"))
        }
    }
}

/// A command that runs under the lock.
struct Running {
    child: Child,
    /// The target of signals, as `kill` takes it: the process, or its group.
    target: String,
    has_own_group: bool,
}

fn spawn(args: &Args, lock: &Lock) -> Result<Running, Failure> {
    // clap requires at least one argument.
    let (program, arguments) = args
        .command
        .split_first()
        .ok_or_else(|| Failure::usage("name a command after --"))?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env("STATEHOUSE_LOCK", &args.name)
        .env("STATEHOUSE_FENCING_TOKEN", lock.fencing_token().to_string());
    // On a terminal another group could not read from it, and Ctrl-Z would stop only this program.
    let has_own_group = File::open("/dev/tty").is_err();
    if has_own_group {
        command.process_group(0);
    }
    let child = command.spawn().map_err(|error| {
        // The exit codes that shells use.
        let code = match error.kind() {
            io::ErrorKind::NotFound => 127,
            _ => 126,
        };
        let program = printable(program.as_bytes());
        Failure::new(code, format!("cannot run {program}: {error}"))
    })?;
    // A child that was not waited for has an id.
    let id = child.id().unwrap_or_default();
    let group = if has_own_group { "-" } else { "" };
    Ok(Running {
        child,
        target: format!("{group}{id}"),
        has_own_group,
    })
}

/// Releases the lock. Fails only if signals interrupt it.
async fn release(lock: Lock, signals: &mut Signals) -> Result<(), Failure> {
    if !lock.is_held() {
        // There is probably nothing to release, or the store is unreachable.
        let _ = timeout(RELEASE_LOST_WAIT, lock.release()).await;
        return Ok(());
    }
    tokio::select! {
        released = lock.release() => {
            if let Err(error) = released {
                notice(&format!(
                    "the lock could not be released and ends with its lease: {}",
                    one_line(&error.to_string())
                ));
            }
            Ok(())
        }
        signal = signals.second() => {
            Err(signal.failure("interrupted while releasing the lock, which ends with its lease"))
        }
    }
}

/// Waits for the command, renews the lease and forwards signals.
async fn supervise(
    mut running: Running,
    lock: &mut Lock,
    lease: Duration,
    signals: &mut Signals,
) -> Result<Exit, Failure> {
    let kept = renew_until_lost(lock, lease);
    tokio::pin!(kept);
    loop {
        tokio::select! {
            status = running.child.wait() => return Ok(Exit::Code(exit_code(status?))),
            signal = signals.next() => {
                if !running.gets_from_terminal(signal.name) {
                    running.send(signal.name).await;
                }
            }
            why = &mut kept => {
                running.stop().await;
                return Err(Failure::transport(format!(
                    "the lock is lost: {why}. The command was stopped"
                )));
            }
        }
    }
}

/// Renews the lease whenever a third of its remaining time has passed. After a late answer that is
/// less than a third of the lease. Returns, with the reason, only when the lock is lost.
async fn renew_until_lost(lock: &mut Lock, lease: Duration) -> String {
    loop {
        lock.renewal_due().await;
        if !lock.is_held() {
            return "its lease ended before its renewal, as after a suspension".to_owned();
        }
        let mut failed = None;
        loop {
            match lock.renew().await {
                Ok(true) => break,
                Ok(false) => {
                    let why = match lock.is_held() {
                        true => "another holder has it",
                        false => "its lease ended without an answer",
                    };
                    return failed.unwrap_or_else(|| why.to_owned());
                }
                Err(error) => failed = Some(format!("its lease cannot be renewed: {error}")),
            }
            sleep((lease / 10).min(RENEW_PAUSE_MAX)).await;
        }
    }
}

impl Running {
    /// Whether a terminal sends this signal to the command itself, for Ctrl-C and Ctrl-\.
    /// Forwarding it would send it twice.
    fn gets_from_terminal(&self, signal: &str) -> bool {
        matches!(signal, "INT" | "QUIT") && !self.has_own_group && is_in_foreground()
    }

    /// Sends SIGTERM, and SIGKILL if the command and its group do not end in time.
    async fn stop(&mut self) {
        self.send("TERM").await;
        let ended = async {
            // This fails only if the process was waited for already.
            let _ = self.child.wait().await;
            while self.has_own_group && self.kill("0").await {
                sleep(GROUP_PAUSE).await;
            }
        };
        if timeout(TERMINATE_GRACE, ended).await.is_err() {
            self.kill("KILL").await;
            let _ = self.child.wait().await;
        }
    }

    async fn send(&self, signal: &str) {
        if !self.kill(signal).await {
            notice(&format!("cannot send SIG{signal} to the command"));
        }
    }

    /// Sends a signal by the shell's `kill`: the standard library cannot send signals, and this
    /// program contains no unsafe code that could. Returns false if nothing receives it.
    async fn kill(&self, signal: &str) -> bool {
        let sent = Command::new("sh")
            .args([
                "-c",
                r#"kill -s "$1" -- "$2""#,
                "kill",
                signal,
                &self.target,
            ])
            .stderr(Stdio::null())
            .status()
            .await;
        sent.is_ok_and(|status| status.success())
    }
}

/// Whether the terminal sends its signals to the process group of this program.
fn is_in_foreground() -> bool {
    File::open("/dev/tty").is_ok_and(|it| tcgetpgrp(it).is_ok_and(|group| group == getpgrp()))
}

fn exit_code(status: ExitStatus) -> u8 {
    let code = status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    // Both are below 256.
    u8::try_from(code).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes() {
        assert_eq!(exit_code(ExitStatus::from_raw(0)), 0);
        assert_eq!(exit_code(ExitStatus::from_raw(7 << 8)), 7);
        assert_eq!(exit_code(ExitStatus::from_raw(255 << 8)), 255);
        assert_eq!(exit_code(ExitStatus::from_raw(15)), 143);
    }
}
