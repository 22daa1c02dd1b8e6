//! `statehouse policy dev`: builds, tests and reloads a policy whenever a file of its project
//! changes.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use hyper::Method;
use serde_json::Value as Json;
use statehouse_testkit::read_policy;

use super::{build, test, words};
use crate::cli::output::{Exit, Failure, emit, notice};
use crate::cli::store::Store;
use statehouse_config::limits;

/// How often the files are looked at.
const POLL: Duration = Duration::from_millis(300);

/// How often a store that does not answer is asked again.
const RETRY: Duration = Duration::from_secs(1);

/// The files of a project, with the times of their last changes.
type Files = BTreeMap<PathBuf, SystemTime>;

/// Names of files and directories that builds write.
const GENERATED: [&str; 5] = [
    "Cargo.lock",
    "target",
    "node_modules",
    "vendor",
    "__pycache__",
];

/// Build, test and reload a policy whenever a file of its project is saved
///
/// Runs `policy build`, then `policy test` on the transcripts in tests/, then loads the policy into
/// the running store and promotes it. The build that it replaces is unloaded. A build that fails,
/// or that fails a transcript, is not loaded. A build that finds no store is loaded when the store
/// answers again. Hidden files, *.wasm, Cargo.lock, target, node_modules, vendor, __pycache__ and
/// the data directories of stores are not watched. Ends on Ctrl-C; the last build stays active.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  statehouse serve &
  statehouse policy dev policies/setpoint
  statehouse policy logs                     # in another terminal")]
pub(in crate::cli) struct Args {
    /// The directory of the project
    #[arg(default_value = ".")]
    dir: PathBuf,

    /// Build without network access
    #[arg(long)]
    offline: bool,

    #[command(flatten)]
    store: Store,
}

pub(super) async fn run(args: &Args) -> Result<Exit, Failure> {
    // These are errors at once, not after the first build.
    build::require_project(&args.dir)?;
    args.store.ask(Method::GET, "/v1/policies").await?;
    let mut loaded: Option<String> = None;
    loop {
        let seen = files(&args.dir)?;
        match build_and_test(args) {
            Ok(Some(module)) => reload(args, &module, &seen, &mut loaded).await?,
            Ok(None) => notice("this build was not loaded: correct it, and save again"),
            Err(failure) => notice(failure.message()),
        }
        while files(&args.dir)? == seen {
            tokio::time::sleep(POLL).await;
        }
    }
}

/// Builds and tests the policy. Returns its file, or none if it is not fit.
fn build_and_test(args: &Args) -> Result<Option<Vec<u8>>, Failure> {
    let (policy, mut exit) = build::build(&build::Args {
        dir: args.dir.clone(),
        output: None,
        offline: args.offline,
    })?;
    let tests = args.dir.join("tests");
    if exit == Exit::Done && tests.is_dir() {
        exit = test::run(&test::Args {
            policy: policy.clone(),
            transcripts: vec![tests],
            ..test::Args::default()
        })?;
    }
    Ok(match exit {
        Exit::Done => Some(read_policy(&policy)?),
        _ => None,
    })
}

/// Promotes a build. While the store does not answer, waits until it does or until a file differs
/// from `seen`. `loaded` is the digest of the last build that was promoted.
async fn reload(
    args: &Args,
    module: &[u8],
    seen: &Files,
    loaded: &mut Option<String>,
) -> Result<(), Failure> {
    let mut is_waiting = false;
    loop {
        match promote(args, module, loaded.as_deref()).await {
            Ok((digest, promoted)) => {
                *loaded = Some(digest);
                emit(promoted.as_bytes())?;
                return Ok(());
            }
            Err(failure) if !failure.is_transport() => {
                notice(failure.message());
                return Ok(());
            }
            Err(_) if is_waiting => {}
            Err(failure) => {
                let failure = failure.with("This build is loaded when the store answers again");
                notice(failure.message());
                is_waiting = true;
            }
        }
        loop {
            tokio::time::sleep(RETRY).await;
            if files(&args.dir)? != *seen {
                return Ok(());
            }
            // Any other failure is shown by the next attempt.
            match args.store.ask(Method::GET, "/v1/policies").await {
                Err(failure) if failure.is_transport() => {}
                _ => break,
            }
        }
    }
}

/// Loads and promotes a build, and unloads the one before. Returns its digest and the message.
async fn promote(
    args: &Args,
    module: &[u8],
    before: Option<&str>,
) -> Result<(String, String), Failure> {
    let view = args
        .store
        .send(Method::POST, "/v1/policies", module.to_vec())
        .await?;
    let digest = words::text(&view["digest"]);
    let path = format!("/v1/policies/{digest}/promote");
    let view: Json = args.store.ask(Method::POST, &path).await?;
    if let Some(before) = before.filter(|it| *it != digest) {
        // Another operator may have given it a role.
        let path = format!("/v1/policies/{before}");
        if let Err(failure) = args.store.ask(Method::DELETE, &path).await {
            notice(failure.message());
        }
    }
    Ok((digest, format!("promoted {}\n", words::policy(&view))))
}

/// The files that are watched.
fn files(project: &Path) -> Result<Files, Failure> {
    let mut files = BTreeMap::new();
    let mut directories = vec![project.to_owned()];
    while let Some(directory) = directories.pop() {
        let entries = match fs::read_dir(&directory) {
            // A directory may disappear while an editor saves.
            Err(error) if error.kind() == io::ErrorKind::NotFound && directory != project => {
                continue;
            }
            entries => entries.map_err(|error| {
                Failure::usage(format!("cannot read {}: {error}", directory.display()))
            })?,
        };
        for entry in entries {
            let entry = entry?;
            let (name, path) = (entry.file_name(), entry.path());
            let name = name.to_string_lossy();
            if GENERATED.contains(&&*name) || name.starts_with('.') || name.ends_with(".wasm") {
                continue;
            }
            // The file may be gone by now.
            let Ok(about) = entry.metadata() else {
                continue;
            };
            if about.is_dir() {
                // A store writes to its data directory, for example the assignment of each build.
                if !path.join(statehouse_wal::LOCK).exists() {
                    directories.push(path);
                }
            } else if files.len() < limits::PROJECT_FILES_MAX {
                files.insert(path, about.modified()?);
            }
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_builds_and_of_stores_are_not_watched() {
        let project = tempfile::tempdir().unwrap();
        let create = |path: &str| {
            let path = project.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        };
        for path in [
            "Cargo.lock",
            "target/a",
            "rule.wasm",
            "data/lock",
            "data/0.log",
        ] {
            create(path);
        }
        assert_eq!(files(project.path()).unwrap().len(), 0);
        create("src/lib.rs");
        create("tests/data/lock.txt");
        assert_eq!(files(project.path()).unwrap().len(), 2);
    }
}
