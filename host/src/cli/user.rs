//! `statehouse user`: edits a users file, which a running store reloads within two seconds.

use std::fs;
use std::io::{self, IsTerminal, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use clap::Subcommand;

use super::output::{self, Exit, Failure};
use crate::limits;
use statehouse_access::users::{self, Users, check_name};
use statehouse_files::atomic::{replace_with, sync_name};

/// Manage the users that may log in with a name and a password
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  statehouse user add press-4 --users users                    # asks for the password twice
  echo secret | statehouse user add press-4 --users users --password-stdin
  statehouse user list --users users
  statehouse user remove press-4 --users users
  statehouse serve --users users

The file contains a line NAME:HASH for each user, with an Argon2id hash, and never a password. A running store reloads it
within two seconds, and disconnects users that were removed or whose password changed.

Exit codes: 0 done, 1 the user does not exist, 2 usage or an unusable file.")]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Add a user, or change a user's password
    Add {
        /// The user's name
        name: String,
        #[command(flatten)]
        file: File,
        /// Read the password from standard input: its first line
        #[arg(long)]
        password_stdin: bool,
    },
    /// Remove a user
    Remove {
        /// The user's name
        name: String,
        #[command(flatten)]
        file: File,
    },
    /// Print the names of all users
    List {
        #[command(flatten)]
        file: File,
    },
}

#[derive(clap::Args)]
struct File {
    /// The users file; `add` creates it
    #[arg(long, value_name = "FILE", env = "STATEHOUSE_USERS")]
    users: PathBuf,
}

/// Runs the command.
pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    let usage = |error: &dyn std::fmt::Display| Failure::usage(error.to_string());
    match &args.command {
        Command::Add {
            name,
            file,
            password_stdin,
        } => {
            check_name(name).map_err(|error| usage(&error))?;
            // The file is checked before a user types a password in vain.
            let mut lines = Lines::read(&file.users)?;
            let password = match password_stdin {
                true => piped_password(),
                false => typed_password(name),
            };
            let password = password.map_err(|error| usage(&error))?;
            check_password(&password)?;
            let hash = users::hash(password.as_bytes()).map_err(|error| usage(&error))?;
            let added = lines.set(name, &hash);
            lines.write()?;
            let what = if added { "added" } else { "changed" };
            output::notice(&format!("{what} {name}"));
        }
        Command::Remove { name, file } => {
            let mut lines = Lines::read(&file.users)?;
            if !lines.remove(name) {
                let path = file.users.display();
                return Err(Failure::negative(format!("{path} has no user {name}")));
            }
            lines.write()?;
            output::notice(&format!("removed {name}"));
        }
        Command::List { file } => {
            let names = Lines::read(&file.users)?;
            let names: Vec<_> = names.names().collect();
            let mut text = names.join("\n");
            if !text.is_empty() {
                text.push('\n');
            }
            output::emit(text.as_bytes())?;
        }
    }
    Ok(Exit::Done)
}

fn piped_password() -> io::Result<String> {
    let mut text = String::new();
    let stdin = io::stdin().lock();
    // A line end may follow the password; more bytes are never needed.
    let most = limits::PASSWORD_BYTES_MAX as u64 + 2;
    stdin.take(most).read_to_string(&mut text)?;
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

fn typed_password(name: &str) -> io::Result<String> {
    if !io::stdin().is_terminal() {
        let text = "there is no terminal to ask for the password: use --password-stdin";
        return Err(io::Error::other(text));
    }
    let first = rpassword::prompt_password(format!("Password of {name}: "))?;
    let second = rpassword::prompt_password("Repeat the password: ")?;
    match first == second {
        true => Ok(first),
        false => Err(io::Error::other(
            "the two passwords differ; nothing was changed",
        )),
    }
}

fn check_password(password: &str) -> Result<(), Failure> {
    match password.len() {
        1..=limits::PASSWORD_BYTES_MAX => Ok(()),
        0 => Err(Failure::usage("the password is empty; nothing was changed")),
        _ => Err(Failure::usage(format!(
            "a password has at most {} bytes; nothing was changed",
            limits::PASSWORD_BYTES_MAX
        ))),
    }
}

/// The lines of the file, including comments.
struct Lines {
    path: PathBuf,
    lines: Vec<String>,
    /// The metadata of the old file, whose owner and mode the new one gets; none if the file is
    /// new.
    before: Option<fs::Metadata>,
}

impl Lines {
    /// Reads the file, which must be valid for a store or absent.
    fn read(path: &Path) -> Result<Self, Failure> {
        let path = path.to_owned();
        let before = match fs::metadata(&path) {
            Ok(before) => before,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(Self {
                    path,
                    lines: Vec::new(),
                    before: None,
                });
            }
            Err(error) => {
                let path = path.display();
                return Err(Failure::usage(format!("cannot read {path}: {error}")));
            }
        };
        Users::open(&path).map_err(|error| Failure::usage(error.to_string()))?;
        let text = fs::read_to_string(&path);
        let text = text.map_err(|error| {
            let path = path.display();
            Failure::usage(format!("cannot read {path}: {error}"))
        })?;
        Ok(Self {
            path,
            lines: text.lines().map(Into::into).collect(),
            before: Some(before),
        })
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        let lines = self.lines.iter().filter(|line| !line.starts_with('#'));
        lines.filter_map(|line| Some(line.split_once(':')?.0))
    }

    fn find(&self, name: &str) -> Option<usize> {
        let is_user = |line: &String| {
            line.strip_prefix(name)
                .is_some_and(|it| it.starts_with(':'))
        };
        self.lines.iter().position(is_user)
    }

    /// Sets a user's hash. Returns true if the user is new.
    fn set(&mut self, name: &str, hash: &str) -> bool {
        let line = format!("{name}:{hash}");
        match self.find(name) {
            Some(at) => self.lines[at] = line,
            None => {
                self.lines.push(line);
                return true;
            }
        }
        false
    }

    /// Removes a user. Returns false if there is none.
    fn remove(&mut self, name: &str) -> bool {
        let found = self.find(name);
        if let Some(at) = found {
            self.lines.remove(at);
        }
        found.is_some()
    }

    /// Replaces the file and keeps its owner and mode.
    fn write(&self) -> Result<(), Failure> {
        let mut text = self.lines.join("\n");
        if !text.is_empty() {
            text.push('\n');
        }
        let mode = self
            .before
            .as_ref()
            .map_or(0o600, |before| before.permissions().mode() & 0o640);
        let written = replace_with(&self.path, text.as_bytes(), mode, |file| {
            if let Some(before) = &self.before {
                let now = file.metadata()?;
                // The account of the store must still be able to read it after an administrator has
                // changed it.
                if (now.uid(), now.gid()) != (before.uid(), before.gid()) {
                    fchown(file, Some(before.uid()), Some(before.gid()))?;
                }
            }
            file.sync_all()
        });
        // Without this, a removed user could reappear after a power cut.
        let written = written.and_then(|()| sync_name(&self.path));
        written.map_err(|error| {
            let path = self.path.display();
            Failure::usage(format!("cannot write {path}: {error}"))
        })
    }
}
