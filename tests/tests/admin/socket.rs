//! Tests the admin API on a Unix socket. The permissions of the socket file are the only access
//! check, and the socket file must exist only while the store runs.

use std::{
    fs,
    io::Write,
    os::unix::{
        fs::{FileTypeExt, PermissionsExt},
        net::UnixStream,
    },
    path::PathBuf,
};

use statehouse_tests::{Admin, Ran, Server, command, command::finish, run_in};

use crate::policy;

fn server() -> (Server, PathBuf) {
    // A relative path starts at the server's working directory.
    let server = Server::with("", &["--admin", "unix:admin.sock"]);
    let path = server.directory().join("admin.sock");
    (server, path)
}

/// Asserts that a command printed the list of policies.
fn assert_lists_policies(ran: Ran) {
    let text = ran.code(0).text();
    assert!(text.contains("standard"), "{text}");
}

#[test]
fn commands_over_the_socket_need_no_token() {
    let (server, path) = server();
    let data = fs::metadata(&path).unwrap();
    assert!(data.file_type().is_socket());
    assert_eq!(data.permissions().mode() & 0o777, 0o600);
    // The data directory leads to the socket from any working directory.
    let elsewhere = tempfile::tempdir().unwrap();
    let data = &server.data();
    let all = ["policy", "list", "--data", data];
    assert_lists_policies(run_in(elsewhere.path(), &all));
    // The option names the socket. A token in the environment changes nothing.
    let named = ["policy", "list", "--admin", "unix:admin.sock"];
    assert_lists_policies(server.run(&named));
    let mut list = command(&["policy", "list", "--admin"]);
    list.arg(format!("unix:{}", path.display()));
    list.env("STATEHOUSE_ADMIN_TOKEN", "that of some other store");
    finish(list, b"").code(0);
    let page = server.metrics_page();
    assert!(page.contains("\nstatehouse_keys 0\n"), "{page}");
    let url = Admin::of(&server).url();
    assert!(url.starts_with("unix:/"), "{url}");
    policy(&server, &["rollback"]).code(1);
}

#[test]
fn half_sent_requests_do_not_block_probes() {
    let (server, path) = server();
    let held: Vec<UnixStream> = (0..200)
        .map(|_| {
            let mut stream = UnixStream::connect(&path).unwrap();
            _ = stream.write_all(b"GET /livez HTTP/1.1\r\n");
            stream
        })
        .collect();
    for path in ["/livez", "/metrics"] {
        for _ in 0..50 {
            assert_eq!(Admin::of(&server).ask("GET", path, b"").0, 200);
        }
    }
    drop(held);
}

#[test]
fn socket_is_removed_at_stop_and_replaced_after_a_kill() {
    let mut server = Server::restartable(&[("admin", "unix:admin.sock")]);
    let path = server.directory().join("admin.sock");
    policy(&server, &["list"]).code(0);
    server.kill();
    assert!(path.exists());
    policy(&server, &["list"]).fails(3, "killed");
    server.restart();
    policy(&server, &["list"]).code(0);
    server.stop();
    assert!(!path.exists());
}

#[test]
fn socket_path_in_use_is_refused_and_left_unchanged() {
    let (server, path) = server();
    let place = format!("unix:{}", path.display());
    let directory = tempfile::tempdir().unwrap();
    let serve = |place: &str| {
        let all = ["serve", "--listen", "127.0.0.1:0", "--admin", place];
        run_in(directory.path(), &all)
    };
    serve(&place).fails(3, "another process listens there");
    policy(&server, &["list"]).code(0);
    fs::write(directory.path().join("notes"), "mine").unwrap();
    serve("unix:notes").fails(3, "no socket").says("--admin");
    assert_eq!(fs::read(directory.path().join("notes")).unwrap(), b"mine");
    let long = format!("unix:/{}", "x".repeat(200));
    serve(&long).fails(2, "at most 107 bytes");
}

#[test]
fn store_in_memory_serves_the_socket() {
    let server = Server::with(
        "",
        &["--durability", "memory", "--admin", "unix:admin.sock"],
    );
    let list = ["policy", "list", "--admin", "unix:admin.sock"];
    assert_lists_policies(server.run(&list));
    // Exit code 1 would mean that the key does not exist, or that a response differs.
    for question in [
        &["get", "k", "--as-of", "0s"][..],
        &["history", "k"],
        &["replay"],
    ] {
        let question = [question, &["--admin", "unix:admin.sock"]].concat();
        server.run(&question).fails(4, "has no history");
    }
}
