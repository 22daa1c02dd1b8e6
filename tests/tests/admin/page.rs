//! Tests the page of the admin API: its files, its login, and what other web pages cannot do.

use serde_json::Value as Json;
use statehouse_tests::{Admin, Server};

/// Logs in with the token, and returns the operator of the session.
fn log_in(admin: &Admin) -> Admin {
    let begun = admin.done("POST", "/v1/session", b"");
    assert_eq!(begun["role"], "ship");
    assert_eq!(begun["user"], Json::Null);
    assert!(begun["expires_s"].as_u64().unwrap() > 0, "{begun}");
    admin.with_token(begun["session"].as_str().unwrap())
}

#[test]
fn files_need_no_login_and_say_what_a_browser_may_do() {
    let server = Server::start();
    let admin = Admin::of(&server);
    let stranger = admin.without_token();
    for path in ["/", "/page.css", "/page.js", "/icon.svg"] {
        let (head, body) = stranger.answer_with("GET", path, "", b"");
        let head = head.to_lowercase();
        assert!(head.starts_with("http/1.1 200"), "{path}: {head}");
        for line in [
            "content-security-policy: default-src 'none'; script-src 'self'; ",
            "frame-ancestors 'none'",
            "x-content-type-options: nosniff",
            "referrer-policy: no-referrer",
            "cross-origin-opener-policy: same-origin",
            "cross-origin-resource-policy: same-origin",
            "cache-control: no-cache",
            "etag: \"",
            "connection: close",
        ] {
            assert!(head.contains(line), "{path} without {line}: {head}");
        }
        assert!(!head.contains("set-cookie") && !body.is_empty());
        let (of_head, none) = stranger.answer_with("HEAD", path, "", b"");
        assert_eq!((of_head.contains(" 200 "), &*none), (true, ""));
        let version = head.split("etag: ").nth(1).unwrap();
        let version = version.lines().next().unwrap();
        let known = format!("If-None-Match: {version}\r\n");
        let (again, body) = stranger.answer_with("GET", path, &known, b"");
        assert!(again.contains(" 304 ") && body.is_empty(), "{again}");
    }
    assert_eq!(stranger.ask("POST", "/", b"x=1").0, 405);
    assert_eq!(stranger.ask("GET", "/page.js/..", b"").0, 401);
    assert_eq!(stranger.ask("GET", "/v1/session", b"").0, 401);
    let (head, _) = admin.answer_with("GET", "/v1/policies", "", b"");
    let head = head.to_lowercase();
    assert!(head.contains("cache-control: no-store"), "{head}");
    assert!(head.contains("x-content-type-options: nosniff"), "{head}");
}

#[test]
fn a_session_works_like_the_token_until_the_log_out() {
    let server = Server::start();
    let admin = Admin::of(&server);
    let session = log_in(&admin);
    let other = log_in(&admin);
    let about = session.done("GET", "/v1/session", b"");
    assert_eq!(
        (&about["role"], about["session"].is_null()),
        (&"ship".into(), true)
    );
    assert_eq!(session.ask("POST", "/v1/session", b"").0, 409);
    assert_eq!(session.ask("GET", "/v1/usage", b"").0, 200);
    session.done("DELETE", "/v1/session", b"");
    let (status, error) = session.ask("GET", "/v1/usage", b"");
    assert_eq!(status, 401);
    assert!(error.contains("log in again"), "{error}");
    assert_eq!(other.ask("GET", "/v1/usage", b"").0, 200);
    assert_eq!(admin.ask("DELETE", "/v1/session", b"").0, 409);
    let guessed = admin.with_token("session-");
    assert_eq!(guessed.ask("GET", "/v1/usage", b"").0, 401);
    // A secret in the URL is no login.
    let stranger = admin.without_token();
    assert_eq!(
        stranger.ask("GET", "/v1/usage?session=session-", b"").0,
        401
    );

    // A flood of logins evicts only the oldest, and takes little memory.
    let memory_kib = server.memory_kib();
    let mut last = log_in(&admin);
    for _ in 0..200 {
        last = log_in(&admin);
    }
    assert_eq!(last.ask("GET", "/v1/session", b"").0, 200);
    assert_eq!(other.ask("GET", "/v1/session", b"").0, 401);
    assert!(server.memory_kib() < memory_kib + 8 * 1024);
}

#[test]
fn web_pages_of_other_origins_are_refused() {
    let server = Server::start();
    let admin = Admin::of(&server);
    let session = log_in(&admin);
    let own = admin.url();
    for (lines, expected) in [
        (
            format!("Origin: {own}\r\nSec-Fetch-Site: same-origin\r\n"),
            200,
        ),
        ("Sec-Fetch-Site: none\r\n".to_owned(), 200),
        ("Origin: http://evil.example\r\n".to_owned(), 403),
        ("Origin: http://localhost:1\r\n".to_owned(), 403),
        ("Origin: http://127.0.0.1\r\n".to_owned(), 403),
        ("Origin: null\r\n".to_owned(), 403),
        ("Sec-Fetch-Site: cross-site\r\n".to_owned(), 403),
        ("Sec-Fetch-Site: same-site\r\n".to_owned(), 403),
        (
            "Sec-Fetch-Site: none\r\nSec-Fetch-Site: none\r\n".to_owned(),
            400,
        ),
    ] {
        for operator in [&admin, &session] {
            let (status, answer) = operator.ask_with("GET", "/v1/usage", &lines, b"");
            assert_eq!(status, expected, "{lines}: {answer}");
        }
        let login = admin.ask_with("POST", "/v1/session", &lines, b"").0;
        assert_eq!(login, expected, "{lines}");
    }
    // A link from another page opens the page, which has no login then.
    let link = "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: navigate\r\n";
    assert_eq!(admin.without_token().ask_with("GET", "/", link, b"").0, 200);
    // The name of another page may resolve to this machine.
    for path in ["/", "/v1/session"] {
        let answer = admin.ask_as("evil.example", path);
        assert_eq!(answer.0, 403, "{path}: {}", answer.1);
    }
    // The audit log names the refusals.
    let line = server.wait_for_log("requests of web pages of other origins are refused");
    assert!(line.contains("statehouse::audit"), "{line}");
}

#[test]
fn a_socket_serves_the_page_to_no_other_page() {
    let directory = tempfile::tempdir().unwrap();
    let place = format!("unix:{}", directory.path().join("admin").display());
    let server = Server::with("", &["--admin", &place]);
    let admin = Admin::of(&server);
    assert_eq!(admin.ask("GET", "/", b"").0, 200);
    assert_eq!(admin.done("GET", "/v1/session", b"")["role"], "ship");
    let session = log_in(&admin);
    assert!(session.done("GET", "/v1/session", b"")["expires_s"].is_u64());
    // `ssh -L` may put the socket at an address of a browser.
    assert_eq!(admin.ask_as("localhost:8080", "/v1/usage").0, 200);
    assert_eq!(admin.ask_as("evil.example", "/v1/usage").0, 403);
    let foreign = "Origin: http://evil.example\r\n";
    assert_eq!(admin.ask_with("POST", "/v1/rollback", foreign, b"").0, 403);
}
