//! Tests what the admin API does with the path and the headers of a request: it must not ignore one
//! that changes the meaning of an act.

use statehouse_tests::{Admin, Server, admin::assert_refused};

/// Regression: the value was overwritten or removed in spite of the condition.
#[test]
fn act_with_a_condition_in_a_header_is_refused() {
    let server = Server::start();
    let admin = Admin::of(&server);
    admin.done("PUT", "/v1/key?key=k", b"first");
    for condition in [
        "If-None-Match: *",
        "If-Match: \"001696374425000:00001:StateStore\"",
        "If-Unmodified-Since: Thu, 01 Jan 1970 00:00:00 GMT",
    ] {
        let line = format!("{condition}\r\n");
        let ask = |method: &str| admin.ask_with(method, "/v1/key?key=k", &line, b"second");
        for method in ["PUT", "DELETE"] {
            println!("{method} {condition}");
            assert_refused(ask(method), 400, "`if_version`");
        }
        assert_eq!(ask("GET").0, 200, "{condition}");
    }
    assert_eq!(admin.done("GET", "/v1/key?key=k", b"")["value"], "first");
}

/// Regression: encoded bytes and parts of a value were stored as the value.
#[test]
fn body_that_is_encoded_or_a_part_is_refused() {
    let server = Server::start();
    let admin = Admin::of(&server);
    for (header, expected) in [
        ("Content-Encoding: gzip", 415),
        ("Content-Encoding: identity, gzip", 415),
        ("Content-Encoding: identity\r\nContent-Encoding: br", 415),
        ("Content-Range: bytes 5-6/7", 400),
    ] {
        let line = format!("{header}\r\n");
        let (status, answer) = admin.ask_with("PUT", "/v1/key?key=k", &line, b"ab");
        assert_eq!(status, expected, "{header}: {answer}");
    }
    assert_eq!(admin.ask("GET", "/v1/key?key=k", b"").0, 404);
    let line = "Content-Encoding: Identity\r\n";
    assert_eq!(admin.ask_with("PUT", "/v1/key?key=k", line, b"ab").0, 200);
}

/// Regression: some names were decoded and others were not.
#[test]
fn percent_encoded_names_in_a_path_do_not_match() {
    let server = Server::start();
    let admin = Admin::of(&server);
    for (method, path) in [
        ("GET", "/%6Civez"),
        ("GET", "/%6Detrics"),
        ("GET", "/v1/%6Beys"),
        ("GET", "/v1/%73ession"),
        ("GET", "/v1/%6Fverview"),
        ("POST", "/v1/policies/builtin/%70romote"),
    ] {
        let (status, answer) = admin.ask(method, path, b"");
        assert_eq!(status, 404, "{method} {path}: {answer}");
    }
    // The name of a policy is a value: this one cannot be unloaded.
    let (status, answer) = admin.ask("DELETE", "/v1/policies/%62uiltin", b"");
    assert_eq!(status, 409, "{answer}");
}

/// The Host header does not count then (RFC 9112 section 3.2.2).
#[test]
fn whole_url_as_the_target_names_the_host() {
    let server = Server::start();
    let admin = Admin::of(&server);
    let own = admin.url();
    let target = format!("{own}/v1/session");
    assert_eq!(admin.ask_as("evil.example", &target).0, 200);
    for path in ["/", "/v1/session"] {
        let target = format!("http://evil.example{path}");
        println!("{target}");
        assert_refused(admin.ask_as("localhost", &target), 403, "loopback");
    }
    for host in ["[localhost]", "[[127.0.0.1", "127.0.0.1:99999"] {
        assert_eq!(admin.ask_as(host, "/v1/session").0, 403, "{host}");
    }
}
