//! Helpers for commands that read the data directory of a running or stopped server. Tests that
//! such commands name the right cause if they cannot use it.

use std::{
    fs::{self, Permissions},
    os::unix::{
        fs::{FileExt, MetadataExt, PermissionsExt},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::Command,
};

use statehouse_tests::{Ran, Server, command, command::finish, files::of_kind, run_in};

/// Runs a command in a directory, and asserts that it does not panic.
pub(crate) fn run_checked(directory: &Path, arguments: &[&str]) -> Ran {
    let ran = run_in(directory, arguments);
    assert!(!ran.stderr.contains("panicked"), "{ran:#?}");
    ran
}

/// Takes a backup of a store, and restores it into this directory next to the data directory.
pub(crate) fn restore_into(server: &Server, restored: &str) {
    server.run(&["snapshot", "backup"]).code(0);
    server
        .run(&["restore", "backup", "--data", restored])
        .code(0);
}

/// The newest segment of the log.
pub(crate) fn log(server: &Server) -> PathBuf {
    of_kind(&server.data_directory(), "log").pop().unwrap()
}

/// The offset of the first occurrence of these bytes in a file.
pub(crate) fn find(path: &Path, needle: &[u8]) -> u64 {
    let content = fs::read(path).unwrap();
    let at = content.windows(needle.len()).position(|it| it == needle);
    at.unwrap_or_else(|| panic!("not in {}", path.display())) as u64
}

/// Flips one bit of the byte at this offset.
pub(crate) fn flip(path: &Path, at: u64) {
    let file = fs::File::options()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at).unwrap();
}

/// The account that owns the files of [`as_other`]: `nobody` of Debian.
pub(crate) const OTHER: u32 = 65_534;

/// A command of another account, which is not root. Prints the reason and returns none if this
/// account may not run it.
pub(crate) fn as_other(mut command: Command) -> Option<Command> {
    if fs::metadata("/proc/self").unwrap().uid() != 0 {
        eprintln!("skipped: only root can run commands of other accounts");
        return None;
    }
    command.uid(OTHER).gid(OTHER);
    Some(command)
}

pub(crate) fn allow(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// Lets every account read a directory and everything in it.
fn allow_all(directory: &Path) {
    allow(directory, 0o755);
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => allow_all(&path),
            false => allow(&path, 0o644),
        }
    }
}

/// Runs a command of another account in the directory of a server.
fn run_as_other(server: &Server, arguments: &[&str]) -> Option<Ran> {
    let mut command = command(arguments);
    command.current_dir(server.directory());
    command.env("XDG_CONFIG_HOME", server.directory());
    Some(finish(as_other(command)?, b""))
}

/// Regression: the commands acted on the store in the original directory.
#[test]
fn commands_in_a_copy_do_not_reach_the_store() {
    let server = Server::start();
    let copy = server.directory().join("copy");
    fs::create_dir(&copy).unwrap();
    fs::copy(server.data_directory().join("admin"), copy.join("admin")).unwrap();
    for command in [
        &["policy", "rollback"][..],
        &["clients", "kick", "x"],
        &["usage"],
        &["ready"],
    ] {
        let arguments = [command, &["--data", "copy"]].concat();
        let ran = server.run(&arguments).code(3);
        ran.says("no store runs in copy")
            .says("copied or left over");
    }
    server.run(&["ready"]).code(0);
}

/// Regression: `doctor` reported damage and advised to restore a backup. Other commands blamed the
/// mark of a cluster.
#[test]
fn missing_rights_are_named_and_are_no_damage() {
    let mut server = Server::restartable(&[]);
    server.store("client").set("k", "v");
    server.stop();
    let data = server.data_directory();
    allow(server.directory(), 0o755);
    let refused = |arguments: &[&str], file: &str| {
        let Some(ran) = run_as_other(&server, arguments) else {
            return;
        };
        let ran = ran.fails(3, "is not readable by this account").says(file);
        let ran = ran.says("Run this command as the account of the store");
        assert!(ran.stdout.is_empty(), "{ran:?}");
    };
    let commands = [
        &["doctor"][..],
        &["doctor", "--salvage", "salvaged"],
        &["history", "k"],
        &["get", "k", "--as-of", "0s"],
        &["snapshot", "backup"],
    ];
    for mode in [0o700, 0o755] {
        allow(&data, mode);
        for arguments in commands {
            refused(arguments, "statehouse-data");
        }
    }
    allow_all(&data);
    allow(&data.join("policies"), 0o700);
    refused(&["doctor"], "statehouse-data/policies/");
    refused(&["snapshot", "backup"], "statehouse-data/policies/");
    allow(&data.join("policies"), 0o755);
    allow(&data.join("mqtt-client-id"), 0o600);
    refused(&["doctor"], "statehouse-data/mqtt-client-id");
    allow(&data.join("mqtt-client-id"), 0o644);
    // The file system owns this directory.
    fs::create_dir(data.join("lost+found")).unwrap();
    allow(&data.join("lost+found"), 0o700);
    if let Some(ran) = run_as_other(&server, &["doctor"]) {
        ran.code(0).prints(&["all is well"]);
    }
}
