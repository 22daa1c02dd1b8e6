//! paho for Python: `paho_client.py` beside this file does the work.

use std::{path::Path, process::Command};

use statehouse_tests::{Server, command::finish};

/// The interpreter that has paho: `bash tests/run` makes it.
fn python() -> std::ffi::OsString {
    if let Some(python) = std::env::var_os("STATEHOUSE_TEST_PYTHON") {
        return python;
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/venv/bin/python");
    assert!(
        path.exists(),
        "{} is missing. `bash tests/run` makes it, with paho-mqtt in it; STATEHOUSE_TEST_PYTHON names another.",
        path.display()
    );
    path.into()
}

#[test]
fn paho_for_python() {
    let server = Server::start();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/foreign/paho_client.py");
    let mut command = Command::new(python());
    command.arg(script).arg(server.port().to_string());
    let ran = finish(command, b"").code(0);
    assert_eq!(ran.text(), "every step done\n");
    // What it wrote is there for others.
    let mut other = server.store("other");
    assert_eq!(other.get("paho"), Some(b"\x00\r\n\xFF".to_vec()));
}
