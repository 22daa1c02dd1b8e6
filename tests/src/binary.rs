//! Finds the binary under test. A binary that is older than its sources must be refused, because a
//! test against it proves nothing.

use std::{
    env,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use crate::policies::building::newer_source;

/// The path of the `statehouse` binary: `STATEHOUSE_BIN`, or the binary in the running test's
/// target directory.
pub fn statehouse() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| match env::var_os("STATEHOUSE_BIN") {
        Some(path) => PathBuf::from(path),
        None => in_target_directory("statehouse"),
    })
}

/// The path of an example's binary, in the running test's target directory.
pub fn example(name: &str) -> PathBuf {
    in_target_directory(name)
}

/// The path of the `statehouse` binary for another target, built with the profile of the running
/// test. Fails if the target was not built, with a text that says how to build it.
pub fn for_target(target: &str) -> Result<PathBuf, String> {
    let test = env::current_exe().expect("a running test has a path");
    let mut parts = test.ancestors().skip(2);
    let profile = parts.next().and_then(Path::file_name);
    let profile = profile.expect("a test lies in target/<profile>/deps");
    let directory = parts.next().expect("a test lies in target/<profile>/deps");
    let path = directory.join(target).join(profile).join("statehouse");
    let remedy = format!("Build it with `bash host/dist/build --profile dev {target}`.");
    match path.exists() {
        true => Ok(fresh(path, &remedy)),
        false => Err(format!("{} is missing. {remedy}", path.display())),
    }
}

fn in_target_directory(name: &str) -> PathBuf {
    let remedy = format!(
        "Build it with `cargo build -p {name} --bin {name}`, or run the tests with `bash tests/run`, which does that first."
    );
    // target/<profile>/deps/<test> → target/<profile>/<name>
    let test = env::current_exe().expect("a running test has a path");
    let path = test
        .ancestors()
        .nth(2)
        .expect("a test lies in target/<profile>/deps")
        .join(name);
    assert!(
        path.exists(),
        "The binary under test is missing at {}. {remedy}",
        path.display()
    );
    fresh(path, &remedy)
}

/// Refuses a binary that is older than its sources.
fn fresh(path: PathBuf, remedy: &str) -> PathBuf {
    if let Some(source) = newer_source(&path, &path.with_extension("d")) {
        panic!(
            "The binary under test at {} is older than {}. {remedy}",
            path.display(),
            source.display()
        );
    }
    path
}

#[cfg(test)]
mod tests {
    use std::{fs, time::SystemTime};

    use super::*;

    #[test]
    fn newer_source_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let [binary, listed, old, new] =
            ["statehouse", "statehouse.d", "old.rs", "a new.rs"].map(|it| dir.path().join(it));
        let second = |n| SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(n);
        for (path, at) in [(&old, 1), (&binary, 2), (&new, 3)] {
            let file = fs::File::create(path).unwrap();
            file.set_modified(second(at)).unwrap();
        }
        let list = |sources: &str| {
            fs::write(&listed, format!("{}: {sources}\n", binary.display())).unwrap();
        };
        list(&old.display().to_string());
        assert_eq!(newer_source(&binary, &listed), None);
        let escaped = new.display().to_string().replace(' ', "\\ ");
        list(&format!("{} {escaped}", old.display()));
        assert_eq!(newer_source(&binary, &listed), Some(new));
    }
}
