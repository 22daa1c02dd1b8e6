//! Tests the drop directory: the store loads each policy file that appears there, and writes the
//! result into a status file next to it.

use std::{
    fs::{self, File, FileTimes},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    time::SystemTime,
};

use statehouse_tests::{Server, run_in};

use crate::{OURS, answers, eventually, keygen, ours, policy, roles, sign, until};

fn status(path: &Path) -> Option<String> {
    let mut name = path.as_os_str().to_owned();
    name.push(".status");
    fs::read_to_string(PathBuf::from(name)).ok()
}

/// Waits for a status that starts with `beginning`.
fn wait(path: &Path, beginning: &str) -> String {
    eventually(&format!("{} {beginning}", path.display()), || {
        status(path).filter(|line| line.starts_with(beginning))
    })
}

#[test]
fn dropped_policy_is_loaded_and_gets_a_status_file() {
    let drop = tempfile::tempdir().unwrap();
    let file = drop.path().join("rule.wasm");
    // The file may exist before the store starts.
    fs::copy(ours(), &file).unwrap();
    let server = Server::with("", &["--policy-drop", drop.path().to_str().unwrap()]);
    let line = wait(&file, "loaded ");
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words[..2], ["loaded", OURS], "{line}");
    assert!(words[3].starts_with("blake3:"), "{line}");
    assert_eq!(line.lines().count(), 1);
    assert_eq!(roles(&server, OURS).unwrap(), [""; 0]);

    let wrong = drop.path().join("wrong.wasm");
    fs::write(&wrong, b"this is no policy").unwrap();
    let line = wait(&wrong, "refused: ");
    assert!(line.contains("not WebAssembly"), "{line}");
    // The store finds half of a file, as if it were still being copied.
    let half = drop.path().join("half.wasm");
    let whole = fs::read(ours()).unwrap();
    fs::write(&half, &whole[..whole.len() / 2]).unwrap();
    assert!(wait(&half, "refused: ").contains("it was cut"));
    fs::write(&half, &whole).unwrap();
    wait(&half, "loaded ");
    let large = drop.path().join("large.wasm");
    fs::File::create(&large)
        .unwrap()
        .set_len(100 << 20)
        .unwrap();
    assert!(wait(&large, "refused: ").contains("104857600 bytes"));

    // The store ignores other file names, and loads a changed file again.
    let other = drop.path().join("other.txt");
    fs::write(&other, b"").unwrap();
    fs::copy(&file, &wrong).unwrap();
    wait(&wrong, "loaded ");
    assert_eq!(status(&other), None);
}

/// Reproducible builds give every file the same time, and often the same size.
#[test]
fn changed_file_of_the_same_size_and_time_is_loaded() {
    let drop = tempfile::tempdir().unwrap();
    let _server = Server::with("", &["--policy-drop", drop.path().to_str().unwrap()]);
    let file = drop.path().join("rule.wasm");
    for name in [b'a', b'b'] {
        // A custom section makes this a different build.
        let build = [fs::read(ours()).unwrap(), vec![0, 2, 1, name]].concat();
        fs::write(&file, &build).unwrap();
        let times = FileTimes::new().set_modified(SystemTime::UNIX_EPOCH);
        let open = File::options().write(true).open(&file).unwrap();
        open.set_times(times).unwrap();
        let digest = blake3::hash(&build).to_hex();
        eventually("this very build is loaded", || {
            status(&file).filter(|line| line.ends_with(&format!("blake3:{digest}\n")))
        });
    }
}

/// A user who may write to the directory can create any file next to a policy.
#[test]
fn pipes_and_symlinks_next_to_a_policy_are_replaced() {
    let drop = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::NamedTempFile::new().unwrap();
    let server = Server::with("", &["--policy-drop", drop.path().to_str().unwrap()]);
    // The same policy is loaded already, so the dropped file only needs a status.
    policy(&server, &["load", &ours()]).code(0);
    let file = drop.path().join("rule\nERROR forged.wasm");
    let with_ending = |ending: &str| {
        let mut name = file.as_os_str().to_owned();
        name.push(ending);
        PathBuf::from(name)
    };
    let made = Command::new("mkfifo").arg(with_ending(".status")).status();
    assert!(made.unwrap().success());
    symlink(elsewhere.path(), with_ending(".status.new")).unwrap();
    fs::copy(ours(), &file).unwrap();
    until("the status file replaces the pipe", || {
        let data = fs::symlink_metadata(with_ending(".status")).unwrap();
        data.is_file()
    });
    assert!(status(&file).unwrap().starts_with("loaded "));
    assert_eq!(fs::read(elsewhere.path()).unwrap(), b"");
    let line = server.wait_for_log("forged.wasm");
    assert!(line.contains("rule\\nERROR forged.wasm"), "{line}");
}

#[test]
fn dropped_file_is_promoted_once() {
    let drop = tempfile::tempdir().unwrap();
    let toml = format!(
        "policy_drop = \"{}\"\npolicy_drop_action = \"promote\"\n",
        drop.path().display()
    );
    let mut server = Server::with(&toml, &[]);
    let file = drop.path().join("rule.wasm");
    fs::copy(ours(), &file).unwrap();
    wait(&file, "active ");
    assert!(answers(&server, "tally"));
    policy(&server, &["rollback"]).code(0);
    // Neither another scan of the directory nor a restart promotes the file again. A new file,
    // which gets a status, shows that a scan has ended.
    let after_a_scan = |server: &Server, name: &str| {
        let marker = drop.path().join(name);
        fs::write(&marker, name).unwrap();
        wait(&marker, "refused: ");
        assert!(!answers(server, "tally"));
    };
    after_a_scan(&server, "one.wasm");
    server.stop();
    server.restart();
    after_a_scan(&server, "two.wasm");
}

#[test]
fn dropped_file_must_be_signed_by_a_trusted_key() {
    let drop = tempfile::tempdir().unwrap();
    let keys = tempfile::tempdir().unwrap();
    let key = keygen(keys.path(), "trusted");
    let arguments = [
        "--trusted-keys",
        &key,
        "--policy-drop",
        drop.path().to_str().unwrap(),
    ];
    let server = Server::with("", &arguments);
    let file = drop.path().join("rule.wasm");
    fs::copy(ours(), &file).unwrap();
    assert!(wait(&file, "refused: ").contains("not signed"));
    assert_eq!(roles(&server, OURS), None);
    let signed = sign(keys.path(), "trusted.key", &ours(), "signed.wasm");
    fs::copy(signed, &file).unwrap();
    wait(&file, "loaded ");
    let missing = [
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--policy-drop",
        "nowhere",
    ];
    run_in(keys.path(), &missing).fails(2, "nowhere");
}
