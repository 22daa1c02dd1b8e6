//! Builds the policies of the tests, once per test program.

use std::{
    env,
    fs::{self, File},
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

#[path = "../policies/building.rs"]
mod building;

/// Files that are no policies, with their names.
pub const INVALID: [(&str, &[u8]); 5] = [
    ("empty.wasm", b""),
    ("rubbish.wasm", b"this is no policy"),
    ("module.wasm", b"\0asm\x01\0\0\0"),
    ("component.wasm", b"\0asm\x0D\0\x01\0"),
    ("cut.wasm", b"\0asm\x01\0\0\0\x01\xFF"),
];

/// The module of `policies/faulty`.
pub fn faulty() -> &'static str {
    static MODULE: OnceLock<String> = OnceLock::new();
    MODULE.get_or_init(|| {
        let module = build("faulty", |_| {});
        module.into_os_string().into_string().unwrap()
    })
}

/// The module of `policies/malformed`.
pub fn malformed() -> PathBuf {
    build("malformed", |_| {})
}

/// The module of `policies/marked`, built with this mark.
pub fn marked(mark: &str) -> PathBuf {
    let directory = target_directory();
    fs::create_dir_all(&directory).unwrap();
    // All marks build to the same file, and tests run in parallel. Drop releases the lock.
    let lock = File::create(directory.join("marked.lock")).unwrap();
    lock.lock().unwrap();
    let module = build("marked", |cargo| _ = cargo.env("MARK", mark));
    let unfinished = module.with_extension("unfinished");
    fs::copy(&module, &unfinished).unwrap();
    let own = module.with_file_name(format!("marked-{mark}.wasm"));
    fs::rename(&unfinished, &own).unwrap();
    own
}

/// The module of an example in Rust.
pub fn example(package: &str) -> PathBuf {
    build(package, |_| {})
}

/// The component of `examples/set-point/js`, built by componentize-qjs.
pub fn in_javascript() -> PathBuf {
    interpreted("js", |sources, component| {
        let tool = sources.join("node_modules/.bin/componentize-qjs");
        let mut command = Command::new(tool);
        command
            .args(["--world", "policy", "--sync", "--stub-wasi"])
            .arg("--wit")
            .arg(workspace().join("wit"))
            .arg("--js")
            .arg(sources.join("policy.js"))
            .arg("--output")
            .arg(component);
        command
    })
}

/// The component of `examples/set-point/python`, built by componentize-py.
pub fn in_python() -> PathBuf {
    interpreted("python", |sources, component| {
        let tool = workspace().join("target/venv/bin/componentize-py");
        let mut command = Command::new(tool);
        command
            .args(["--quiet", "--world", "policy", "--wit-path"])
            .arg(workspace().join("wit"))
            .args(["componentize", "--stub-wasi", "set_point", "--python-path"])
            .arg(sources)
            .arg("--output")
            .arg(component);
        command
    })
}

/// Builds the component, unless it exists. The name of its file contains a hash of all its sources.
fn interpreted(language: &str, builder: impl Fn(&Path, &Path) -> Command) -> PathBuf {
    let sources = workspace().join("examples/set-point").join(language);
    let mut made_of = DefaultHasher::new();
    for part in [
        "policy.js",
        "package-lock.json",
        "set_point.py",
        "requirements.txt",
    ] {
        fs::read(sources.join(part)).ok().hash(&mut made_of);
    }
    fs::read(workspace().join("wit/policy.wit"))
        .unwrap()
        .hash(&mut made_of);
    let directory = target_directory();
    fs::create_dir_all(&directory).unwrap();
    let component = directory.join(format!(
        "set-point-{language}-{:016x}.wasm",
        made_of.finish()
    ));
    if !component.exists() {
        let unfinished = component.with_extension(std::process::id().to_string());
        let mut command = builder(&sources, &unfinished);
        let built = command.output().unwrap_or_else(|error| {
            panic!("{command:?}: {error}. `bash tests/run` installs the required tools.")
        });
        let said = String::from_utf8_lossy(&built.stderr);
        assert!(built.status.success(), "{command:?} failed: {said}");
        fs::rename(&unfinished, &component).unwrap();
    }
    component
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// target/<profile>/deps/<test> → target/tmp/policies
fn target_directory() -> PathBuf {
    let test = env::current_exe().expect("a running test has a path");
    let target = test.ancestors().nth(3);
    target
        .expect("a test lies in target/<profile>/deps")
        .join("tmp/policies")
}

fn build(package: &str, more: impl Fn(&mut Command)) -> PathBuf {
    building::build(package, &target_directory(), more)
}
