//! Builds policies of this workspace for tests. The host's tests and the end-to-end tests both
//! include this file, because they share no crate.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds the module of a package. Policies have their own target directory, so that no other build
/// blocks this one.
pub(crate) fn build(package: &str, target: &Path, more: impl Fn(&mut Command)) -> PathBuf {
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))
        .args(["build", "--package", package, "--profile", "guest"])
        .args(["--locked", "--quiet", "--target", "wasm32-unknown-unknown"])
        .arg("--target-dir")
        .arg(target);
    more(&mut cargo);
    let built = cargo.status().expect("cargo runs");
    assert!(built.success(), "{package} does not build");
    let module = package.replace('-', "_");
    target.join(format!("wasm32-unknown-unknown/guest/{module}.wasm"))
}
