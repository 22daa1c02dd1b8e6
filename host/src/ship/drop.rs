//! A directory into which policies are dropped.
//!
//! What enters: files named *.wasm, by whoever may write there. What leaves: calls of [`Gate`], and beside each file a
//! line that says what became of it. Files are looked at every second rather than by notifications of the system, which
//! do not cross containers and network file systems.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::gate::{Gate, ShipError};
use crate::config::DropAction;
use crate::control::PolicyView;
use crate::limits;
use statehouse_access::audit;
use statehouse_core::policy::{Digest, Selector};
use statehouse_files::atomic::replace;
use statehouse_precompiled::read_file;

/// The ending of files that count.
const MODULE: &str = "wasm";

/// What is put behind a file's name for its status.
const STATUS: &str = ".status";

/// Watches one directory.
pub struct Drop {
    directory: PathBuf,
    action: DropAction,
    gate: Arc<Gate>,
    seen: BTreeMap<OsString, Seen>,
    /// What was wrong at the last look, so that it is said once.
    trouble: Option<String>,
}

/// A file as it was at the last look.
#[derive(Clone, Copy)]
struct Seen {
    bytes: u64,
    /// When it last became another one. Unlike the time of its modification, which builds that can be repeated set to
    /// one and the same, nobody can choose this one.
    changed: (i64, i64),
    handled: bool,
}

impl Drop {
    /// Hands what appears in `directory` to `gate`.
    pub fn new(directory: PathBuf, action: DropAction, gate: Arc<Gate>) -> Self {
        Self {
            directory,
            action,
            gate,
            seen: BTreeMap::new(),
            trouble: None,
        }
    }

    /// Looks again and again, until it is dropped.
    pub async fn run(mut self) {
        loop {
            // Reading and compiling block.
            let looked = tokio::task::spawn_blocking(move || {
                self.look();
                self
            });
            match looked.await {
                Ok(it) => self = it,
                Err(error) => {
                    tracing::error!(%error, "the drop directory is watched no more: that is a bug");
                    return;
                }
            }
            tokio::time::sleep(limits::DROP_POLL_INTERVAL).await;
        }
    }

    /// One look: a file counts once it is as it was at the look before.
    fn look(&mut self) {
        let found = match self.files() {
            Ok(found) => found,
            Err(error) => {
                self.complain(format!("cannot read {}: {error}", self.directory.display()));
                return;
            }
        };
        if found.len() > limits::DROP_FILES_MAX {
            self.complain(format!(
                "{} has {} policies, and only the first {} by name are looked at",
                self.directory.display(),
                found.len(),
                limits::DROP_FILES_MAX
            ));
        } else {
            self.trouble = None;
        }
        let before = std::mem::take(&mut self.seen);
        for (name, mut now) in found.into_iter().take(limits::DROP_FILES_MAX) {
            if let Some(before) = before.get(&name)
                && (before.bytes, before.changed) == (now.bytes, now.changed)
            {
                if !before.handled {
                    self.handle(&self.directory.join(&name));
                }
                now.handled = true;
            }
            self.seen.insert(name, now);
        }
    }

    fn complain(&mut self, trouble: String) {
        if self.trouble.as_ref() != Some(&trouble) {
            tracing::warn!("drop directory: {trouble}");
            self.trouble = Some(trouble);
        }
    }

    fn files(&self) -> io::Result<BTreeMap<OsString, Seen>> {
        let mut files = BTreeMap::new();
        for entry in fs::read_dir(&self.directory)?.take(limits::DROP_ENTRIES_MAX) {
            let path = entry?.path();
            let (Some(name), true) = (
                path.file_name(),
                path.extension().is_some_and(|it| it == MODULE),
            ) else {
                continue;
            };
            // It may be gone by now. A pipe would never be read to its end.
            let Some(data) = fs::metadata(&path).ok().filter(fs::Metadata::is_file) else {
                continue;
            };
            let seen = Seen {
                bytes: data.len(),
                changed: (data.ctime(), data.ctime_nsec()),
                handled: false,
            };
            files.insert(name.to_owned(), seen);
        }
        Ok(files)
    }

    fn handle(&self, path: &Path) {
        // Whoever may write here names the files, and is not to write the log.
        let shown = path.to_string_lossy();
        let shown = shown.escape_debug();
        let status = match read_file(path) {
            Err(error) => {
                tracing::warn!("drop directory: {shown} cannot be read: {error}");
                format!("refused: the file cannot be read: {error}\n")
            }
            Ok(file) if self.was_handled(path, &file) => return,
            Ok(file) => match self.ship(&file) {
                Ok((what, it)) => {
                    tracing::info!(target: audit::TARGET, "drop directory: {shown} is {what}");
                    let (name, version) = (it.name.escape_debug(), it.version.escape_debug());
                    format!("{what} {name} {version} blake3:{}\n", it.digest)
                }
                Err(error) => {
                    let error = one_line(&error.to_string());
                    tracing::warn!(target: audit::TARGET, "drop directory: {shown} is refused: {error}");
                    format!("refused: {error}\n")
                }
            },
        };
        if let Err(error) = replace(&status_path(path), status.as_bytes(), 0o644) {
            tracing::warn!("drop directory: the status of {shown} cannot be written: {error}");
        }
    }

    /// Whether an earlier run of the program carried this out: a restart must not promote again what was rolled back.
    fn was_handled(&self, path: &Path, file: &[u8]) -> bool {
        let digest = Digest::of(file);
        let listing = self.gate.control().list();
        listing.policies.iter().any(|it| it.digest == digest)
            && status(path)
                .is_some_and(|line| line.trim_end().ends_with(&format!(" blake3:{digest}")))
    }

    fn ship(&self, file: &[u8]) -> Result<(&'static str, PolicyView), ShipError> {
        let view = self.gate.load(file)?;
        let which = Selector::from(view.digest);
        let control = self.gate.control();
        Ok(match self.action {
            DropAction::Load => ("loaded", view),
            DropAction::Shadow => {
                control.shadow(Some((&which, 1000)))?;
                ("in-shadow", view)
            }
            DropAction::Promote => ("active", control.promote(&which)?),
        })
    }
}

/// What stands beside a file. Only what was written here counts: nothing else is as short, and no link and no pipe.
fn status(path: &Path) -> Option<String> {
    let path = status_path(path);
    let data = fs::symlink_metadata(&path).ok()?;
    let is_ours = data.is_file() && data.len() <= limits::DROP_STATUS_BYTES_MAX;
    is_ours.then(|| fs::read_to_string(path).ok()).flatten()
}

/// What a compiler or a policy says may have several.
fn one_line(text: &str) -> String {
    let end = text.floor_char_boundary(limits::GUEST_LOG_BYTES_MAX);
    text[..end].replace(char::is_control, " ")
}

fn status_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(STATUS);
    PathBuf::from(name)
}
