//! The drop directory.

use std::{
    fs::{self, File, FileTimes},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    time::SystemTime,
};

use statehouse_tests::{Server, run_in};

use crate::{OURS, answers, eventually, keygen, ours, policy, roles, sign};

fn status(path: &Path) -> Option<String> {
    let mut name = path.as_os_str().to_owned();
    name.push(".status");
    fs::read_to_string(PathBuf::from(name)).ok()
}

/// The status once it begins so.
fn wait(path: &Path, beginning: &str) -> String {
    eventually(&format!("{} {beginning}", path.display()), || {
        status(path).filter(|line| line.starts_with(beginning))
    })
}

#[test]
fn what_appears_is_loaded_and_its_status_is_beside_it() {
    let drop = tempfile::tempdir().unwrap();
    let file = drop.path().join("rule.wasm");
    // It may be there before the store is.
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
    // One that is still being copied, it seems.
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

    // Other names are nothing to it, and a changed file is looked at again.
    let other = drop.path().join("other.txt");
    fs::write(&other, b"").unwrap();
    fs::copy(&file, &wrong).unwrap();
    wait(&wrong, "loaded ");
    assert_eq!(status(&other), None);
}

/// Builds that can be repeated give every file the same time, and often the same size.
#[test]
fn a_file_of_the_same_size_and_time_is_looked_at_again() {
    let drop = tempfile::tempdir().unwrap();
    let _server = Server::with("", &["--policy-drop", drop.path().to_str().unwrap()]);
    let file = drop.path().join("rule.wasm");
    for name in [b'a', b'b'] {
        // A custom section makes another build of it.
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

/// Whoever may write there can put anything beside a policy.
#[test]
fn what_lies_beside_a_policy_is_neither_followed_nor_waited_for() {
    let drop = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::NamedTempFile::new().unwrap();
    let server = Server::with("", &["--policy-drop", drop.path().to_str().unwrap()]);
    // One that is loaded already is asked for its status.
    policy(&server, &["load", &ours()]).code(0);
    let file = drop.path().join("rule\nERROR forged.wasm");
    let beside = |ending: &str| {
        let mut name = file.as_os_str().to_owned();
        name.push(ending);
        PathBuf::from(name)
    };
    let made = Command::new("mkfifo").arg(beside(".status")).status();
    assert!(made.unwrap().success());
    symlink(elsewhere.path(), beside(".status.new")).unwrap();
    fs::copy(ours(), &file).unwrap();
    eventually("the pipe gives way to the status", || {
        let data = fs::symlink_metadata(beside(".status")).unwrap();
        data.is_file().then_some(())
    });
    assert!(status(&file).unwrap().starts_with("loaded "));
    assert_eq!(fs::read(elsewhere.path()).unwrap(), b"");
    let line = server.wait_for_log("forged.wasm");
    assert!(line.contains("rule\\nERROR forged.wasm"), "{line}");
}

#[test]
fn with_promote_it_answers_once() {
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
    // Two more looks, seen by a file that is dropped now, change nothing, nor does a restart.
    let settled = |server: &Server, name: &str| {
        let marker = drop.path().join(name);
        fs::write(&marker, name).unwrap();
        wait(&marker, "refused: ");
        assert!(!answers(server, "tally"));
    };
    settled(&server, "one.wasm");
    server.signal("TERM");
    server.wait(std::time::Duration::from_secs(20));
    server.restart();
    settled(&server, "two.wasm");
}

#[test]
fn signatures_count_there_too() {
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
    run_in(keys.path(), &missing, b"").code(2).says("nowhere");
}
