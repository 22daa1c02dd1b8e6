//! Where a case runs: on the embedded broker, or behind a Mosquitto.

use std::ops::{Deref, DerefMut};

use statehouse_tests::{Mosquitto, Server};
use tempfile::TempDir;

/// Where a case runs.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    /// The store is the broker.
    Embedded,
    /// The store is a client of a broker, beside the others.
    Attached,
}

/// A store, and the broker that it is attached to.
pub(crate) struct Site {
    // First, so that it is gone before its broker.
    server: Server,
    _broker: Option<Mosquitto>,
    /// Files that the server reads.
    _files: Option<TempDir>,
}

impl Site {
    /// A server with files of its own.
    pub(crate) fn with_files(server: Server, files: TempDir) -> Site {
        Site {
            server,
            _broker: None,
            _files: Some(files),
        }
    }

    /// A server that is attached to a broker.
    pub(crate) fn behind(server: Server, broker: Mosquitto) -> Site {
        Site {
            server,
            _broker: Some(broker),
            _files: None,
        }
    }
}

impl Place {
    /// A store of a test's own, which can be killed and started again. Settings are pairs such as `("max_keys", "1")`.
    pub(crate) fn start(self, settings: &[(&str, &str)]) -> Site {
        match self {
            Place::Embedded => Site {
                server: Server::restartable(settings),
                _broker: None,
                _files: None,
            },
            Place::Attached => {
                // One client writes three thousand keys as fast as the broker takes them; it drops by itself what
                // is beyond the default of 1000.
                let broker = Mosquitto::with(&["max_queued_messages 10000"]);
                // Finding out how to learn who has gone takes two seconds.
                let settings = [&[("presence", "off")], settings].concat();
                let server = Server::attached(&broker.url(), broker.address(), &settings);
                Site::behind(server, broker)
            }
        }
    }
}

impl Deref for Site {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.server
    }
}

impl DerefMut for Site {
    fn deref_mut(&mut self) -> &mut Server {
        &mut self.server
    }
}
