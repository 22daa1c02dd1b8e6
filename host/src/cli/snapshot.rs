//! `statehouse snapshot`: writes a backup into one file.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::{Value as Json, json};

use super::data::{self, Data};
use super::output::{Exit, Failure, emit_either, notice, one_line};
use super::time::utc;
use statehouse_core::clock::wall_ms;
use statehouse_files::atomic;
use statehouse_offline::{Contents, Module, ModuleState, Past};

/// Write a backup of the store into one file
///
/// The backup holds keys with versions, fences and expiry, MQTT sessions with their queued
/// messages, remembered requests, and the policies: everything that `statehouse restore` needs. The
/// file gets its name only when it is complete and durable.
///
/// Reads the data directory, on this machine and without a lock, even while a server runs. The
/// backup contains every acknowledged write (under `--durability interval` a moment later). At a
/// host of a cluster it contains the copy of the log in the directory, and a notice names its end.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse snapshot backup.statehouse
  statehouse snapshot --force --data /var/lib/statehouse /mnt/backup/today.statehouse")]
pub(super) struct Args {
    /// The file to write
    file: PathBuf,

    /// Replace an existing file
    #[arg(long)]
    force: bool,

    /// Print the content as a JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    data: Data,
}

pub(super) fn run(args: &Args) -> Result<Exit, Failure> {
    let directory = args.data.find()?;
    let file = target(&args.file, args.force, &directory)?;
    let past = Past::open(&directory)?;
    let contents = past.snapshot(&file, wall_ms())?;
    data::notice_copy(&past, contents.position, contents.now_ms, "");
    report("wrote", &args.file, &contents, args.json)?;
    Ok(Exit::Done)
}

/// The file to write: see [`atomic::target`]. An existing file needs --force. A file in the data
/// directory is refused: it could replace a file of the store, or be taken for one.
pub(super) fn target(file: &Path, force: bool, data: &Path) -> Result<PathBuf, Failure> {
    if file == Path::new("-") {
        let error = "a backup is written to a file and not to standard output: name a file";
        return Err(Failure::usage(error));
    }
    let shown = file.display();
    let path = atomic::target(file)
        .map_err(|error| Failure::usage(format!("cannot write {shown}: {error}")))?;
    if is_inside(&path, data) {
        let data = data.display();
        let error = format!("{shown} is inside the data directory {data}: name a file elsewhere");
        return Err(Failure::usage(error));
    }
    if !force && path.symlink_metadata().is_ok() {
        let error = format!("{shown} already exists: --force replaces it");
        return Err(Failure::usage(error));
    }
    Ok(path)
}

/// Whether a file is in a directory, or in one below it, by whatever path.
fn is_inside(file: &Path, directory: &Path) -> bool {
    let id = |path: &Path| fs::metadata(path).ok().map(|it| (it.dev(), it.ino()));
    let parent = file.parent().filter(|it| !it.as_os_str().is_empty());
    // If a directory cannot be examined, the write or the read reports why.
    let Ok(parent) = fs::canonicalize(parent.unwrap_or(Path::new("."))) else {
        return false;
    };
    id(directory).is_some_and(|directory| parent.ancestors().any(|it| id(it) == Some(directory)))
}

pub(super) fn report(
    verb: &str,
    place: &Path,
    contents: &Contents,
    json: bool,
) -> Result<(), Failure> {
    for absent in absent_modules(contents) {
        notice(&absent);
    }
    let in_words = || format!("{verb} {}: {}\n", place.display(), contents_text(contents));
    emit_either(json, || contents_json(contents), in_words)?;
    Ok(())
}

/// Names the modules of policies that are not in a backup, and what a start needs instead.
pub(super) fn absent_modules(it: &Contents) -> Vec<String> {
    let absent = it.policies.iter().filter(|it| !it.state.is_well());
    let text = |module: &Module| {
        let policy = data::policy(&module.policy);
        let why = match &module.state {
            ModuleState::Damaged(_) => format!(", since {}", state_text(&module.state)),
            _ => String::new(),
        };
        let advice = match module.prevents_start() {
            true => ": start the restored store with --policy FILE",
            false => "",
        };
        format!("the module of the policy {policy} is not in it{why}{advice}")
    };
    absent.map(text).collect()
}

/// The content of a store, on one line.
pub(super) fn contents_text(it: &Contents) -> String {
    // Watches are recorded only behind a foreign broker.
    let watches = match it.watches {
        0 => String::new(),
        1 => "1 watch, ".to_owned(),
        count => format!("{count} watches, "),
    };
    format!(
        "{}, {}, {}, {watches}{}, {}, as of record {} at {}",
        data::count(it.keys, "key"),
        data::count(it.sessions, "session"),
        data::count(it.retained, "retained message"),
        data::count(it.remembered, "remembered request"),
        match it.policies.len() {
            1 => "1 policy".to_owned(),
            number => format!("{number} policies"),
        },
        it.position,
        utc(it.now_ms)
    )
}

pub(super) fn contents_json(it: &Contents) -> Json {
    let policies = it.policies.iter().map(|module| {
        let mut policy = data::policy_json(&module.policy);
        policy["active"] = json!(module.active);
        policy["remembered"] = json!(module.remembered);
        policy["module"] = json!(state_text(&module.state));
        policy
    });
    json!({
        "record": it.position.0,
        "time": utc(it.now_ms),
        "keys": it.keys,
        "hidden_keys": it.hidden_keys,
        "bytes": it.bytes,
        "sessions": it.sessions,
        "retained": it.retained,
        "watches": it.watches,
        "remembered": it.remembered,
        "policies": policies.collect::<Vec<_>>(),
    })
}

pub(super) fn state_text(state: &ModuleState) -> String {
    match state {
        ModuleState::Whole => "its module is whole".into(),
        ModuleState::BuiltIn => "it is built in".into(),
        ModuleState::Missing => "its module is missing".into(),
        ModuleState::Damaged(why) => one_line(&format!("its module cannot be used: {why}")),
    }
}
