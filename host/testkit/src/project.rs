//! Creates the project of a new policy: a small one that builds, with tests that pass.
//!
//! A Rust project contains the sources of the SDK and the standard policy of this program, so it
//! builds without downloading them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The language of a project.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Language {
    /// Rust, on top of the standard policy.
    Rust,
    /// JavaScript, run by QuickJS.
    JavaScript,
    /// Python, run by CPython.
    Python,
}

impl Language {
    /// The language of a project directory, by the manifest that it contains.
    pub fn of(directory: &Path) -> Option<Self> {
        let has = |name: &str| directory.join(name).is_file();
        match () {
            () if has("Cargo.toml") => Some(Self::Rust),
            () if has("package.json") => Some(Self::JavaScript),
            () if has("pyproject.toml") => Some(Self::Python),
            () => None,
        }
    }
}

/// Why a project cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum ProjectError {
    /// The name is invalid.
    #[error(
        "a policy's name consists of lower-case letters, digits and `-`, begins with a letter and has at most {} bytes",
        statehouse_core::limits::POLICY_NAME_BYTES_MAX
    )]
    Name,
    /// The directory exists and is not empty.
    #[error("{0} is there already and was not changed: name another directory with --dir")]
    Exists(PathBuf),
    /// A file cannot be written.
    #[error("cannot write {0}: {1}")]
    Io(PathBuf, io::Error),
}

/// The sources of the SDK and of the standard policy.
const SOURCES: &[(&str, &str)] = include!(concat!(env!("OUT_DIR"), "/sources.rs"));

/// The files of every project.
const COMMON: &[(&str, &str)] = &[
    ("wit/policy.wit", include_str!("../../../wit/policy.wit")),
    (
        "tests/setpoint.txt",
        include_str!("../../templates/setpoint.txt"),
    ),
];

const RUST: &[(&str, &str)] = &[
    (
        "Cargo.toml",
        include_str!("../../templates/rust/Cargo.toml"),
    ),
    ("README.md", include_str!("../../templates/rust/README.md")),
    (
        "src/lib.rs",
        include_str!("../../templates/rust/src/lib.rs"),
    ),
    (
        "vendor/statehouse-policy/Cargo.toml",
        include_str!("../../templates/rust/policy.toml"),
    ),
    (
        "vendor/statehouse-policy/wit/policy.wit",
        include_str!("../../../wit/policy.wit"),
    ),
    // The documentation of the crates includes these.
    (
        "vendor/statehouse-policy/README.md",
        include_str!("../../../guest/sdk/README.md"),
    ),
    (
        "vendor/statehouse-policy/examples/tally.rs",
        include_str!("../../../guest/sdk/examples/tally.rs"),
    ),
    (
        "vendor/statehouse-guest/Cargo.toml",
        include_str!("../../templates/rust/guest.toml"),
    ),
    (
        "vendor/statehouse-guest/README.md",
        include_str!("../../../guest/README.md"),
    ),
    (
        "tests/others.txt",
        include_str!("../../templates/rust/others.txt"),
    ),
    (".gitignore", "/target\n/*.wasm\n"),
];

const JAVASCRIPT: &[(&str, &str)] = &[
    (
        "package.json",
        include_str!("../../templates/javascript/package.json"),
    ),
    (
        "README.md",
        include_str!("../../templates/javascript/README.md"),
    ),
    (
        "policy.js",
        include_str!("../../templates/javascript/policy.js"),
    ),
    (".gitignore", "/node_modules\n/*.wasm\n"),
];

const PYTHON: &[(&str, &str)] = &[
    (
        "pyproject.toml",
        include_str!("../../templates/python/pyproject.toml"),
    ),
    (
        "README.md",
        include_str!("../../templates/python/README.md"),
    ),
    ("src/app.py", include_str!("../../templates/python/app.py")),
    (".gitignore", "/.venv\n__pycache__/\n/*.wasm\n"),
];

/// Whether a name is valid for a package, a file and a policy.
pub fn is_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    name.len() <= statehouse_core::limits::POLICY_NAME_BYTES_MAX
        && name.bytes().all(plain)
        && name.starts_with(|first: char| first.is_ascii_lowercase())
}

/// Writes a project. The directory must be empty or not exist.
pub fn create(name: &str, language: Language, directory: &Path) -> Result<(), ProjectError> {
    if !is_name(name) {
        return Err(ProjectError::Name);
    }
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |error| ProjectError::Io(path, error)
    };
    let is_free = match fs::read_dir(directory) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    };
    if !is_free {
        return Err(ProjectError::Exists(directory.to_owned()));
    }
    let (own, sources) = match language {
        Language::Rust => (RUST, SOURCES),
        Language::JavaScript => (JAVASCRIPT, &[][..]),
        Language::Python => (PYTHON, &[][..]),
    };
    for (path, text) in COMMON.iter().chain(own) {
        let text = text.replace("{{name}}", name);
        let text = text.replace("{{version}}", env!("CARGO_PKG_VERSION"));
        write(directory, path, &text).map_err(failed(&directory.join(path)))?;
    }
    // The sources are written unchanged.
    for (path, text) in sources {
        write(directory, path, text).map_err(failed(&directory.join(path)))?;
    }
    Ok(())
}

fn write(directory: &Path, path: &str, text: &str) -> io::Result<()> {
    let path = directory.join(path);
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(path, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_must_be_valid_for_a_package() {
        for good in ["a", "set-point2"] {
            assert!(is_name(good), "{good}");
        }
        for bad in ["", "-a", "2a", "A", "a b", "a/b", "ä", &"a".repeat(65)] {
            assert!(!is_name(bad), "{bad}");
        }
    }

    #[test]
    fn vendored_manifests_match_the_workspace() {
        let workspace = include_str!("../../../Cargo.toml");
        let line = |text: &str, name: &str| {
            let found = text.lines().find(|line| line.starts_with(name));
            found
                .map(str::to_owned)
                .unwrap_or_else(|| panic!("no {name}"))
        };
        let text = |path: &str| RUST.iter().find(|(name, _)| *name == path).unwrap().1;
        let policy = text("vendor/statehouse-policy/Cargo.toml");
        assert_eq!(line(policy, "wit-bindgen"), line(workspace, "wit-bindgen"));
        assert_eq!(line(policy, "edition"), line(workspace, "edition"));
        for (own, original) in [
            (policy, include_str!("../../../guest/sdk/Cargo.toml")),
            (
                text("vendor/statehouse-guest/Cargo.toml"),
                include_str!("../../../guest/Cargo.toml"),
            ),
        ] {
            assert_eq!(line(own, "version"), line(original, "version"));
            assert_eq!(line(own, "name"), line(original, "name"));
        }
        for path in [
            "vendor/statehouse-policy/src/lib.rs",
            "vendor/statehouse-guest/src/lib.rs",
        ] {
            assert!(SOURCES.iter().any(|(name, _)| *name == path), "{path}");
        }
    }

    #[test]
    fn project_contains_no_text_about_examples() {
        for language in [Language::Rust, Language::JavaScript, Language::Python] {
            let directory = tempfile::tempdir().unwrap();
            create("my-rule", language, directory.path()).unwrap();
            assert_eq!(Language::of(directory.path()), Some(language));
            let mut named = 0;
            for file in [
                "src/lib.rs",
                "policy.js",
                "src/app.py",
                "README.md",
                "package.json",
                "Cargo.toml",
            ] {
                let Ok(text) = fs::read_to_string(directory.path().join(file)) else {
                    continue;
                };
                assert!(
                    !text.contains("set-point-") && !text.contains("{{"),
                    "{file}:\n{text}"
                );
                named += usize::from(text.contains("my-rule"));
            }
            assert!(named > 1, "{language:?}");
        }
    }

    #[test]
    fn create_never_overwrites_files() {
        let directory = tempfile::tempdir().unwrap();
        create("a", Language::Rust, directory.path()).unwrap();
        let again = create("b", Language::Rust, directory.path());
        assert!(matches!(again, Err(ProjectError::Exists(_))));
        let manifest = fs::read_to_string(directory.path().join("Cargo.toml")).unwrap();
        assert!(manifest.contains("name = \"a\""), "{manifest}");
        let file = directory.path().join("Cargo.toml");
        assert!(create("b", Language::Rust, &file).is_err());
        let bad = create("B", Language::Rust, &directory.path().join("b"));
        assert!(matches!(bad, Err(ProjectError::Name)));
    }
}
