//! The drop directory: loads the policies whose files an operator puts there.
//!
//! Every file named *.wasm goes through [`Gate`], and a status file next to it gets a line with the
//! result. The directory is polled every second, because notifications of the system do not cross
//! containers and network file systems.
//!
//! Neither a restart nor the next leader of a cluster may promote a file again that was handled
//! before, and no file may promote a policy that the guard rolled back. Otherwise each of them
//! would undo a rollback. So every result that says which policy is active is recorded. A file that
//! is refused for a reason that may pass is tried again, unless the role was assigned otherwise
//! since, and every refused file at the next start.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::gate::{Gate, ShipError};
use crate::policies::manager::{ControlError, ControlErrorKind, PolicyView};
use statehouse_access::audit;
use statehouse_config::{DropAction, limits, policy_file_bytes_max};
use statehouse_core::clock::wall_ms;
use statehouse_core::policy::{Actor, Delivered, Digest, Selector};
use statehouse_files::atomic::replace;
use statehouse_files::blocking::{self, BlockingError};
use statehouse_precompiled::read_file;
use statehouse_protocol::Shown;

const MODULE: &str = "wasm";

/// The suffix of a status file, after the policy file's name.
const STATUS: &str = ".status";

/// How long a file waits that was refused for a reason that may pass. Each attempt may compile it.
const RETRY_INTERVAL: Duration = Duration::from_secs(60);

/// Polls one directory.
pub struct DropDirectory {
    directory: PathBuf,
    action: DropAction,
    gate: Arc<Gate>,
    /// The start, in seconds since 1970.
    began_s: i64,
    /// The files of all polls, as they were last found. None before the first poll. A file that is
    /// absent stays: its file system may be unmounted for a while. A new copy has another time.
    seen: Option<BTreeMap<OsString, Seen>>,
    /// The problem of the last poll, so that each problem is logged once.
    trouble: Option<String>,
}

/// Why a file was not handled as the action says.
#[derive(Debug, thiserror::Error)]
enum DropError {
    #[error("the file cannot be read: {0}")]
    Unreadable(io::Error),
    #[error(transparent)]
    Ship(#[from] ShipError),
    /// An operator, the guard or another file assigned the role while the file waited.
    #[error(
        "while the file waited, the role was assigned otherwise: copy the file again if its policy is to have the role"
    )]
    Overtaken,
    /// The guard rolled the policy back, or ended its canary.
    #[error(
        "the policy {0} is loaded but not active, because the guard rolled it back or ended its canary ({1}); `statehouse policy promote` makes it active again"
    )]
    RolledBack(Digest, String),
}

impl DropError {
    /// Whether the file may succeed after a restart, with other settings or another version of the
    /// program. What was decided about its policy stays.
    fn may_pass_at_a_start(&self) -> bool {
        !matches!(self, Self::Overtaken | Self::RolledBack(..))
    }

    /// Whether the same file may succeed without a change of it or of the policies. A policy that
    /// the compiler refuses is not tried again, because each attempt takes minutes.
    fn may_pass(&self) -> bool {
        match self {
            Self::Unreadable(error) => error.kind() != io::ErrorKind::FileTooLarge,
            Self::Ship(ShipError::Control(error)) => {
                error.kind() == ControlErrorKind::Failed || matches!(error, ControlError::Assign(_))
            }
            Self::Ship(ShipError::Trust(_)) | Self::Overtaken | Self::RolledBack(..) => false,
        }
    }
}

/// What was done with a file, and its policy.
type Shipped = Result<(&'static str, PolicyView), DropError>;

/// How far a file was handled.
#[derive(Clone, Copy)]
enum Progress {
    /// It may still be written.
    New,
    /// It was refused for a reason that may pass.
    Waiting(Waiting),
    /// The result is final.
    Handled,
}

#[derive(Clone, Copy)]
struct Waiting {
    again: Instant,
    /// The policy that had the role at the first attempt.
    holder: Option<Digest>,
}

/// A file as it was at the last poll.
#[derive(Clone, Copy)]
struct Seen {
    bytes: u64,
    /// The time of the last inode change, of the file or of the link to it. A program cannot set
    /// this time, but can set the modification time: reproducible builds set it to the same value
    /// every time.
    changed: (i64, i64),
    progress: Progress,
    /// Whether the file was like this before the start, so that an earlier run may have handled it.
    /// Its file system may be mounted later.
    is_old: bool,
}

impl DropDirectory {
    /// Passes the files that appear in `directory` to `gate`.
    pub fn new(directory: PathBuf, action: DropAction, gate: Arc<Gate>) -> Self {
        Self {
            directory,
            action,
            gate,
            began_s: i64::try_from(wall_ms() / 1000).unwrap_or(i64::MAX),
            seen: None,
            trouble: None,
        }
    }

    /// Polls until the future is dropped.
    pub async fn run(self) {
        let this = Arc::new(Mutex::new(self));
        let mut is_starved = false;
        loop {
            let polling = this.clone();
            // Reading and compiling block.
            let polled = blocking::run("drop", move || {
                // A panic ends the polls, so no later one takes the lock.
                let mut polling = polling.lock().unwrap_or_else(PoisonError::into_inner);
                polling.poll();
            });
            match polled.await {
                Ok(()) => is_starved = false,
                Err(BlockingError::Thread(error)) => {
                    if !is_starved {
                        tracing::error!(%error, "the drop directory is not watched until the system allows another thread");
                    }
                    is_starved = true;
                }
                Err(BlockingError::Panicked) => {
                    tracing::error!("the drop directory is no longer watched: this is a bug");
                    return;
                }
            }
            tokio::time::sleep(limits::DROP_POLL_INTERVAL).await;
        }
    }

    /// Handles each file that is unchanged since the last poll, until the result is final.
    fn poll(&mut self) {
        let found = files(&self.directory);
        let shown = self.directory.display();
        let trouble = match &found {
            Err(error) => Some(format!("cannot read {shown}: {error}")),
            Ok((found, is_whole)) => {
                trouble(found.len(), *is_whole).map(|it| format!("{shown} has {it}"))
            }
        };
        self.complain(trouble);
        let Ok((found, _)) = found else {
            return;
        };
        let handled = found.keys().take(limits::DROP_FILES_MAX);
        let handled: Vec<String> = handled.map(|name| recorded_name(name)).collect();
        let before = self.seen.take();
        let mut seen = BTreeMap::new();
        for (place, (name, mut now)) in found.into_iter().enumerate() {
            let known = before.as_ref().and_then(|it| it.get(&name));
            now.is_old = known.is_none() && (before.is_none() || now.changed.0 < self.began_s);
            if let Some(before) = known
                && (before.bytes, before.changed) == (now.bytes, now.changed)
            {
                now.is_old = before.is_old;
                now.progress = match place < limits::DROP_FILES_MAX {
                    true => self.handle(&self.directory.join(&name), before, &handled),
                    false => before.progress,
                };
            }
            seen.insert(name, now);
        }
        for (name, absent) in before.into_iter().flatten() {
            if seen.len() >= limits::DROP_ENTRIES_MAX {
                break;
            }
            seen.entry(name).or_insert(absent);
        }
        self.seen = Some(seen);
    }

    fn complain(&mut self, trouble: Option<String>) {
        if self.trouble != trouble {
            if let Some(trouble) = &trouble {
                tracing::warn!("drop directory: {trouble}");
            }
            self.trouble = trouble;
        }
    }

    /// Handles a file for the first time, or tries it again if it is time. `present` are the
    /// recorded names of all files that are handled.
    fn handle(&self, path: &Path, before: &Seen, present: &[String]) -> Progress {
        let waiting = match before.progress {
            Progress::New => None,
            Progress::Waiting(waiting) if waiting.again <= Instant::now() => Some(waiting),
            progress => return progress,
        };
        let holder = waiting.map_or_else(|| self.holder(), |it| it.holder);
        let done = match read_file(path, policy_file_bytes_max()) {
            Err(error) => Err(DropError::Unreadable(error)),
            Ok(file) if before.is_old && self.was_handled(path, &file) => {
                return Progress::Handled;
            }
            Ok(file) => self.ship(path, &file, waiting, present),
        };
        let is_final = !done.as_ref().is_err_and(DropError::may_pass);
        // One line for all attempts.
        if is_final || waiting.is_none() {
            report(path, &done);
        }
        match is_final {
            true => Progress::Handled,
            false => Progress::Waiting(Waiting {
                again: Instant::now() + RETRY_INTERVAL,
                holder,
            }),
        }
    }

    /// The policy that has the role which the setting gives to the policy of a file.
    fn holder(&self) -> Option<Digest> {
        let assignment = self.gate.control().list().assignment;
        match self.action {
            DropAction::Load => None,
            DropAction::Shadow => assignment.shadow.map(|it| it.policy),
            DropAction::Promote => Some(assignment.active),
        }
    }

    /// Whether an earlier run of the program, or another host of the cluster, handled this file.
    /// The assignment says so. That of earlier versions does not: then the status file counts, or
    /// the origin of the policy if no status file could be written.
    fn was_handled(&self, path: &Path, file: &[u8]) -> bool {
        let digest = Digest::of(file);
        let listing = self.gate.control().list();
        if (listing.assignment.delivered).contains(&self.delivered(path, digest)) {
            return true;
        }
        let says_so = |line: String| line.trim_end().ends_with(&format!(" blake3:{digest}"));
        let by = self.author(path);
        // A run that ended between the load and the promotion has not handled the file.
        let act = (listing.assignment.origin(digest)).and_then(|it| match self.action {
            DropAction::Load => it.loaded.as_ref(),
            DropAction::Shadow | DropAction::Promote => it.assigned.as_ref(),
        });
        listing.policies.iter().any(|it| it.digest == digest)
            && (status(path).is_some_and(says_so) || act.is_some_and(|act| act.by == by))
    }

    fn author(&self, path: &Path) -> Actor {
        Actor::directory(&path.file_name().unwrap_or_default().to_string_lossy())
    }

    fn delivered(&self, path: &Path, policy: Digest) -> Delivered {
        let file = recorded_name(path.file_name().unwrap_or_default());
        Delivered { file, policy }
    }

    /// Does with a file what the setting says, unless an operator decided otherwise while the file
    /// waited. Records a result that is final also for the next start.
    fn ship(
        &self,
        path: &Path,
        file: &[u8],
        waiting: Option<Waiting>,
        present: &[String],
    ) -> Shipped {
        let digest = Digest::of(file);
        let is_overtaken = waiting.is_some_and(|it| {
            let holder = self.holder();
            holder != it.holder && holder != Some(digest)
        });
        let done = match is_overtaken {
            true => Err(DropError::Overtaken),
            false => self.act(path, file),
        };
        if done.as_ref().is_err_and(DropError::may_pass_at_a_start) {
            return done;
        }
        let delivered = self.delivered(path, digest);
        if let Err(error) = self.gate.control().deliver(&delivered, present) {
            tracing::warn!("drop directory: a restart may deliver a file again: {error}");
        }
        done
    }

    /// Does with the policy of a file what the setting says.
    fn act(&self, path: &Path, file: &[u8]) -> Shipped {
        let gate = self.gate.by(self.author(path));
        let view = gate.load(file)?;
        let which = Selector::from(view.digest);
        let control = gate.control();
        Ok(match self.action {
            DropAction::Load => ("loaded", view),
            DropAction::Shadow => {
                control
                    .shadow(Some((&which, 1000)))
                    .map_err(ShipError::from)?;
                ("in-shadow", view)
            }
            DropAction::Promote => {
                if let Some(decision) = control.list().assignment.decision(view.digest) {
                    return Err(DropError::RolledBack(view.digest, decision.why.clone()));
                }
                let view = control.promote(&which).map_err(ShipError::from)?;
                ("active", view)
            }
        })
    }
}

/// The name of a file as [`Delivered::file`] has it.
fn recorded_name(name: &OsStr) -> String {
    let author = Actor::directory(&name.to_string_lossy());
    author.file.unwrap_or_default()
}

/// Logs the result of a file, and writes it to the status file.
fn report(path: &Path, done: &Shipped) {
    // The writers of this directory choose the file names, which must not forge log lines.
    let shown = Shown::whole(path.as_os_str().as_bytes()).on_one_line();
    let status = match done {
        Ok((what, it)) => {
            tracing::info!(target: audit::TARGET, "drop directory: {shown} is {what}");
            let (name, version) = (it.name.escape_debug(), it.version.escape_debug());
            format!("{what} {name} {version} blake3:{}\n", it.digest)
        }
        Err(error) => {
            let next = match error.may_pass() {
                true => "; the store tries it again every minute",
                false => "",
            };
            let error = one_line(&error.to_string());
            tracing::warn!(target: audit::TARGET, "drop directory: {shown} is refused: {error}{next}");
            format!("refused: {error}{next}\n")
        }
    };
    if let Err(error) = replace(&status_path(path), status.as_bytes(), 0o644) {
        tracing::warn!("drop directory: the status of {shown} cannot be written: {error}");
    }
}

/// The policy files of a directory, and whether all its entries were read.
fn files(directory: &Path) -> io::Result<(BTreeMap<OsString, Seen>, bool)> {
    let mut files = BTreeMap::new();
    for (number, entry) in fs::read_dir(directory)?.enumerate() {
        if number >= limits::DROP_ENTRIES_MAX {
            return Ok((files, false));
        }
        let path = entry?.path();
        let (Some(name), true) = (
            path.file_name(),
            path.extension().is_some_and(|it| it == MODULE),
        ) else {
            continue;
        };
        // The file may have been removed since. Reading a pipe would never end.
        let Some(data) = fs::metadata(&path).ok().filter(fs::Metadata::is_file) else {
            continue;
        };
        let Ok(link) = fs::symlink_metadata(&path) else {
            continue;
        };
        let changed = |it: &fs::Metadata| (it.ctime(), it.ctime_nsec());
        let seen = Seen {
            bytes: data.len(),
            changed: changed(&data).max(changed(&link)),
            progress: Progress::New,
            is_old: false,
        };
        files.insert(name.to_owned(), seen);
    }
    Ok((files, true))
}

/// Why files are not handled, if there are too many.
fn trouble(policies: usize, is_whole: bool) -> Option<String> {
    let (entries_max, policies_max) = (limits::DROP_ENTRIES_MAX, limits::DROP_FILES_MAX);
    match (is_whole, policies > policies_max) {
        (false, _) => Some(format!(
            "more than {entries_max} files, and only {entries_max} are looked at: remove files that are no policies"
        )),
        (true, true) => Some(format!(
            "{policies} policies, and only the first {policies_max} by name are handled"
        )),
        (true, false) => None,
    }
}

/// The status file of a policy file. Only a short regular file counts, because this module writes
/// no other: no link and no pipe.
fn status(path: &Path) -> Option<String> {
    let path = status_path(path);
    let data = fs::symlink_metadata(&path).ok()?;
    let is_ours = data.is_file() && data.len() <= limits::DROP_STATUS_BYTES_MAX;
    is_ours.then(|| fs::read_to_string(path).ok()).flatten()
}

/// Joins the lines of an error, because the text of a compiler or a policy may have several.
fn one_line(text: &str) -> String {
    let end = text.floor_char_boundary(limits::GUEST_LOG_BYTES_MAX);
    text[..end].replace(char::is_control, " ")
}

fn status_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(STATUS);
    PathBuf::from(name)
}

#[cfg(test)]
mod tests;
