//! Builds policies of this workspace for tests. Included where it is needed: the tests of the host and those of the
//! whole have no crate in common.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The module of a package, built in a target directory of the policies' own, so that it waits for no other build.
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
