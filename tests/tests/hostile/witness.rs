//! Who looks on while others misbehave.

use std::{
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{Client, Server, Store, client::PATIENCE};

/// A server, and a client with data in it that has to stay.
pub(crate) struct Witness {
    pub(crate) server: Server,
    pub(crate) store: Store,
    descriptors: usize,
    newcomers: u32,
}

impl Witness {
    pub(crate) fn new() -> Witness {
        Witness::with_config("")
    }

    pub(crate) fn with_config(toml: &str) -> Witness {
        let server = Server::with_config(toml);
        let mut store = server.store("witness");
        store.set("data", "still there");
        let descriptors = server.descriptors();
        Witness {
            server,
            store,
            descriptors,
            newcomers: 0,
        }
    }

    /// A connected attacker.
    pub(crate) fn attacker(&self) -> Client {
        self.server.connect("attacker")
    }

    /// The data is there, over the old connection and over a new one, and the attacker's connections are gone.
    pub(crate) fn unharmed(&mut self) {
        self.still_served();
        let end = Instant::now() + PATIENCE;
        while self.server.descriptors() > self.descriptors {
            assert!(
                Instant::now() < end,
                "leaked descriptors: {} after {}",
                self.server.descriptors(),
                self.descriptors
            );
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The data is there, over the old connection and over a new one.
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
