//! `statehouse user`: edits a users file, which a running store reloads within two seconds.

use std::fs;
use std::io::{self, IsTerminal, Read};
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use clap::Subcommand;

use super::output::{self, Exit, Failure};
use super::prompt;
use statehouse_access::roles::{Role, RoleError};
use statehouse_access::users::{self, Users, check_name};
use statehouse_config::{limits, password_in};
use statehouse_files::atomic::{self, replace_with, sync_name};

/// Manage the users that may log in with a name and a password, and the roles of operators
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  statehouse user add press-4 --users users                 # asks for the password twice
  echo secret | statehouse user add press-4 --users users --password-stdin
  statehouse user list --users users
  statehouse user remove press-4 --users users
  statehouse user add anna --role operate --users users     # an operator
  statehouse user role anna read --users users              # the same password, another role
  statehouse serve --users users

The file contains a line NAME:HASH or NAME:HASH:ROLE for each user, with an Argon2id hash, and
never a password. A running store reloads it within two seconds, and disconnects users that were
removed or whose password changed.

A role allows a user to use the admin API over TLS (serve --admin https://ADDR:PORT). `read` sees
keys, metrics, usage, clients, policies, log lines and history. `operate` may also change keys,
disconnect clients, change which loaded policy answers, and hand a cluster over. `ship` may also
load policies.

Exit codes: 0 done, 1 the user does not exist, 2 usage or an unusable file.")]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Add a user, or change a user's password
    Add {
        /// The user's name. That of a new user has no `/`
        name: String,
        #[command(flatten)]
        file: File,
        /// Read the password from standard input: its first line
        #[arg(long)]
        password_stdin: bool,
        /// The role for the admin API: read, operate, ship or none [default: the role so far, or
        /// none]
        #[arg(long, value_name = "ROLE")]
        role: Option<RoleChoice>,
    },
    /// Change the role of a user, which keeps its password
    Role {
        /// The user's name
        name: String,
        /// The role for the admin API: read, operate, ship or none
        role: RoleChoice,
        #[command(flatten)]
        file: File,
    },
    /// Remove a user
    Remove {
        /// The user's name
        name: String,
        #[command(flatten)]
        file: File,
    },
    /// Print the names of all users, each with a tab and its role if it has one
    List {
        #[command(flatten)]
        file: File,
    },
}

/// A role or none.
#[derive(Clone, Copy, Debug)]
struct RoleChoice(Option<Role>);

impl std::str::FromStr for RoleChoice {
    type Err = RoleError;

    fn from_str(name: &str) -> Result<Self, RoleError> {
        Ok(Self(match name {
            "none" => None,
            name => Some(name.parse()?),
        }))
    }
}

#[derive(clap::Args)]
struct File {
    /// The users file; `add` creates it
    #[arg(long, value_name = "FILE", env = "STATEHOUSE_USERS")]
    users: PathBuf,
}

impl File {
    /// See [`atomic::lock`].
    fn lock(&self) -> Result<(PathBuf, fs::File), Failure> {
        atomic::lock(&self.users).map_err(|error| {
            let path = self.users.display();
            Failure::usage(format!("cannot change {path}: {error}"))
        })
    }
}

pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    let usage = |error: &dyn std::fmt::Display| Failure::usage(error.to_string());
    match &args.command {
        Command::Add {
            name,
            file,
            password_stdin,
            role,
        } => {
            // Before a user types a password in vain.
            check_addition(name, &file.users)?;
            let password = match password_stdin {
                true => piped_password(),
                false => typed_password(name),
            };
            let password = password.map_err(|error| usage(&error))?;
            check_password(&password)?;
            let hash = users::hash(password.as_bytes()).map_err(|error| usage(&error))?;
            let (path, _lock) = file.lock()?;
            let mut lines = Lines::read(&path)?;
            let added = lines.set(name, &hash);
            if let Some(RoleChoice(role)) = role {
                lines.set_role(name, *role);
            }
            lines.write()?;
            let what = if added { "added" } else { "changed" };
            output::notice(&format!("{what} {name}"));
        }
        Command::Role {
            name,
            role: RoleChoice(role),
            file,
        } => {
            let (path, _lock) = file.lock()?;
            let mut lines = Lines::existing(&path)?;
            if !lines.set_role(name, *role) {
                return Err(unknown(file, name));
            }
            lines.write()?;
            let role = role.map_or("no role".to_owned(), |role| format!("the role {role}"));
            output::notice(&format!("{name} has {role}"));
        }
        Command::Remove { name, file } => {
            let (path, _lock) = file.lock()?;
            let mut lines = Lines::existing(&path)?;
            if !lines.remove(name) {
                return Err(unknown(file, name));
            }
            lines.write()?;
            output::notice(&format!("removed {name}"));
        }
        Command::List { file } => {
            let lines = Lines::existing(&file.users)?;
            let users = lines.users().map(|(name, role)| match role {
                Some(role) => format!("{name}\t{role}\n"),
                None => format!("{name}\n"),
            });
            output::emit(users.collect::<String>().as_bytes())?;
        }
    }
    Ok(Exit::Done)
}

/// Checks the file, and whether `add` takes this name.
fn check_addition(name: &str, path: &Path) -> Result<(), Failure> {
    check_name(name).map_err(|error| Failure::usage(error.to_string()))?;
    let is_new = Lines::read(path)?.find(name).is_none();
    // Files of earlier versions and of other tools may have such names.
    if is_new && name.contains('/') {
        return Err(Failure::usage(
            "the name of a new user has no `/`: by a rule with the keys `{principal.username}/*` the user `press` could access the keys of a user `press/4`",
        ));
    }
    Ok(())
}

fn unknown(file: &File, name: &str) -> Failure {
    let path = file.users.display();
    Failure::negative(format!("{path} has no user {name}"))
}

fn piped_password() -> io::Result<String> {
    let mut text = String::new();
    let stdin = io::stdin().lock();
    // A byte order mark may precede the password, and a line end may follow it. More bytes are
    // never needed.
    let most = '\u{feff}'.len_utf8() + limits::PASSWORD_BYTES_MAX + 2;
    stdin.take(most as u64).read_to_string(&mut text)?;
    Ok(password_in(&text).to_owned())
}

fn typed_password(name: &str) -> io::Result<String> {
    if !io::stdin().is_terminal() {
        let text = "there is no terminal to ask for the password: use --password-stdin";
        return Err(io::Error::other(text));
    }
    let first = format!("Password of {name}: ");
    let mut typed = prompt::passwords([&first, "Repeat the password: "])?;
    typed.dedup();
    match (typed.pop(), typed.is_empty()) {
        (Some(password), true) => Ok(password),
        _ => Err(io::Error::other(
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
        let failed = |error| Failure::usage(format!("cannot read {}: {error}", path.display()));
        let (before, text) = match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => (None, String::new()),
            before => {
                let before = before.map_err(failed)?;
                Users::open(path).map_err(|error| Failure::usage(error.to_string()))?;
                (Some(before), fs::read_to_string(path).map_err(failed)?)
            }
        };
        // A byte order mark is no part of the first name.
        let lines = text.strip_prefix('\u{feff}').unwrap_or(&text).lines();
        Ok(Self {
            path: path.to_owned(),
            lines: lines.map(Into::into).collect(),
            before,
        })
    }

    /// Reads the file, which must be valid for a store.
    fn existing(path: &Path) -> Result<Self, Failure> {
        let lines = Self::read(path)?;
        match lines.before {
            Some(_) => Ok(lines),
            None => Err(Failure::usage(format!(
                "there is no file {}: `statehouse user add` creates it",
                path.display()
            ))),
        }
    }

    fn users(&self) -> impl Iterator<Item = (&str, Option<&str>)> {
        let lines = self.lines.iter().filter(|line| !line.starts_with('#'));
        lines.filter_map(|line| {
            let (name, rest) = line.split_once(':')?;
            Some((name, rest.split_once(':').map(|(_, role)| role.trim())))
        })
    }

    fn find(&self, name: &str) -> Option<usize> {
        let is_user = |line: &String| {
            line.strip_prefix(name)
                .is_some_and(|it| it.starts_with(':'))
        };
        self.lines.iter().position(is_user)
    }

    /// Sets a user's hash and keeps its role. Returns true if the user is new.
    fn set(&mut self, name: &str, hash: &str) -> bool {
        let line = format!("{name}:{hash}");
        let Some(at) = self.find(name) else {
            self.lines.push(line);
            return true;
        };
        let role = self.lines[at].splitn(3, ':').nth(2).map(str::trim);
        self.lines[at] = role.map_or(line.clone(), |role| format!("{line}:{role}"));
        false
    }

    /// Sets a user's role. Returns false if there is no such user.
    fn set_role(&mut self, name: &str, role: Option<Role>) -> bool {
        let Some(at) = self.find(name) else {
            return false;
        };
        let parts: Vec<&str> = self.lines[at].splitn(3, ':').take(2).collect();
        let line = parts.join(":").trim().to_owned();
        self.lines[at] = role.map_or(line.clone(), |role| format!("{line}:{role}"));
        true
    }

    /// Removes a user. Returns false if there is none.
    fn remove(&mut self, name: &str) -> bool {
        let found = self.find(name);
        found.map(|at| self.lines.remove(at)).is_some()
    }

    /// Replaces the file and keeps its owner and mode.
    fn write(&self) -> Result<(), Failure> {
        let mut text = self.lines.join("\n");
        if !text.is_empty() {
            text.push('\n');
        }
        let written = replace_with(&self.path, text.as_bytes(), 0o600, |file| {
            if let Some(before) = &self.before {
                let now = file.metadata()?;
                // The account of the store must still be able to read it after an administrator has
                // changed it, whatever the umask.
                let mode = before.permissions().mode() & 0o644;
                file.set_permissions(fs::Permissions::from_mode(mode))?;
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
