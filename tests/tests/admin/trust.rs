//! Tests signatures of policies. A store with trusted keys must refuse a policy that none of them
//! signed, whether a command or the start of the store loads it. It must give no new role to one
//! that an earlier start with other keys has loaded.

use std::fs;

use statehouse_tests::{Server, assert_contains, run_in};

use crate::{OURS, answers, keygen, ours, policy, roles, sign, try_sign};

/// Files of our policy: unsigned, signed by the trusted key, signed by another key, and changed
/// after it was signed.
struct Files {
    directory: tempfile::TempDir,
    /// The trusted public key in hexadecimal.
    key: String,
    unsigned: String,
    signed: String,
    foreign: String,
    tampered: String,
}

fn files() -> Files {
    let directory = tempfile::tempdir().unwrap();
    let here = directory.path();
    let key = keygen(here, "trusted");
    keygen(here, "other");
    let unsigned = ours();
    let signed = sign(here, "trusted.key", &unsigned, "signed.wasm");
    let foreign = sign(here, "other.key", &unsigned, "foreign.wasm");
    let mut bytes = fs::read(&signed).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    let tampered = here.join("tampered.wasm");
    fs::write(&tampered, bytes).unwrap();
    Files {
        key,
        unsigned,
        signed,
        foreign,
        tampered: tampered.into_os_string().into_string().unwrap(),
        directory,
    }
}

#[test]
fn policy_must_be_signed_by_a_trusted_key() {
    let files = files();
    let server = Server::with(&format!("trusted_keys = [\"{}\"]", files.key), &[]);
    policy(&server, &["load", &files.unsigned])
        .fails(4, "not signed")
        .says("policy sign");
    policy(&server, &["load", &files.foreign]).fails(4, "none of the keys");
    policy(&server, &["load", &files.tampered]).fails(4, "changed or cut");
    assert_eq!(roles(&server, OURS), None);
    policy(&server, &["load", "--promote", &files.signed]).code(0);
    assert!(answers(&server, "tally"));
    let check = policy(&server, &["check", &files.signed, "--json"]).code(0);
    let check = check.object();
    let signer = check["signed_by"][0].as_str().unwrap();
    let signed = format!("the admin API; its file is signed by key {signer}");
    let list = policy(&server, &["list"]).code(0).text();
    for (what, by) in [("loaded", &*signed), ("assigned", "the admin API")] {
        let start = format!("{what} {OURS}@");
        let line = list.lines().find(|it| it.starts_with(&start)).unwrap();
        let (_, at) = line.split_once(", 20").unwrap();
        let (time, author) = at.split_once(": ").unwrap();
        assert!(time.ends_with('Z') && author == by, "{line}");
    }
    // The digest is that of the file with its signature.
    let digests = |path: &str| {
        let loaded = policy(&server, &["load", path, "--json"]).code(0);
        loaded.object()["digest"].clone()
    };
    let signed = digests(&files.signed);
    let here = files.directory.path();
    let own = try_sign(here, "trusted.key", &files.signed, "again.wasm");
    assert!(own.code(0).text().contains(signed.as_str().unwrap()));
}

#[test]
fn unsigned_policy_is_loaded_with_allow_unsigned() {
    let files = files();
    let key = files.directory.path().join("trusted.pub");
    let key = key.to_str().unwrap();
    let server = Server::with("", &["--trusted-keys", key, "--allow-unsigned"]);
    policy(&server, &["load", &files.tampered]).fails(4, "changed or cut");
    policy(&server, &["load", &files.unsigned]).code(0);
    policy(&server, &["load", &files.foreign]).code(0);
    // Without trusted keys the store checks no signature.
    let server = Server::start();
    policy(&server, &["load", &files.foreign]).code(0);
}

#[test]
fn policy_of_a_start_is_checked_too() {
    let files = files();
    let serve = |policy: &str, more: &[&str]| {
        let serve = ["serve", "--listen", "127.0.0.1:0", "--policy", policy];
        let all = [&serve[..], &["--trusted-keys", "trusted.pub"], more].concat();
        run_in(files.directory.path(), &all)
    };
    serve(&files.unsigned, &[])
        .fails(2, "not signed")
        .says(".wasm");
    serve(&files.foreign, &[]).fails(2, "none of the keys");
    serve(&files.tampered, &["--allow-unsigned"]).fails(2, "changed or cut");
    let key = files.directory.path().join("trusted.pub");
    let trusted = ["--trusted-keys", key.to_str().unwrap()];
    let server = Server::with("", &[&trusted[..], &["--policy", &files.signed]].concat());
    assert!(answers(&server, "tally"));
}

/// Regression: the store said nothing, and gave such a policy any role.
#[test]
fn policy_of_a_removed_key_keeps_its_roles_and_gets_no_new_one() {
    let files = files();
    let here = files.directory.path();
    let key = |name: &str| here.join(name).into_os_string().into_string().unwrap();
    let mut server = Server::restartable(&[("trusted_keys", &*key("trusted.pub"))]);
    policy(&server, &["load", "--promote", &files.signed]).code(0);
    server.stop();
    server.restart_with(&[("trusted_keys", &*key("other.pub"))]);
    assert!(answers(&server, "tally"), "the store goes on");
    let warned = server.wait_for_log("keeps its roles");
    assert_contains!(
        warned,
        OURS,
        "none of the keys",
        "policy sign",
        "a policy of its own"
    );
    policy(&server, &["promote", "builtin"]).code(0);
    for change in [
        &["promote", OURS][..],
        &["route", "k/", OURS],
        &["canary", OURS, "--percent", "5"],
        &["shadow", OURS],
    ] {
        policy(&server, change)
            .fails(4, OURS)
            .says("gets no new role")
            .says("a policy of its own")
            .says("none of the keys");
    }
    assert_eq!(roles(&server, OURS), Some(vec!["previous".to_owned()]));
    // A rollback protects the store. One that the new key signed is another policy, and the
    // built-in one needs no signature.
    policy(&server, &["rollback"]).code(0).prints(&[OURS]);
    policy(&server, &["promote", "builtin"]).code(0);
    policy(&server, &["load", "--promote", &files.foreign]).code(0);
    policy(&server, &["rollback"]).code(0).prints(&["standard"]);
    // With the first key the policy is as any other.
    server.stop();
    server.restart_with(&[("trusted_keys", &*key("trusted.pub"))]);
    policy(&server, &["rollback"]).code(0).prints(&[OURS]);
}

#[test]
fn unusable_key_is_refused_and_no_key_is_overwritten() {
    let directory = tempfile::tempdir().unwrap();
    let here = directory.path();
    keygen(here, "mine");
    // The command never overwrites the only copy of a key.
    run_in(here, &["policy", "keygen", "mine"]).fails(2, "mine.pub");
    fs::remove_file(here.join("mine.pub")).unwrap();
    run_in(here, &["policy", "keygen", "mine"]).fails(2, "mine.key");
    for key in ["missing.pub", "mine.key", "abcdef"] {
        let serve = ["serve", "--listen", "127.0.0.1:0", "--trusted-keys", key];
        run_in(here, &serve).fails(2, "trusted_keys").says(key);
    }
    let file = ours();
    for key in ["missing.key", &file] {
        try_sign(here, key, &file, "out.wasm").code(2);
    }
    fs::write(here.join("rubbish.wasm"), b"rubbish").unwrap();
    try_sign(here, "mine.key", "rubbish.wasm", "out.wasm").fails(2, "not WebAssembly");
    assert!(!here.join("out.wasm").exists());
}
