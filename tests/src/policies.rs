//! Policies of the tests, built once per test program.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, OnceLock},
};

/// The module of `policies/faulty`.
pub fn faulty() -> &'static str {
    static MODULE: OnceLock<String> = OnceLock::new();
    MODULE.get_or_init(|| {
        let module = build("faulty", |_| {});
        module.into_os_string().into_string().unwrap()
    })
}

/// A module of `policies/marked` with this mark.
pub fn marked(mark: &str) -> PathBuf {
    // Both come out under one name.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    let module = build("marked", |cargo| _ = cargo.env("MARK", mark));
    let own = module.with_file_name(format!("marked-{mark}-{}.wasm", std::process::id()));
    fs::copy(&module, &own).unwrap();
    own
}

/// Builds with a target directory of its own, so that it waits for no other build.
fn build(package: &str, more: impl Fn(&mut Command)) -> PathBuf {
    // target/<profile>/deps/<test> → target/tmp/policies
    let test = env::current_exe().expect("a running test has a path");
    let target = test
        .ancestors()
        .nth(3)
        .expect("a test lies in target/<profile>/deps")
        .join("tmp/policies");
    let mut cargo = Command::new(env!("CARGO"));
    cargo
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))
        .args(["build", "--package", package, "--profile", "guest"])
        .args(["--locked", "--quiet", "--target", "wasm32-unknown-unknown"])
        .arg("--target-dir")
        .arg(&target);
    more(&mut cargo);
    let built = cargo.status().unwrap();
    assert!(built.success(), "policies/{package} does not build");
    target.join(format!("wasm32-unknown-unknown/guest/{package}.wasm"))
}
