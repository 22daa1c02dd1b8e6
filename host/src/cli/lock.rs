//! `statehouse lock`: runs a command while it holds a lock, and exits with the command's exit code.
//! The command must never continue to run after the lease is lost.

use std::ffi::OsString;
use std::fs::{self, File};
use std::future::poll_fn;
use std::io::{self, IsTerminal};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::slice;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use hyper::Method;
use serde_json::{Value as Json, json};
use statehouse_client::{Client, Lock, LockOptions, Value, parse_duration};
use statehouse_offline::Past;
use tokio::process::{Child, Command};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, sleep, timeout};

use super::entries::{self, Parts};
use super::output::{Exit, Failure, emit, emit_json, json_bytes, notice, printable};
use super::remote::Remote;
use super::store::{Found, Place};
use super::time::utc;
use crate::past;
use statehouse_config::percent;

/// The time between SIGTERM and SIGKILL for a command that has lost its lock. It is short, since
/// another holder may already run.
const TERMINATE_GRACE: Duration = Duration::from_secs(10);

/// The time to try to release a lock whose lease has ended, since a late renewal may have acquired
/// it again.
const RELEASE_LOST_WAIT: Duration = Duration::from_secs(1);

/// The pause between two checks whether the group of a stopped command has ended.
const GROUP_PAUSE: Duration = Duration::from_millis(100);

/// How many renewals of a lock `--status` reads from a data directory. A lease of ten seconds is
/// renewed some 26 000 times a day, and the history reaches back a day.
const RENEWALS_MAX: usize = 100_000;

/// Longest interruption for which the broker keeps the session. A longer one costs nothing, because
/// every request can be repeated; the session of a killed command takes a place until then.
const INTERRUPTION_MAX: Duration = Duration::from_secs(60);

/// Shortest lease. With a shorter one, most responses would arrive too late to hold the lock.
const LEASE_MIN: Duration = Duration::from_millis(100);

/// Longest pause between attempts to renew a lease.
const RENEW_PAUSE_MAX: Duration = Duration::from_secs(1);

/// Longest sleep before the next renewal. Timers stand still while the machine is suspended, so
/// after a resume the end of the lease is noticed within this time.
const LEASE_CHECK_PAUSE: Duration = Duration::from_secs(1);

/// Run a command while holding a lock, or show who holds it
///
/// Waits for the lock, renews its lease while the command runs, and releases it afterwards. The
/// exit code is the command's (128 + the signal that killed it); 1 if --wait elapses first; 126 or
/// 127 if the command cannot be run. If the lease is lost, the command gets SIGTERM, then SIGKILL
/// after ten seconds, and the exit code is 3. If this program itself is killed with SIGKILL, its
/// command keeps running, and the next holder starts when the lease ends. Only the fencing token
/// then protects what both write.
///
/// SIGHUP, SIGINT, SIGQUIT and SIGTERM are forwarded to the command. Without a controlling
/// terminal, as in a service, signals reach its whole process group. On a terminal they reach only
/// the command itself, which must end its own processes.
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
    #[arg(long, value_name = "NAME")]
    holder: Option<OsString>,

    /// Print the holder of the lock, since when it holds the lock, when it renewed the lock last,
    /// and when the lock ends unless it is renewed. Exit code 1 if it is free. The line `since` is
    /// from the history in the data directory or of the admin API, and missing without them
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
        return status(&args).await;
    }
    // Signals are caught from here on, so that none leaves the lock held.
    let mut signals = Signals::listen()?;
    let interruption = args.lease.min(INTERRUPTION_MAX);
    let work = async |client: &Client| run_locked(client, &args, &mut signals).await;
    args.remote.ask_for(interruption, work).await
}

async fn run_locked(client: &Client, args: &Args, signals: &mut Signals) -> Result<Exit, Failure> {
    let Some(mut lock) = acquire(client, args, signals).await? else {
        return Err(Failure::negative(format!(
            "the lock {} was not acquired in time: it is held by another client, or the store answers too slowly",
            printable(args.name.as_bytes())
        )));
    };
    let result = match spawn(args, &lock) {
        Ok(running) => supervise(running, &mut lock, args.lease, signals).await,
        Err(failure) => Err(failure),
    };
    release(lock).await;
    result
}

/// Prints who holds the lock.
async fn status(args: &Args) -> Result<Exit, Failure> {
    let name = Bytes::copy_from_slice(args.name.as_bytes());
    let key = slice::from_ref(&name);
    let read = async |client: &Client| entries::read(client, key, Parts::Both).await;
    let held = args.remote.ask(read).await?;
    let held = held
        .first()
        .and_then(|it| it.value.as_ref().zip(it.meta.as_ref()));
    let Some((value, meta)) = held else {
        if args.remote.json {
            emit_json(&json!({ "name": json_bytes(&name), "holder": null }))?;
        } else {
            notice(&format!("the lock {} is free", printable(&name)));
        }
        return Ok(Exit::Negative);
    };
    let (since, renewed) = (since(args, value).await, utc(value.version.wall_ms()));
    if args.remote.json {
        emit_json(&json!({
            "name": json_bytes(&name),
            "holder": json_bytes(&value.bytes),
            "since": since.as_ref().filter(|it| it.is_exact).map(|it| &it.time),
            "since_before": since.as_ref().filter(|it| !it.is_exact).map(|it| &it.time),
            "renewed": renewed,
            "until": meta.expires_ms.map(utc),
            "version": value.version.to_string(),
            "fencing_token": since.as_ref().and_then(|it| it.fencing_token.as_ref()),
        }))?;
        return Ok(Exit::Done);
    }
    let since = since.map_or(String::new(), |it| {
        let before = if it.is_exact { "" } else { "before " };
        format!("since    {before}{}\n", it.time)
    });
    let until = match (meta.expires_ms, meta.ttl) {
        (Some(ms), Some(ttl)) => format!("{}, in {}", utc(ms), entries::duration(ttl)),
        _ => "without end: it is a key without an expiry".to_owned(),
    };
    let holder = printable(&value.bytes);
    let text = format!("holder   {holder}\n{since}renewed  {renewed}\nuntil    {until}\n");
    emit(text.as_bytes())?;
    Ok(Exit::Done)
}

/// When the holder of a lock acquired it.
#[derive(Debug, PartialEq)]
struct Since {
    time: String,
    /// Otherwise it acquired the lock before this time: the history reaches back no further.
    is_exact: bool,
    /// The version of the acquisition, if the time is exact. Renewals have higher versions.
    fencing_token: Option<String>,
}

/// Looks into the history of the store for when the holder acquired the lock, if the data directory
/// is on this machine or the admin API answers.
async fn since(args: &Args, held: &Value) -> Option<Since> {
    let name = args.name.as_bytes();
    let answer = match args.remote.find(&args.place).ok()? {
        Found::Data(path) if path.is_dir() => Past::open(&path)
            .and_then(|past| past.history(name, RENEWALS_MAX, usize::MAX))
            .map(|it| past::history(name, &it, held.version.node(), usize::MAX))
            .map_err(|error| error.to_string()),
        Found::Data(_) => return None,
        Found::Admin(mut asked) => {
            asked.timeout = args.remote.timeout();
            let path = format!("/v1/history?key={}&limit=2000", percent::encode(name));
            let answer = asked.send(Method::GET, &path, Vec::new()).await;
            answer.map_err(|failure| failure.message().to_owned())
        }
    };
    match answer {
        Ok(answer) => since_in(&answer, &json_bytes(&held.bytes), &held.version.to_string()),
        Err(error) => {
            notice(&format!("since when it is held is not shown: {error}"));
            None
        }
    }
}

/// The first of the last uninterrupted writes of the holder. None if the last write has another
/// version: the history is that of another store, or not up to date.
fn since_in(history: &Json, holder: &Json, version: &str) -> Option<Since> {
    let changes = history["changes"].as_array()?;
    (changes.first()?["version"] == version).then_some(())?;
    let own = |change: &&Json| change["event"] == "set" && change["value"] == *holder;
    let count = changes.iter().take_while(own).count();
    let beginning = &history["beginning"];
    // The history may begin with a renewal, if it does not reach back to when the key was absent.
    let begins_free = beginning["since"].is_null() || beginning["absent_before"] == true;
    let is_all = beginning["changes"] == changes.len() && begins_free;
    let is_exact = count < changes.len() || is_all;
    let first = changes.get(count.checked_sub(1)?)?;
    let text = |name: &str| first[name].as_str().map(str::to_owned);
    Some(Since {
        time: text("time")?,
        is_exact,
        fencing_token: text("version").filter(|_| is_exact),
    })
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
            // A request that acquires the lock may be in flight; this one is executed after it.
            let _ = client.vdel(name, holder, None).await;
            Err(Failure::new(128 + signal.number, "interrupted while waiting for the lock"))
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

async fn release(lock: Lock) {
    if !lock.is_held() {
        // There is probably nothing to release, or the store is unreachable.
        let _ = timeout(RELEASE_LOST_WAIT, lock.release()).await;
    } else if let Err(error) = lock.release().await {
        notice(&format!(
            "the lock could not be released and ends with its lease: {error}"
        ));
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
        wait_to_renew(lock).await;
        if !lock.is_held() {
            return "its lease ended before its renewal, as after a suspension".to_owned();
        }
        let mut failed = None;
        loop {
            match lock.renew().await {
                Ok(true) => break,
                Ok(false) if lock.is_held() => {
                    return failed.unwrap_or_else(|| "another holder has it".to_owned());
                }
                Ok(false) => {
                    return failed
                        .unwrap_or_else(|| "its lease ended without an answer".to_owned());
                }
                Err(error) => failed = Some(format!("its lease cannot be renewed: {error}")),
            }
            sleep((lease / 10).min(RENEW_PAUSE_MAX)).await;
        }
    }
}

/// Waits until a third of the remaining time of the lease has passed.
async fn wait_to_renew(lock: &Lock) {
    let left = || lock.held_until().saturating_duration_since(Instant::now());
    let begun = left();
    let due = begun - begun / 3;
    loop {
        let pause = left().saturating_sub(due);
        if pause.is_zero() {
            return;
        }
        sleep(pause.min(LEASE_CHECK_PAUSE)).await;
    }
}

impl Running {
    /// Whether a terminal sends this signal to the command itself, for Ctrl-C and Ctrl-\.
    /// Forwarding it would send it twice.
    fn gets_from_terminal(&self, signal: &str) -> bool {
        matches!(signal, "INT" | "QUIT") && !self.has_own_group && io::stdin().is_terminal()
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

    /// Sends a signal to the command.
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

fn exit_code(status: ExitStatus) -> u8 {
    let code = status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    // Both are below 256.
    u8::try_from(code).unwrap_or(u8::MAX)
}

/// The signals that end programs: their names, their numbers on Linux, and their streams. A signal
/// that the caller ignores stays ignored, also by the command, as `nohup` demands.
struct Signals(Vec<(Caught, Signal)>);

#[derive(Clone, Copy)]
struct Caught {
    name: &'static str,
    number: u8,
}

impl Signals {
    fn listen() -> Result<Self, Failure> {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let all = [("HUP", 1), ("INT", 2), ("QUIT", 3), ("TERM", 15)];
        let caught = all.into_iter().filter(|it| !is_ignored(&status, it.1));
        let listen = |(name, number)| {
            let kind = SignalKind::from_raw(i32::from(number));
            Ok((Caught { name, number }, signal(kind)?))
        };
        caught.map(listen).collect::<Result<_, _>>().map(Self)
    }

    async fn next(&mut self) -> Caught {
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
    fn lock_is_held_since_the_first_of_its_renewals() {
        let change = |event: &str, holder: &str, version: &str| json!({ "event": event, "value": holder, "version": version, "time": format!("at {version}") });
        let own = [("set", "anna", "5"), ("set", "anna", "4")];
        let held_from = |earlier: &[(&str, &str, &str)], beginning: Json| {
            let all = own.iter().chain(earlier);
            let all: Vec<Json> = all.map(|it| change(it.0, it.1, it.2)).collect();
            let history = json!({ "changes": all, "beginning": beginning });
            since_in(&history, &json!("anna"), "5")
        };
        let held = |earlier: &[(&str, &str, &str)], count: u64| {
            held_from(earlier, json!({ "changes": count }))
        };
        let at_4 = |is_exact: bool| {
            Some(Since {
                time: "at 4".to_owned(),
                is_exact,
                fencing_token: is_exact.then(|| "4".to_owned()),
            })
        };
        assert_eq!(held(&[], 2), at_4(true));
        assert_eq!(held(&[], 9), at_4(false), "the rest was not read");
        for earlier in ["deleted", "expired"] {
            let ended = [(earlier, "anna", "3"), ("set", "anna", "2")];
            assert_eq!(held(&ended, 9), at_4(true));
        }
        assert_eq!(held(&[("set", "bert", "3")], 9), at_4(true));
        // A history that begins with a snapshot may begin with a renewal.
        for (absent_before, is_exact) in [(json!(true), true), (json!(false), false)] {
            let beginning = json!({
                "changes": 2,
                "since": "2026-11-21T03:00:00Z",
                "before": null,
                "absent_before": absent_before,
            });
            assert_eq!(held_from(&[], beginning), at_4(is_exact));
        }
        // An earlier version of the store does not say whether it was free.
        let since = json!({ "changes": 2, "since": "2026-11-21T03:00:00Z", "before": null });
        assert_eq!(held_from(&[], since), at_4(false));
        let other = json!({ "changes": [change("set", "anna", "7")], "beginning": {} });
        assert_eq!(since_in(&other, &json!("anna"), "5"), None);
    }

    #[test]
    fn ignored_signals_are_read_from_the_status_of_the_process() {
        let status = "Name:\tx\nSigBlk:\t0000000000000006\nSigIgn:\t0000000000001001\n";
        assert!(is_ignored(status, 1));
        assert!(!is_ignored(status, 2) && !is_ignored(status, 15));
        assert!(!is_ignored("", 1));
    }

    #[test]
    fn exit_codes() {
        assert_eq!(exit_code(ExitStatus::from_raw(0)), 0);
        assert_eq!(exit_code(ExitStatus::from_raw(7 << 8)), 7);
        assert_eq!(exit_code(ExitStatus::from_raw(255 << 8)), 255);
        assert_eq!(exit_code(ExitStatus::from_raw(15)), 143);
    }
}
