//! Clients of the store whose sessions outlive their connections.

use statehouse_tests::{Client, Connect, Server, Store};

/// Longer than any test.
const SESSION_EXPIRY_S: u32 = 3600;

/// The CONNECT of such a client.
pub(crate) fn connect(id: &str) -> Connect {
    Connect::resume(id, SESSION_EXPIRY_S)
}

/// A session that was not there before.
pub(crate) fn begin(server: &Server, id: &str) -> Store {
    let client = Client::connect(server.address(), &connect(id));
    assert!(!client.session_present(), "{id} had a session");
    Store::new(client, id)
}

/// A session that has to be there. Its subscription is too.
pub(crate) fn resume(server: &Server, id: &str) -> Store {
    let client = Client::connect(server.address(), &connect(id));
    assert!(client.session_present(), "the session of {id} is gone");
    Store::on(client, id)
}
