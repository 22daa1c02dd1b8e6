//! Store clients whose sessions outlive their connections, and restarts of their server.

use statehouse_tests::{Client, Connect, Server, Store};

/// Longer than any test.
const SESSION_EXPIRY_S: u32 = 3600;

/// The CONNECT of such a client.
pub(crate) fn connect(id: &str) -> Connect {
    Connect::resume(id, SESSION_EXPIRY_S)
}

/// Connects with a new session.
pub(crate) fn begin(server: &Server, id: &str) -> Store {
    let client = Client::connect(server.address(), &connect(id));
    assert!(!client.session_present(), "{id} had a session");
    Store::new(client, id)
}

/// Resumes a session, which must exist. Its subscription still exists, too.
pub(crate) fn resume(server: &Server, id: &str) -> Store {
    let client = Client::connect(server.address(), &connect(id));
    assert!(client.session_present(), "the session of {id} is lost");
    Store::on(client, id)
}
