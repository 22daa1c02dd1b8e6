//! The places where a case runs: on the embedded broker, behind Mosquitto, or on the embedded
//! broker of a program for another processor.

use std::ops::{Deref, DerefMut};

use statehouse_tests::{Mosquitto, Processor, Server};
use tempfile::TempDir;

#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    /// The store is the broker.
    Embedded,
    /// The store is a client of a broker, like the other clients.
    Attached,
    /// The store is the broker, and is built for this target, which [`Processor::find`] has found.
    Emulated(&'static str),
}

/// A store, and the broker to which it is attached, if any.
pub(crate) struct Site {
    // The first field, so that the server is dropped before its broker.
    server: Server,
    _broker: Option<Mosquitto>,
    /// Files that the server reads.
    _files: Option<TempDir>,
}

impl Site {
    /// A server on the embedded broker, and the directory of its files.
    pub(crate) fn embedded(server: Server, files: Option<TempDir>) -> Site {
        Site {
            server,
            _broker: None,
            _files: files,
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
    /// Starts a store, which can be killed and restarted. Settings are pairs such as `("max_keys",
    /// "1")`.
    pub(crate) fn start(self, settings: &[(&str, &str)]) -> Site {
        match self {
            Place::Embedded => Site::embedded(Server::restartable(settings), None),
            Place::Attached => {
                // One client writes three thousand keys as fast as the broker accepts them. With
                // the default of 1000, the broker would drop queued messages.
                let broker = Mosquitto::with(&["max_queued_messages 10000"]);
                // Detecting how the broker reports disconnected clients would take two seconds.
                let settings = [&[("presence", "off")], settings].concat();
                let server = Server::attached(&broker.url(), broker.address(), &settings);
                Site::behind(server, broker)
            }
            Place::Emulated(target) => {
                let processor = Processor::find(target).unwrap();
                Site::embedded(Server::emulated(&processor, settings), None)
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
