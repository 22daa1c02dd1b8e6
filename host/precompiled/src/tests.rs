use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use wasmtime::OptLevel;

use super::*;

const BOUNDS: Bounds = Bounds {
    files_max: 3,
    bytes_max: 16 << 20,
};

/// A start of the program: an engine and its sources of machine code.
struct Start {
    engine: Engine,
    precompiled: Precompiled,
}

impl Start {
    fn new(directory: &Path) -> Self {
        Self::with(&config(), directory, BOUNDS)
    }

    fn with(config: &wasmtime::Config, directory: &Path, bounds: Bounds) -> Self {
        let mut precompiled = Precompiled::default();
        precompiled.keep_in(Directory::open(directory, bounds).unwrap());
        Self {
            engine: Engine::new(config).unwrap(),
            precompiled,
        }
    }

    /// The number of compilations that loading a component takes.
    fn compiles(&self, wasm: &[u8]) -> u64 {
        let before = self.precompiled.compiled();
        let component = self.precompiled.component(&self.engine, wasm).unwrap();
        assert!(component.component_type().exports(&self.engine).len() > 0);
        self.precompiled.compiled() - before
    }
}

/// A different policy: the engine ignores a custom section. It consists of the id 0, its length and
/// its name.
fn policy(name: u8) -> Vec<u8> {
    [STANDARD_POLICY, &[0, 2, 1, name]].concat()
}

/// The only file of a directory.
fn only_file(directory: &Path) -> PathBuf {
    let mut files = fs::read_dir(directory).unwrap();
    let file = files.next().unwrap().unwrap().path();
    assert!(files.next().is_none());
    file
}

fn files(directory: &Path) -> usize {
    fs::read_dir(directory).unwrap().count()
}

#[cfg(feature = "embedded-code")]
#[test]
fn standard_policy_is_never_compiled_or_saved() {
    let data = tempfile::tempdir().unwrap();
    let start = Start::new(&data.path().join("code"));
    assert_eq!(start.compiles(STANDARD_POLICY), 0);
    assert_eq!(files(&data.path().join("code")), 0);
}

#[test]
fn policy_is_compiled_only_by_its_first_start() {
    let data = tempfile::tempdir().unwrap();
    let code = data.path().join("code");
    assert_eq!(Start::new(&code).compiles(&policy(b'a')), 1);
    for _ in 0..2 {
        assert_eq!(Start::new(&code).compiles(&policy(b'a')), 0);
    }
    assert_eq!(Start::new(&code).compiles(&policy(b'b')), 1);
    let mode = only_mode(&code);
    assert_eq!(mode, [0o700, 0o600]);
}

/// The modes of a directory and of its first file.
fn only_mode(directory: &Path) -> [u32; 2] {
    let file = fs::read_dir(directory).unwrap().next().unwrap().unwrap();
    [directory.to_owned(), file.path()]
        .map(|path| fs::metadata(path).unwrap().permissions().mode() & 0o777)
}

#[test]
fn damaged_file_is_compiled_again_and_replaced() {
    let data = tempfile::tempdir().unwrap();
    let code = data.path().join("code");
    let policy = policy(b'a');
    Start::new(&code).compiles(&policy);
    let file = only_file(&code);
    let whole = fs::read(&file).unwrap();
    let flipped = |at: usize| {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        damaged
    };
    // Damage in the digest, in the part that wasmtime checks first, in the middle and at the end;
    // then truncated, longer, empty and unrelated files.
    let mut damaged: Vec<Vec<u8>> = [0, 31, 32, 36, 80, whole.len() / 2, whole.len() - 1]
        .map(flipped)
        .to_vec();
    damaged.extend(
        [0, 1, 31, 32, 33, 96, whole.len() / 2, whole.len() - 1].map(|end| whole[..end].to_vec()),
    );
    damaged.push([&whole[..], b"\0"].concat());
    damaged.push(vec![0; whole.len()]);
    for bytes in damaged {
        fs::write(&file, &bytes).unwrap();
        let start = Start::new(&code);
        assert_eq!(start.compiles(&policy), 1, "{} bytes", bytes.len());
        assert_eq!(fs::read(&file).unwrap(), whole);
        assert_eq!(start.compiles(&policy), 0);
    }
}

#[test]
fn code_of_another_policy_or_engine_is_ignored() {
    let data = tempfile::tempdir().unwrap();
    let code = data.path().join("code");
    let file = |start: Start, name| {
        start.compiles(&policy(name));
        let file = only_file(&code);
        let bytes = fs::read(&file).unwrap();
        fs::remove_file(&file).unwrap();
        (file, bytes)
    };
    let mut slow = config();
    slow.cranelift_opt_level(OptLevel::None);
    let (own, _) = file(Start::new(&code), b'a');
    let (_, of_another) = file(Start::new(&code), b'b');
    let (other_engine, by_another) = file(Start::with(&slow, &code, BOUNDS), b'a');
    assert_ne!(own, other_engine);
    for foreign in [of_another, by_another] {
        fs::write(&own, foreign).unwrap();
        assert_eq!(Start::new(&code).compiles(&policy(b'a')), 1);
    }
}

#[test]
fn directory_writable_by_others_is_refused() {
    let data = tempfile::tempdir().unwrap();
    let open = |path: &Path| Directory::open(path, BOUNDS).unwrap_err().to_string();
    let code = data.path().join("code");
    fs::create_dir(&code).unwrap();
    for mode in [0o720, 0o702, 0o755, 0o1777] {
        fs::set_permissions(&code, fs::Permissions::from_mode(mode)).unwrap();
        assert!(open(&code).contains(&format!("the mode {mode:o}")));
    }
    fs::set_permissions(&code, fs::Permissions::from_mode(0o700)).unwrap();
    Directory::open(&code, BOUNDS).unwrap();
    let link = data.path().join("link");
    symlink(&code, &link).unwrap();
    assert!(open(&link).contains("cannot be opened as a directory"));
    fs::write(data.path().join("file"), "").unwrap();
    assert!(open(&data.path().join("file")).contains("cannot be opened as a directory"));
    assert!(open(Path::new("/nowhere/at/all")).contains("cannot be opened as a directory"));
    // Only root may give a directory to another account. Any other account uses the root directory,
    // which belongs to root.
    match chown(&code, Some(12_345), None) {
        Ok(()) => assert!(open(&code).contains("the user with the number 12345")),
        Err(_) => assert!(open(Path::new("/")).contains("the user with the number 0")),
    }
}

#[test]
fn unusable_directory_makes_every_start_compile() {
    let data = tempfile::tempdir().unwrap();
    let code = data.path().join("code");
    let start = Start::new(&code);
    // Not even root can create a file in a removed directory.
    fs::remove_dir(&code).unwrap();
    for _ in 0..2 {
        assert_eq!(start.compiles(&policy(b'a')), 1);
    }
    let directory = start.precompiled.directory.as_ref().unwrap();
    let nothing = blake3::hash(b"");
    directory.save(&nothing, &nothing, b"code").unwrap_err();
}

#[test]
fn unfinished_file_is_removed() {
    let data = tempfile::tempdir().unwrap();
    let code = data.path().join("code");
    let start = Start::new(&code);
    start.compiles(&policy(b'a'));
    let file = only_file(&code);
    // A file cannot replace a directory.
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    assert_eq!(start.compiles(&policy(b'a')), 1);
    assert_eq!(only_file(&code), file);
}

#[test]
fn least_recently_used_file_is_removed_first() {
    let data = tempfile::tempdir().unwrap();
    let code = data.path().join("code");
    let start = Start::new(&code);
    let pause = || std::thread::sleep(std::time::Duration::from_millis(20));
    for name in *b"abc" {
        assert_eq!(start.compiles(&policy(name)), 1);
        pause();
    }
    assert_eq!(start.compiles(&policy(b'a')), 0);
    assert_eq!(start.compiles(&policy(b'd')), 1);
    assert_eq!(files(&code), BOUNDS.files_max);
    let compiled = b"acd".map(|name| start.compiles(&policy(name)));
    assert_eq!(compiled, [0; 3]);
    assert_eq!(start.compiles(&policy(b'b')), 1);
}

#[test]
fn total_of_all_files_stays_below_its_limit() {
    let data = tempfile::tempdir().unwrap();
    let code = data.path().join("code");
    Start::new(&code).compiles(&policy(b'a'));
    let bytes = fs::metadata(only_file(&code)).unwrap().len();
    let start = |bytes_max| {
        let bounds = Bounds {
            files_max: 3,
            bytes_max,
        };
        Start::with(&config(), &code, bounds)
    };
    // The second file fits only if the first one is removed.
    let narrow = start(bytes + bytes / 2);
    assert_eq!(narrow.compiles(&policy(b'b')), 1);
    assert_eq!(narrow.compiles(&policy(b'b')), 0);
    only_file(&code);
    // A file that cannot fit at all removes no other file and is not read.
    let none = start(bytes - 1);
    assert_eq!(none.compiles(&policy(b'c')), 1);
    assert_eq!(none.compiles(&policy(b'b')), 1);
    only_file(&code);
}

#[test]
fn error_of_the_system_is_found_below_its_context() {
    let lack = rustix::io::Errno::NOMEM;
    let error = wasmtime::Error::from(lack).context("mmap failed to reserve 0x1000 bytes");
    let found = system_error(&error).map(|it| it.raw_os_error());
    assert_eq!(found, Some(Some(lack.raw_os_error())));
    // Like an error of memfd_create(2).
    #[derive(Debug, thiserror::Error)]
    #[error("cannot create a memfd")]
    struct Memfd(#[source] std::io::Error);
    let lack = rustix::io::Errno::MFILE;
    let error = wasmtime::Error::from(Memfd(lack.into())).context("the instance cannot start");
    let found = system_error(&error).map(|it| it.raw_os_error());
    assert_eq!(found, Some(Some(lack.raw_os_error())));
    let other = wasmtime::Error::msg("Cannot allocate memory (os error 12)");
    assert!(system_error(&other).is_none());
}

/// A start that lacks a right would be repeated for ever.
#[test]
fn only_a_lack_of_the_machine_may_pass() {
    use rustix::io::Errno;
    for (errno, passes) in [(Errno::MFILE, true), (Errno::PERM, false)] {
        let error = refused(wasmtime::Error::from(errno));
        assert_eq!(matches!(error, CompileError::Machine(_)), passes, "{error}");
    }
}
