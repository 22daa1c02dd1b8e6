//! An honest client that observes the server during an attack, and checks that the server is
//! unharmed.

use statehouse_tests::{Client, Server, Store, wait::until};

/// The most resident memory that an attack may cost permanently: buffers of connections, and
/// allocator overhead. It is far below the sizes that these tests send or claim, and many have a
/// lower limit.
const GROWTH_KIB_MAX: u64 = 64 * 1024;

/// A server, and a client with data in it that must remain.
pub(crate) struct Witness {
    pub(crate) server: Server,
    pub(crate) store: Store,
    descriptors: usize,
    memory_kib: u64,
    newcomers: u32,
}

impl Witness {
    pub(crate) fn new() -> Witness {
        Witness::with_config("")
    }

    pub(crate) fn with_config(toml: &str) -> Witness {
        Witness::of(Server::with_config(toml))
    }

    pub(crate) fn of(server: Server) -> Witness {
        let mut store = server.store("witness");
        store.set("data", "still there");
        Witness {
            descriptors: server.descriptors(),
            memory_kib: server.memory_kib(),
            server,
            store,
            newcomers: 0,
        }
    }

    /// A connected attacker.
    pub(crate) fn attacker(&self) -> Client {
        self.server.connect("attacker")
    }

    /// Checks that resident memory has grown by less than `max_kib` since `before_kib`.
    pub(crate) fn assert_grown_less_than(&self, before_kib: u64, max_kib: u64) {
        let grown_kib = self.server.memory_kib().saturating_sub(before_kib);
        assert!(grown_kib < max_kib, "memory grew by {grown_kib} KiB");
    }

    /// Checks that old and new connections read the data, nothing has panicked, memory is limited,
    /// and the attacker's connections are closed.
    pub(crate) fn unharmed(&mut self) {
        self.still_served();
        let log = self.server.stderr();
        let panic = log.iter().find(|line| line.contains("panicked"));
        assert_eq!(panic, None);
        self.assert_grown_less_than(self.memory_kib, GROWTH_KIB_MAX);
        let descriptors = self.descriptors;
        until(
            &format!("the server has {descriptors} descriptors again"),
            || self.server.descriptors() <= descriptors,
        );
    }

    /// Checks that the old connection and a new one read the data.
    pub(crate) fn still_served(&mut self) {
        assert!(self.server.runs(), "the server ended");
        let expected = Some(b"still there".to_vec());
        assert_eq!(self.store.get("data"), expected);
        self.newcomers += 1;
        let mut newcomer = self.server.store(&format!("newcomer{}", self.newcomers));
        assert_eq!(newcomer.get("data"), expected);
        newcomer.client.disconnect();
    }
}
