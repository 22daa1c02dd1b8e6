//! Policies of the tests, built once per test program.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

/// The module of `policies/faulty`, built with a target directory of its own, so that it waits for no other build.
pub fn faulty() -> &'static str {
    static MODULE: OnceLock<String> = OnceLock::new();
    MODULE.get_or_init(|| {
        // target/<profile>/deps/<test> → target/tmp/policies
        let test = env::current_exe().expect("a running test has a path");
        let target = test
            .ancestors()
            .nth(3)
            .expect("a test lies in target/<profile>/deps")
            .join("tmp/policies");
        let built = Command::new(env!("CARGO"))
            .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))
            .args(["build", "--package", "faulty", "--profile", "guest"])
            .args(["--locked", "--quiet", "--target", "wasm32-unknown-unknown"])
            .arg("--target-dir")
            .arg(&target)
            .status()
            .unwrap();
        assert!(built.success(), "policies/faulty does not build");
        let module: PathBuf = target.join("wasm32-unknown-unknown/guest/faulty.wasm");
        module.into_os_string().into_string().unwrap()
    })
}
