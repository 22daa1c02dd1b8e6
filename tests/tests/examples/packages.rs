//! The crates that are published: each package must hold the files that it needs, and cargo must
//! accept it.

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use statehouse_tests::command::{finish, finish_within};

use crate::clients::driver::workspace;

/// The published crates, each after those that it depends on, and their directories.
const PACKAGES: [(&str, &str); 4] = [
    ("statehouse-link", "host/link"),
    ("statehouse-client", "host/client"),
    ("statehouse-policy", "guest/sdk"),
    ("statehouse-guest", "guest"),
];

/// The verification compiles the dependencies of all packages.
const PATIENCE: Duration = Duration::from_secs(1800);

fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace()).args(arguments);
    command
}

/// The Rust files below a directory, relative to `root`.
fn sources(root: &Path, directory: &Path, found: &mut BTreeSet<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(root, &path, found);
        } else if path.extension().is_some_and(|it| it == "rs") {
            found.insert(path.strip_prefix(root).unwrap().to_owned());
        }
    }
}

#[test]
fn packages_contain_the_files_that_they_need() {
    for (package, directory) in PACKAGES {
        let list = cargo(&[
            "package",
            "--list",
            "--offline",
            "--allow-dirty",
            "-p",
            package,
        ]);
        let list = finish(list, b"").code(0).text();
        let listed: BTreeSet<PathBuf> = list.lines().map(PathBuf::from).collect();

        let root = workspace().join(directory);
        let mut needed: BTreeSet<PathBuf> = ["Cargo.toml", "README.md", "LICENSE"]
            .map(PathBuf::from)
            .into();
        sources(&root, &root.join("src"), &mut needed);
        match package {
            "statehouse-client" => sources(&root, &root.join("examples"), &mut needed),
            "statehouse-policy" => {
                needed.insert("wit/policy.wit".into());
                sources(&root, &root.join("examples"), &mut needed);
            }
            _ => {}
        }
        let missing: Vec<_> = needed.difference(&listed).collect();
        assert!(missing.is_empty(), "{package} lacks {missing:?}");
        assert!(needed.len() > 5, "{package}: {needed:?}");
    }
}

#[test]
#[ignore = "asks the registry and compiles all dependencies"]
fn packages_build_alone_and_cargo_accepts_them() {
    // Half a gigabyte, which no other test could use.
    let target = tempfile::tempdir().unwrap();
    let mut publish = cargo(&["publish", "--dry-run", "--allow-dirty"]);
    publish.env("CARGO_TARGET_DIR", target.path());
    for (package, _) in PACKAGES {
        publish.args(["-p", package]);
    }
    let ran = finish_within(publish, b"", PATIENCE).code(0);
    for (package, _) in PACKAGES {
        assert!(
            ran.stderr.contains(&format!("Uploading {package} v")),
            "{ran:#?}"
        );
    }
}

/// As cluster.md says.
#[test]
#[ignore = "compiles all dependencies"]
fn program_builds_without_clusters() {
    let target = tempfile::tempdir().unwrap();
    let mut check = cargo(&[
        "check",
        "--locked",
        "--no-default-features",
        "-p",
        "statehouse",
    ]);
    check.env("CARGO_TARGET_DIR", target.path());
    let ran = finish_within(check, b"", PATIENCE).code(0);
    assert!(!ran.stderr.contains("warning:"), "{ran:#?}");
}
