//! A broker, a relay in front of it, and a store that is attached through the relay. Clients go to the broker itself.

use std::{
    collections::HashSet,
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{Admin, Mosquitto, Proxy, Server, client::PATIENCE, packet::kind};

use crate::asker::Asker;

/// What a test needs of the world. The store goes first at the end, the broker last.
pub(crate) struct Scene {
    pub(crate) host: Server,
    pub(crate) proxy: Proxy,
    pub(crate) broker: Mosquitto,
}

impl Scene {
    /// With a broker of defaults.
    pub(crate) fn start() -> Scene {
        Scene::with(&[], &[])
    }

    /// With lines of the broker's configuration, and settings of the store. It does not look for signs of presence,
    /// so there is one connection, and it is ready at once.
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

    /// A client with a session of its own.
    pub(crate) fn asker(&self, id: &str) -> Asker {
        Asker::begin(self.broker.address(), id)
    }

    /// The store's figure of this name.
    pub(crate) fn figure(&self, name: &str) -> u64 {
        figure(&self.host, name)
    }

    /// Waits until each PUBLISH of the last connection between store and broker is acknowledged.
    pub(crate) fn settle(&self) {
        eventually("everything is acknowledged", || {
            let seen = self.proxy.seen();
            let last = self.proxy.connections() - 1;
            let mut open = HashSet::new();
            for it in seen.iter().filter(|it| it.connection == last) {
                match it.packet.kind() {
                    kind::PUBLISH => {
                        open.insert((it.way, it.packet.publish().packet_id));
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

    /// Kills the store with `kill -9`, if that has not been done, and runs it again.
    pub(crate) fn kill_host(&mut self) {
        self.host.kill();
        self.host.restart();
    }
}

/// A figure of a store's administration.
pub(crate) fn figure(host: &Server, name: &str) -> u64 {
    figure_if_any(host, name).unwrap_or_else(|| panic!("there is no {name}"))
}

/// The same, where there may be none.
pub(crate) fn figure_if_any(host: &Server, name: &str) -> Option<u64> {
    let (status, page) = Admin::of(host).ask("GET", "/metrics", b"");
    assert_eq!(status, 200, "{page}");
    let line = page.lines().find_map(|line| {
        line.strip_prefix("statehouse_")?
            .strip_prefix(name)?
            .strip_prefix(' ')
    })?;
    Some(line.parse().unwrap())
}

/// Waits until something is so.
#[track_caller]
pub(crate) fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "it does not come to this: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}
