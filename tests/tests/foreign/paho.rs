//! Tests paho for Python, with the client in `paho_client.py`.

use std::{path::Path, process::Command};

use statehouse_tests::{Server, command::finish};

/// The Python interpreter that has paho. `bash tests/run` installs it.
fn python() -> std::ffi::OsString {
    if let Some(python) = std::env::var_os("STATEHOUSE_TEST_PYTHON") {
        return python;
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/venv/bin/python");
    assert!(
        path.exists(),
        "{} is missing. `bash tests/run` installs it, with paho-mqtt. STATEHOUSE_TEST_PYTHON names another interpreter.",
        path.display()
    );
    path.into()
}

#[test]
fn paho_client_gets_answers_and_notifications() {
    let server = Server::start();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/foreign/paho_client.py");
    let mut command = Command::new(python());
    command.arg(script).arg(server.port().to_string());
    let ran = finish(command, b"").code(0);
    assert_eq!(ran.text(), "every step done\n");
    // Another client can read the value that paho set.
    let mut other = server.store("other");
    assert_eq!(other.get("paho"), Some(b"\x00\r\n\xFF".to_vec()));
}
