//! Creates the project of a new policy: a rule that builds, with tests that pass.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use statehouse_core::policy::BUILT_IN;

/// The language of a project.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Language {
    /// Rust, compiled by cargo.
    Rust,
    /// JavaScript, run by QuickJS.
    JavaScript,
    /// Python, run by CPython.
    Python,
}

impl Language {
    /// The commands that install the tool of `policy build` into a project, if it needs one.
    pub fn install_commands(self) -> &'static [&'static str] {
        match self {
            Self::Rust => &[],
            Self::JavaScript => &["npm install"],
            Self::Python => &[
                "python3 -m venv .venv",
                ".venv/bin/pip install componentize-py==0.25.1",
            ],
        }
    }

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
        "a policy's name consists of lower-case letters, digits and `-`, begins with a letter, has at most {} bytes and is not `{}`",
        statehouse_core::limits::POLICY_NAME_BYTES_MAX,
        BUILT_IN
    )]
    Name,
    /// The directory exists and is not empty.
    #[error("{0} is there already and was not changed: name another directory with --dir")]
    Exists(PathBuf),
    /// A file cannot be written.
    #[error("cannot write {0}: {1}")]
    Io(PathBuf, io::Error),
}

macro_rules! template {
    ($path:literal) => {
        include_str!(concat!("../../templates/", $path))
    };
}

/// The files of every project.
const COMMON: &[(&str, &str)] = &[
    ("wit/policy.wit", include_str!("../../../wit/policy.wit")),
    ("tests/setpoint.txt", template!("setpoint.txt")),
    ("tests/others.txt", template!("others.txt")),
];

const RUST: &[(&str, &str)] = &[
    ("Cargo.toml", template!("rust/Cargo.toml")),
    ("README.md", template!("rust/README.md")),
    ("src/lib.rs", template!("rust/src/lib.rs")),
    (".gitignore", "/target\n/*.wasm\n/statehouse-data\n"),
];

const JAVASCRIPT: &[(&str, &str)] = &[
    ("package.json", template!("javascript/package.json")),
    ("README.md", template!("javascript/README.md")),
    ("policy.js", template!("javascript/policy.js")),
    (".gitignore", "/node_modules\n/*.wasm\n/statehouse-data\n"),
];

const PYTHON: &[(&str, &str)] = &[
    ("pyproject.toml", template!("python/pyproject.toml")),
    ("README.md", template!("python/README.md")),
    ("src/app.py", template!("python/app.py")),
    (
        ".gitignore",
        "/.venv\n__pycache__/\n/*.wasm\n/statehouse-data\n",
    ),
];

/// Whether a name is valid for a package, a file and a policy.
pub fn is_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    name.len() <= statehouse_core::limits::POLICY_NAME_BYTES_MAX
        && name.bytes().all(plain)
        && name.starts_with(|first: char| first.is_ascii_lowercase())
        && name != BUILT_IN
}

/// Writes a project. The directory must be empty or not exist.
pub fn create(name: &str, language: Language, directory: &Path) -> Result<(), ProjectError> {
    if !is_name(name) {
        return Err(ProjectError::Name);
    }
    let is_free = match fs::read_dir(directory) {
        Ok(mut entries) => entries.next().is_none(),
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    };
    if !is_free {
        return Err(ProjectError::Exists(directory.to_owned()));
    }
    let own = match language {
        Language::Rust => RUST,
        Language::JavaScript => JAVASCRIPT,
        Language::Python => PYTHON,
    };
    for (path, text) in COMMON.iter().chain(own) {
        let path = directory.join(path);
        let written = write(&path, &text.replace("{{name}}", name));
        written.map_err(|error| ProjectError::Io(path, error))?;
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> io::Result<()> {
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
        let long = "a".repeat(65);
        for bad in ["", "-a", "2a", "A", "a b", "a/b", "ä", BUILT_IN, &long] {
            assert!(!is_name(bad), "{bad}");
        }
    }

    #[test]
    fn rust_project_uses_the_bindings_of_the_workspace() {
        // The project generates its bindings, so it has more features.
        let line = |text: &'static str, name| {
            let line = text.lines().find(|line| line.starts_with(name))?;
            line.split(", ").next()
        };
        let workspace = include_str!("../../../Cargo.toml");
        let own = include_str!("../../templates/rust/Cargo.toml");
        for name in ["wit-bindgen = ", "edition = "] {
            let expected = line(workspace, name);
            assert!(expected.is_some() && line(own, name) == expected, "{name}");
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
