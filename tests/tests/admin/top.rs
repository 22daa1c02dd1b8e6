//! Tests `statehouse top` on a running store, in a pseudo-terminal and without one.

use std::{
    io::{Read, Write},
    path::Path,
};

use statehouse_tests::{Server, command::in_terminal, run_in, server::wait, wait::until};

/// Runs `statehouse top` in a terminal. Types the keys of each step once its text is shown. Returns
/// what the terminal received, and the exit code.
fn run_top(directory: &Path, steps: &[(&str, &[u8])]) -> (String, i32) {
    let mut child = in_terminal("top --interval 250ms")
        .current_dir(directory)
        .spawn()
        .expect("script of util-linux runs");
    let mut output = child.stdout.take().unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut seen = Vec::new();
    let mut steps = steps.iter().peekable();
    let mut bytes = [0; 4096];
    loop {
        match output.read(&mut bytes) {
            Ok(0) | Err(_) => break,
            Ok(count) => seen.extend_from_slice(&bytes[..count]),
        }
        let text = String::from_utf8_lossy(&seen);
        if let Some((_, keys)) = steps.next_if(|(shows, _)| text.contains(shows)) {
            input.write_all(keys).unwrap();
        }
    }
    let status = wait(&mut child, statehouse_tests::client::PATIENCE);
    let status = status.expect("it ends").code().expect("an exit code");
    (String::from_utf8_lossy(&seen).into_owned(), status)
}

#[test]
fn top_shows_a_store_in_a_terminal_and_without_one() {
    let server = Server::start();
    let mut store = server.store("press-4");
    store.set("greeting", "hello");
    let directory = server.directory();
    let once = run_in(directory, &["top", "--once", "--json"]).code(0);
    let once = once.object();
    assert_eq!(once["store_size"]["keys"], 1, "{once}");
    assert_eq!(once["clients"]["connected"], 1, "{once}");

    let text = run_in(directory, &["top", "--once", "--list", "clients"]);
    let text = text.code(0).text();
    let has = |words: &str| text.lines().any(|line| line.starts_with(words));
    assert!(
        has("keys") || text.contains("keys             1 of"),
        "{text}"
    );
    assert!(
        has("request") && has("notification") && has("press-4"),
        "{text}"
    );
    assert!(!text.contains('\x1b'), "{text:?}");
    assert!(has("disk"), "{text}");

    // The first look begins the search for hot keys.
    until("the hot key", || {
        for _ in 0..100 {
            store.get("greeting");
        }
        let text = run_in(directory, &["top", "--once", "--list", "keys"]);
        text.code(0).text().contains("greeting")
    });
    let text = run_in(directory, &["top", "--once", "--list", "policies"]);
    let text = text.code(0).text();
    let is_active = |line: &str| line.starts_with("standard") && line.contains("active");
    assert!(text.lines().any(is_active), "{text}");

    // Spaces are not sent, so each step waits for a word.
    let steps: [(&str, &[u8]); 3] = [("quit", b"3"), ("press-4", b"s"), ("watches", b"q")];
    let (shown, code) = run_top(directory, &steps);
    assert_eq!(code, 0, "{shown}");
    assert!(shown.contains("requests/s"), "{shown}");
    // It leaves the alternate screen as it found it.
    let (enter, leave) = ("\x1b[?1049h", "\x1b[?1049l");
    assert!(shown.contains(enter) && shown.contains(leave), "{shown:?}");

    run_in(directory, &["top"]).fails(2, "needs a terminal");
    run_in(directory, &["top", "--interval", "1ms"]).fails(2, "at least 250ms");
    drop(server);
    let nowhere = tempfile::tempdir().unwrap();
    run_in(nowhere.path(), &["top", "--once"]).fails(3, "no store runs");
}
