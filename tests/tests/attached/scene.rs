//! The setup of most tests: a broker, a relay, and a store that is attached to the broker through
//! the relay. Clients connect to the broker directly.

use std::collections::HashSet;

use statehouse_tests::{Fate, Mosquitto, Proxy, Server, Way, packet::kind, wait::until};

use crate::recording_client::RecordingClient;

/// Holds the PUBACKs of the broker. All other packets pass.
pub(crate) fn hold_pubacks(proxy: &Proxy) {
    proxy.script(|seen| match (seen.way, seen.packet.kind()) {
        (Way::FromBroker, kind::PUBACK) => Fate::Hold,
        _ => Fate::Pass,
    });
}

/// The number of times that the store has subscribed to requests.
pub(crate) fn attachments(proxy: &Proxy) -> usize {
    let seen = proxy.seen();
    let subacks = seen.iter().filter(|it| it.packet.kind() == kind::SUBACK);
    subacks.count()
}

/// The processes of a test. The order of the fields stops the store first and the broker last.
pub(crate) struct Scene {
    pub(crate) host: Server,
    pub(crate) proxy: Proxy,
    pub(crate) broker: Mosquitto,
}

impl Scene {
    /// Starts a broker and a store with default settings.
    pub(crate) fn start() -> Scene {
        Scene::with(&[], &[])
    }

    /// Starts a broker with these lines of configuration, and a store with these settings. Presence
    /// detection is off, so the store has one connection and is ready at once.
    pub(crate) fn with(lines: &[&str], settings: &[(&str, &str)]) -> Scene {
        let broker = Mosquitto::with(lines);
        let proxy = Proxy::start(broker.address());
        let settings = [&[("presence", "off")], settings].concat();
        let host = Server::attached(&proxy.url(), broker.address(), &settings);
        Scene {
            host,
            proxy,
            broker,
        }
    }

    /// Connects a client with a new session.
    pub(crate) fn client(&self, id: &str) -> RecordingClient {
        RecordingClient::begin(self.broker.address(), id)
    }

    /// Waits until each PUBLISH of the last connection between store and broker that needs an
    /// acknowledgement has it.
    pub(crate) fn wait_until_acknowledged(&self) {
        until("everything is acknowledged", || {
            let seen = self.proxy.seen();
            let last = self.proxy.connections() - 1;
            let mut open = HashSet::new();
            for it in seen.iter().filter(|it| it.connection == last) {
                match it.packet.kind() {
                    kind::PUBLISH => {
                        let publish = it.packet.publish();
                        if publish.qos > 0 {
                            open.insert((it.way, publish.packet_id));
                        }
                    }
                    kind::PUBACK => {
                        open.remove(&(it.way.back(), it.packet.ack().packet_id));
                    }
                    _ => {}
                }
            }
            open.is_empty()
        });
    }

    /// Kills the store with `kill -9`, if the test has not done so, and restarts it.
    pub(crate) fn kill_host(&mut self) {
        self.host.kill();
        self.host.restart();
    }
}
