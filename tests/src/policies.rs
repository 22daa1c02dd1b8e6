//! Builds the policies of the tests, once per test program.

use std::{
    env,
    ffi::OsStr,
    fs::{self, File},
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    time::Duration,
};

use crate::{binary, command::finish_within};

#[path = "../policies/building.rs"]
pub(crate) mod building;

/// Files that are no policies, with their names.
pub const INVALID: [(&str, &[u8]); 5] = [
    ("empty.wasm", b""),
    ("rubbish.wasm", b"this is no policy"),
    ("module.wasm", b"\0asm\x01\0\0\0"),
    ("component.wasm", b"\0asm\x0D\0\x01\0"),
    ("cut.wasm", b"\0asm\x01\0\0\0\x01\xFF"),
];

/// A first run compiles the dependencies of projects, perhaps while other tests compile too.
pub const COMPILER_PATIENCE: Duration = Duration::from_secs(600);

/// The module of `policies/faulty`.
pub fn faulty() -> &'static str {
    static MODULE: OnceLock<String> = OnceLock::new();
    MODULE.get_or_init(|| {
        let module = example("faulty");
        module.into_os_string().into_string().unwrap()
    })
}

/// The module of `policies/malformed`.
pub fn malformed() -> PathBuf {
    example("malformed")
}

/// The module of `policies/malformed` with this word as its description.
pub fn described(word: &str) -> Vec<u8> {
    let mark = b"description=";
    let mut module = fs::read(malformed()).unwrap();
    let at = module.windows(mark.len()).position(|it| it == mark);
    let at = at.expect("the module contains its description mode") + mark.len();
    // In the module, the word is followed by dots.
    module[at..at + word.len() + 1].copy_from_slice(format!("{word}.").as_bytes());
    module
}

/// The module of `policies/marked`, built with this mark.
pub fn marked(mark: &str) -> PathBuf {
    let directory = target_directory();
    fs::create_dir_all(&directory).unwrap();
    // All marks build to the same file, and tests run in parallel. Drop releases the lock.
    let lock = File::create(directory.join("marked.lock")).unwrap();
    lock.lock().unwrap();
    let module = building::module("marked", &directory);
    let own = module.with_file_name(format!("marked-{mark}.wasm"));
    if !building::is_current(&own, &module.with_extension("d")) {
        // Otherwise the module of another mark would be new enough.
        _ = fs::remove_file(&module);
        building::build("marked", &directory, |cargo| _ = cargo.env("MARK", mark));
        let unfinished = module.with_extension("unfinished");
        fs::copy(&module, &unfinished).unwrap();
        fs::rename(&unfinished, &own).unwrap();
    }
    own
}

/// The module of an example in Rust, or of a policy of the tests.
pub fn example(package: &str) -> PathBuf {
    building::build(package, &target_directory(), |_| {})
}

/// The policy with the rule of `examples/set-point/LANGUAGE`, built by `statehouse policy build`
/// with the tools that `tests/run` installs. It is built again only if its sources or the program
/// changed, because a build of an interpreter takes long.
pub fn set_point(language: &str) -> PathBuf {
    let project = workspace().join("examples/set-point").join(language);
    let mut made_of = DefaultHasher::new();
    for part in [
        "src/lib.rs",
        "policy.js",
        "package-lock.json",
        "src/app.py",
        "requirements.txt",
    ] {
        fs::read(project.join(part)).ok().hash(&mut made_of);
    }
    let program = fs::metadata(binary::statehouse()).unwrap();
    (program.len(), program.modified().unwrap()).hash(&mut made_of);
    let directory = target_directory();
    fs::create_dir_all(&directory).unwrap();
    let policy = format!("set-point-{language}-{:016x}.wasm", made_of.finish());
    let policy = directory.join(policy);
    if !policy.exists() {
        let unfinished = policy.with_extension(std::process::id().to_string());
        let arguments = [OsStr::new("policy"), "build".as_ref(), "-o".as_ref()];
        let mut build = Command::new(binary::statehouse());
        build.args(arguments).arg(&unfinished).arg(project);
        with_tools(&mut build);
        finish_within(build, b"", COMPILER_PATIENCE).code(0);
        fs::rename(&unfinished, &policy).unwrap();
    }
    policy
}

/// Lets `policy build` find the tools that `tests/run` installs, and gives the builds of all
/// projects one target directory, so that only a first run compiles their dependencies.
pub fn with_tools(build: &mut Command) {
    let tools = workspace().join("target/venv/bin").canonicalize();
    let tools = tools.expect("`bash tests/run` installs the tools");
    let path = format!("{}:{}", tools.display(), env::var("PATH").unwrap());
    let target = target_directory().with_file_name("projects");
    build
        .env("PATH", path)
        .env("CARGO_NET_OFFLINE", "true")
        .env("CARGO_TARGET_DIR", target);
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
