//! `statehouse context`: names stores, so that commands need not repeat their addresses and
//! accounts.
//!
//! The contexts are a file of the user. It never holds a password, only the path of a file that
//! does.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::json;
use statehouse_files::atomic;

use super::environment;
use super::output::{Exit, Failure, emit, emit_json, notice};
use super::table;
use crate::admin::is_tls_url;
use statehouse_config::{BrokerUrl, ConfigError};

/// Longest name of a context: it fits a line of `context list`.
const NAME_BYTES_MAX: usize = 64;

/// Name stores, so that commands find them by --context
///
/// A context holds the addresses of a store and how to log in. `context use` selects one for all
/// commands that name no store. --context and STATEHOUSE_CONTEXT take precedence over environment
/// variables that name a store, and other flags over STATEHOUSE_CONTEXT. Flags, and environment
/// variables, take precedence over the selected context; if they name another store, nothing of
/// the context is used. The file is contexts.toml in $XDG_CONFIG_HOME/statehouse, or in
/// ~/.config/statehouse.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse context add plant7 --url mqtts://plant7:8883 --user anna --password-file ~/.plant7
  statehouse context add plant7 --url mqtts://plant7:8883 --admin https://plant7:8443 \\
    --user anna --password-file ~/.plant7 --ca plant7.crt
  statehouse context add local --data /var/lib/statehouse
  statehouse get room/temperature --context plant7
  statehouse context use plant7
  statehouse context list")]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Add a context, or replace the one of this name
    Add {
        /// The name: letters, digits, `-`, `_` and `.`
        name: String,

        #[command(flatten)]
        context: Box<Context>,
    },
    /// Select the context of commands that name no store
    Use {
        /// The name; none selects no context
        #[arg(required_unless_present = "none")]
        name: Option<String>,

        /// Select no context
        #[arg(long, conflicts_with = "name")]
        none: bool,
    },
    /// List all contexts; a star marks the selected one
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove a context
    Remove {
        /// The name
        name: String,
    },
}

/// A store and how to log in.
#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Context {
    /// The URL of the store: mqtt://HOST:PORT, mqtts://, ws:// or wss://
    #[arg(long, value_name = "URL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) url: Option<String>,

    /// The URL of the store's admin API, for commands of operators: https://HOST:PORT; those of
    /// all hosts of a cluster with commas
    #[arg(long, value_name = "URL", conflicts_with = "data")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) admin: Option<String>,

    /// User name
    #[arg(long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) user: Option<String>,

    /// A file with the password
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) password_file: Option<PathBuf>,

    /// CA certificates (PEM) that the server's certificate is verified against
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ca: Option<PathBuf>,

    /// A client certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "cert_key")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cert: Option<PathBuf>,

    /// The private key of this certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "cert")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cert_key: Option<PathBuf>,

    /// The data directory of the store, for commands of operators on its machine
    #[arg(long, value_name = "DIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) data: Option<PathBuf>,
}

/// The file.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Contexts {
    #[serde(skip_serializing_if = "Option::is_none")]
    current: Option<String>,
    contexts: BTreeMap<String, Context>,
}

pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    let path = path().ok_or_else(|| {
        Failure::usage("set HOME or XDG_CONFIG_HOME: contexts are kept in a file below it")
    })?;
    if let Command::List { json } = args.command {
        list(&Contexts::read(&path)?, json)?;
        return Ok(Exit::Done);
    }
    // A command that is refused creates no directory.
    Contexts::read(&path)?.change(&args.command, &path)?;
    let (path, _lock) = lock(&path).map_err(|error| cannot_write(&path, &error))?;
    let mut all = Contexts::read(&path)?;
    let had_current = all.current.is_some();
    all.change(&args.command, &path)?;
    all.write(&path)?;
    if had_current && all.current.is_none() && matches!(args.command, Command::Remove { .. }) {
        notice("no context is selected any more");
    }
    Ok(Exit::Done)
}

/// The context with this name, or the selected one, with its name. `None` if no name is given and
/// none is selected, or the environment names a store.
pub(super) fn find(name: Option<&str>) -> Result<Option<(String, Context)>, Failure> {
    let name = name.filter(|it| !it.is_empty());
    if name.is_none() && environment::names_a_store() {
        return Ok(None);
    }
    let Some(path) = path() else {
        return match name {
            None => Ok(None),
            Some(_) => Err(Failure::usage("--context needs HOME or XDG_CONFIG_HOME")),
        };
    };
    let all = Contexts::read(&path)?;
    let Some(name) = name.or(all.current.as_deref()) else {
        return Ok(None);
    };
    let context = all.find(name, &path)?.clone();
    Ok(Some((name.to_owned(), context)))
}

/// The failure of a command that needs what the context does not have. A default would be the
/// address of another store.
pub(super) fn lacks(name: &str, what: &str) -> Failure {
    Failure::usage(format!(
        "the context {} has {what}: add it with `statehouse context add`, or name the store by other options",
        name.escape_debug()
    ))
}

fn path() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|it| !it.is_empty());
    let directory = set("XDG_CONFIG_HOME").map(PathBuf::from);
    let directory = directory.or_else(|| Some(Path::new(&set("HOME")?).join(".config")))?;
    Some(directory.join("statehouse/contexts.toml"))
}

/// Creates the directory of the file and locks it: see [`atomic::lock`].
fn lock(path: &Path) -> io::Result<(PathBuf, fs::File)> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    atomic::lock(path)
}

fn cannot_write(path: &Path, error: &dyn Display) -> Failure {
    Failure::transport(format!("cannot write {}: {error}", path.display()))
}

fn check_name(name: &str) -> Result<(), Failure> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    match !name.is_empty() && name.len() <= NAME_BYTES_MAX && name.chars().all(plain) {
        true => Ok(()),
        false => Err(Failure::usage(format!(
            "the name of a context has 1 to {NAME_BYTES_MAX} letters, digits, `-`, `_` or `.`"
        ))),
    }
}

impl Context {
    /// The context as it is saved: with absolute paths, since commands run in any directory.
    fn checked(&self) -> Result<Self, Failure> {
        if *self == Self::default() {
            return Err(Failure::usage(
                "name the store with --url, and with --admin or --data for commands of operators",
            ));
        }
        if let Some(url) = &self.url {
            let url: BrokerUrl = url.parse().map_err(Failure::usage)?;
            if url.password.is_some() {
                return Err(Failure::usage(
                    "a context holds no password: write it to a file and name that with --password-file",
                ));
            }
        }
        let urls = self.admin.iter().flat_map(|it| it.split(','));
        if let Some(url) = urls.into_iter().find(|it| !is_tls_url(it)) {
            let url = ConfigError::without_login(url);
            return Err(Failure::usage(format!(
                "--admin {url} is not https:// with a host and a port, such as https://plant7:8443"
            )));
        }
        let absolute = |path: &Option<PathBuf>| -> Result<Option<PathBuf>, Failure> {
            let path = path.as_ref().map(std::path::absolute).transpose();
            path.map_err(|error| Failure::usage(format!("a path cannot be used: {error}")))
        };
        Ok(Self {
            password_file: absolute(&self.password_file)?,
            ca: absolute(&self.ca)?,
            cert: absolute(&self.cert)?,
            cert_key: absolute(&self.cert_key)?,
            data: absolute(&self.data)?,
            ..self.clone()
        })
    }
}

impl Contexts {
    fn read(path: &Path) -> Result<Self, Failure> {
        let shown = path.display();
        match fs::read_to_string(path) {
            Ok(text) => toml::from_str(&text).map_err(|error| {
                let why = ConfigError::place_and_reason(&error);
                Failure::usage(format!("{shown} is not valid{why}"))
            }),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(Failure::usage(format!("cannot read {shown}: {error}"))),
        }
    }

    fn change(&mut self, command: &Command, path: &Path) -> Result<(), Failure> {
        match command {
            Command::Add { name, context } => {
                check_name(name)?;
                let context = context.checked()?;
                self.contexts.insert(name.clone(), context);
            }
            Command::Use { name, .. } => {
                if let Some(name) = name {
                    self.find(name, path)?;
                }
                self.current.clone_from(name);
            }
            Command::List { .. } => {}
            Command::Remove { name } => {
                self.find(name, path)?;
                self.contexts.remove(name);
                if self.current.as_ref() == Some(name) {
                    self.current = None;
                }
            }
        }
        Ok(())
    }

    fn write(&self, path: &Path) -> Result<(), Failure> {
        let failed = |error: &dyn Display| cannot_write(path, error);
        let text = toml::to_string(self).map_err(|error| failed(&error))?;
        atomic::replace(path, text.as_bytes(), 0o600).map_err(|error| failed(&error))
    }

    fn find(&self, name: &str, path: &Path) -> Result<&Context, Failure> {
        self.contexts.get(name).ok_or_else(|| {
            let known: Vec<&str> = self.contexts.keys().map(String::as_str).collect();
            let known = match known.is_empty() {
                true => "there is none".to_owned(),
                false => format!("known: {}", known.join(", ")),
            };
            Failure::usage(format!(
                "there is no context {} in {} ({known}): add it with `statehouse context add`",
                name.escape_debug(),
                path.display()
            ))
        })
    }
}

fn list(all: &Contexts, in_json: bool) -> Result<(), Failure> {
    if in_json {
        let all = json!({ "current": all.current, "contexts": all.contexts });
        return emit_json(&all).map(drop);
    }
    if all.contexts.is_empty() {
        notice("there is no context: add one with `statehouse context add`");
        return Ok(());
    }
    let rows = all.contexts.iter().map(|(name, context)| {
        let data = context.data.as_ref().map(|it| it.display().to_string());
        [
            match all.current.as_ref() == Some(name) {
                true => "*".to_owned(),
                false => String::new(),
            },
            name.clone(),
            (context.url.clone().or(context.admin.clone()).or(data)).unwrap_or_default(),
            context.user.clone().unwrap_or("-".to_owned()),
        ]
    });
    let header = ["", "name", "store", "user"];
    emit(table::of(header, rows, 4).as_bytes()).map(drop)
}
