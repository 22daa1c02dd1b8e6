//! Builds policies of this workspace for tests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

const WORKSPACE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Builds the module of a package, unless it is newer than its sources. Policies have their own
/// target directory, so that no other build blocks this one.
pub(crate) fn build(package: &str, target: &Path, more: impl Fn(&mut Command)) -> PathBuf {
    let module = module(package, target);
    if is_current(&module, &module.with_extension("d")) {
        return module;
    }
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .current_dir(WORKSPACE)
        .args(["build", "--package", package, "--profile", "guest"])
        .args(["--locked", "--quiet", "--target", "wasm32-unknown-unknown"])
        .arg("--target-dir")
        .arg(target);
    more(&mut cargo);
    let built = cargo.status().expect("cargo runs");
    assert!(built.success(), "{package} does not build");
    module
}

/// The path of the module of a package.
pub(crate) fn module(package: &str, target: &Path) -> PathBuf {
    let module = package.replace('-', "_");
    target.join(format!("wasm32-unknown-unknown/guest/{module}.wasm"))
}

/// Whether a module exists, and is newer than its sources in this list and than the versions of all
/// dependencies.
pub(crate) fn is_current(module: &Path, list: &Path) -> bool {
    let Some(built) = modified(module) else {
        return false;
    };
    let is_older = |path: &str| modified(&Path::new(WORKSPACE).join(path)) < Some(built);
    list.exists()
        && newer_source(module, list).is_none()
        && ["Cargo.toml", "Cargo.lock"].into_iter().all(is_older)
}

/// The first source file that changed since this file was built. Cargo lists the sources in a `.d`
/// file next to what it builds.
pub(crate) fn newer_source(built: &Path, list: &Path) -> Option<PathBuf> {
    let built = modified(built)?;
    let list = fs::read_to_string(list).ok()?;
    let (_, sources) = list.lines().next()?.split_once(": ")?;
    sources
        // The list writes a space inside a path as `\ `.
        .replace("\\ ", "\0")
        .split(' ')
        .map(|path| PathBuf::from(path.replace('\0', " ")))
        .find(|path| modified(path).is_some_and(|at| at > built))
}

fn modified(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).ok()?.modified().ok()
}
