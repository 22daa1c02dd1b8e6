//! Tells the program from which commit, and for which target, it is built.
//!
//! Only release builds read the commit from git, because another commit compiles this package
//! again: for development that would cost minutes per commit. `STATEHOUSE_COMMIT` sets the commit
//! of any build, for packagers that build outside of a checkout.

use std::env;
use std::path::Path;
use std::process::Command;

const COMMIT: &str = "STATEHOUSE_COMMIT";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed={COMMIT}");
    let given = env::var(COMMIT).ok().filter(|it| is_commit(it));
    // Cargo calls all profiles that inherit from `release` so.
    let is_release = env::var("PROFILE").is_ok_and(|it| it == "release");
    let commit = given.or_else(|| is_release.then(read_commit).flatten());
    let commit = commit.as_deref().unwrap_or("unknown");
    println!("cargo::rustc-env=STATEHOUSE_BUILD_COMMIT={commit}");
    let target = env::var("TARGET").unwrap_or_default();
    println!("cargo::rustc-env=STATEHOUSE_BUILD_TARGET={target}");
}

/// Whether the text can be printed within a line.
fn is_commit(text: &str) -> bool {
    !text.is_empty()
        && text
            .bytes()
            .all(|it| it.is_ascii_alphanumeric() || b"-_.+".contains(&it))
}

/// The commit of the checkout that this package is a part of.
fn read_commit() -> Option<String> {
    // An archive that was unpacked in another repository is no part of it.
    git(&["ls-files", "--error-unmatch", "build.rs"])?;
    let commit = git(&["rev-parse", "--short=7", "HEAD"])?;
    // What a commit or a checkout changes. Cargo would run this again and again for missing files.
    let branch = git(&["symbolic-ref", "--quiet", "HEAD"]);
    let names = ["HEAD", "logs/HEAD", "packed-refs"].map(str::to_owned);
    let paths = names
        .into_iter()
        .chain(branch)
        .filter_map(|name| git(&["rev-parse", "--git-path", &name]));
    for path in paths.filter(|path| Path::new(path).exists()) {
        println!("cargo::rerun-if-changed={path}");
    }
    is_commit(&commit).then_some(commit)
}

/// The output of git, or none if it fails or is not installed.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_owned())
}
