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
/// or that fails a transcript, is not loaded. Hidden files, *.wasm, Cargo.lock, target,
/// node_modules, vendor, __pycache__ and the data directories of stores are not watched. Ends on
/// Ctrl-C; the last build stays active.
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
        match reload(args, loaded.as_deref()).await {
            Ok(Some(digest)) => loaded = Some(digest),
            Ok(None) => notice("this build was not loaded: correct it, and save again"),
            Err(failure) => notice(failure.message()),
        }
        while files(&args.dir)? == seen {
            tokio::time::sleep(POLL).await;
        }
    }
}

/// Builds, tests and promotes the policy. Returns its digest, or none if it is not fit.
async fn reload(args: &Args, before: Option<&str>) -> Result<Option<String>, Failure> {
    let (policy, exit) = build::build(&build::Args::of(args.dir.clone(), args.offline))?;
    let tests = args.dir.join("tests");
    if exit != Exit::Done
        || (tests.is_dir() && test::run(&test::Args::of(policy.clone(), tests))? != Exit::Done)
    {
        return Ok(None);
    }
    let module = read_policy(&policy)?;
    let view = args
        .store
        .send(Method::POST, "/v1/policies", module)
        .await?;
    let digest = words::text(&view["digest"]);
    let path = format!("/v1/policies/{digest}/promote");
    let view: Json = args.store.ask(Method::POST, &path).await?;
    emit(format!("promoted {}\n", words::policy(&view)).as_bytes())?;
    if let Some(before) = before.filter(|it| *it != digest) {
        // Another operator may have given it a role.
        let path = format!("/v1/policies/{before}");
        if let Err(failure) = args.store.ask(Method::DELETE, &path).await {
            notice(failure.message());
        }
    }
    Ok(Some(digest))
}

/// The files of a project, with the times of their last changes.
fn files(project: &Path) -> Result<BTreeMap<PathBuf, SystemTime>, Failure> {
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
