//! Presence: detects disconnected clients. MQTT does not report one client to another, but
//! Mosquitto publishes its connection log.
//!
//! Reads messages of the broker about its clients, and returns the clients whose connections ended,
//! in the order of the messages. If the broker publishes no log, nothing is known, so the start
//! shows whether it does. Watches also end without a log: with the first notification that finds no
//! subscriber, and by [`ttl`].

pub mod mosquitto;
pub mod ttl;

use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;

use self::mosquitto::Mosquitto;
use statehouse_config::{PresenceKind, limits};

/// Reads the broker's log.
pub struct Presence {
    /// None if the setting turns presence off.
    source: Option<Mosquitto>,
    /// Whether the store is connected over WebSocket.
    is_websocket: bool,
    /// The filters that the broker has refused last.
    refused: Vec<&'static str>,
    /// Whether the broker was seen to publish its log.
    works: watch::Sender<bool>,
}

impl Presence {
    /// Reads the log if the setting says so. `is_websocket`: the store is connected over WebSocket.
    pub fn new(kind: PresenceKind, is_websocket: bool) -> Self {
        Self {
            is_websocket,
            source: (kind == PresenceKind::Auto).then(Mosquitto::default),
            refused: Vec::new(),
            works: watch::Sender::new(false),
        }
    }

    /// The topics to subscribe to, at QoS 1, so that the log arrives in one order with requests.
    pub fn filters(&self) -> &'static [&'static str] {
        match self.source {
            Some(_) => mosquitto::FILTERS,
            None => &[],
        }
    }

    /// Whether a retained message is wanted on this topic: only the version of the broker is.
    /// Retained events are too old.
    pub fn wants_retained(&self, filter: &str) -> bool {
        filter == mosquitto::VERSION && self.source.is_some()
    }

    /// Handles the result of a subscription to one of [`Self::filters`].
    pub fn subscribed(&mut self, filter: &str, granted: bool) {
        let mut filters = self.filters().iter();
        let Some(filter) = filters.find(|it| **it == filter) else {
            return;
        };
        match granted {
            // The broker's rules may have changed since an earlier connection.
            true => self.refused.retain(|it| it != filter),
            false if self.refused.contains(filter) => {}
            false => {
                if self.refused.is_empty() {
                    let name = mosquitto::NAME;
                    tracing::info!(
                        "the broker does not let the store subscribe to {filter}, so it does not receive {name}"
                    );
                }
                self.refused.push(*filter);
            }
        }
    }

    /// Reads a message that is no request. Returns the client whose connection has ended.
    pub fn read<'a>(&mut self, topic: &str, payload: &'a [u8]) -> Option<&'a str> {
        let said = self.source.as_mut()?.read(topic, payload);
        if said.publishes_log && self.refused.is_empty() && !*self.works.borrow() {
            tracing::info!("presence: {}", mosquitto::NAME);
            self.works.send_replace(true);
        }
        said.disconnected
    }

    /// The status, which can be awaited without the lock.
    pub fn status(&self) -> PresenceStatus {
        PresenceStatus {
            any: self.source.is_some(),
            // Mosquitto does not log a TCP connection to its listener for WebSocket.
            needs_client: self.is_websocket && self.refused.is_empty(),
            works: self.works.subscribe(),
        }
    }
}

/// Whether a source of presence works. A source works from its first message on.
#[derive(Clone)]
pub struct PresenceStatus {
    any: bool,
    /// Whether only another client makes the broker log an event.
    needs_client: bool,
    works: watch::Receiver<bool>,
}

impl PresenceStatus {
    /// The line for the operator at the start. Waits at most [`limits::PRESENCE_EVIDENCE_WAIT`] for
    /// a source. A log line reports a source that works later.
    pub async fn line(self, host: &str, port: u16, ttl: Option<Duration>) -> String {
        self.line_within(limits::PRESENCE_EVIDENCE_WAIT, host, port, ttl)
            .await
    }

    async fn line_within(
        mut self,
        wait: Duration,
        host: &str,
        port: u16,
        ttl: Option<Duration>,
    ) -> String {
        let shown = async {
            // Makes the broker log an event: a connection that ends before it sends anything.
            // Mosquitto logs that too, and it affects no session and no client id. The broker is
            // present, because the store is attached. If this fails, the broker logs no event.
            if !self.needs_client {
                let _ = TcpStream::connect((host, port)).await;
            }
            self.works.wait_for(|works| *works).await.is_ok()
        };
        let works = self.any && timeout(wait, shown).await.unwrap_or(false);
        let first = if works {
            let name = mosquitto::NAME;
            format!("{name}; a watch ends with its client's connection")
        } else if self.any && self.needs_client {
            "none known yet, since over WebSocket only the connection of another client can show one; until then a watch ends with the first notification without a subscriber".to_owned()
        } else {
            "none; a watch ends with the first notification without a subscriber".to_owned()
        };
        match ttl {
            Some(ttl) => format!("{first}, or after {ttl:?} of silence"),
            None => first,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "$SYS/broker/log/N";
    const VERSION: &str = "$SYS/broker/version";
    const CONNECTION: &[u8] = b"1: New connection from 127.0.0.1:1 on port 2.";

    /// The line if the broker publishes no further message.
    async fn line(presence: &Presence, ttl: Option<Duration>) -> String {
        let wait = Duration::from_millis(10);
        let status = presence.status();
        status.line_within(wait, "127.0.0.1", 9, ttl).await
    }

    /// The broker sends its version and this line.
    fn read_log(presence: &mut Presence, line: &[u8]) {
        presence.read(VERSION, b"mosquitto version 2.0.11");
        presence.read(LOG, line);
    }

    #[tokio::test]
    async fn the_line_for_a_broker_without_a_log_says_none() {
        for kind in [PresenceKind::Auto, PresenceKind::Off] {
            let presence = Presence::new(kind, false);
            assert_eq!(
                line(&presence, None).await,
                "none; a watch ends with the first notification without a subscriber"
            );
        }
        let presence = Presence::new(PresenceKind::Off, false);
        let line = line(&presence, Some(Duration::from_secs(600))).await;
        assert!(line.ends_with(", or after 600s of silence"), "{line}");
    }

    #[tokio::test]
    async fn a_connection_without_a_packet_makes_the_broker_log() {
        let broker = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = broker.local_addr().unwrap().port();
        let mut presence = Presence::new(PresenceKind::Auto, false);
        let status = presence.status();
        let line = tokio::spawn(async move { status.line("127.0.0.1", port, None).await });
        let (mut connection, _) = broker.accept().await.unwrap();
        let mut sent = Vec::new();
        tokio::io::AsyncReadExt::read_to_end(&mut connection, &mut sent)
            .await
            .unwrap();
        assert!(sent.is_empty());
        read_log(&mut presence, CONNECTION);
        assert_eq!(
            line.await.unwrap(),
            "mosquitto's connection log; a watch ends with its client's connection"
        );
    }

    #[tokio::test]
    async fn the_line_over_websocket_waits_for_a_client() {
        let mut presence = Presence::new(PresenceKind::Auto, true);
        let unknown = "none known yet";
        assert!(line(&presence, None).await.starts_with(unknown));
        let connected = b"1: New client connected from 127.0.0.1:1 as a (p5, c1, k60).";
        read_log(&mut presence, connected);
        assert!(line(&presence, None).await.starts_with("mosquitto's "));
        presence = Presence::new(PresenceKind::Auto, true);
        presence.subscribed(LOG, false);
        let off = Presence::new(PresenceKind::Off, true);
        for without in [presence, off] {
            assert!(line(&without, None).await.starts_with("none; "));
        }
    }

    #[tokio::test]
    async fn a_source_works_after_its_refused_subscription_is_granted() {
        let mut presence = Presence::new(PresenceKind::Auto, false);
        for (log_is_granted, start) in [(false, "none; "), (true, "mosquitto's ")] {
            for filter in presence.filters() {
                presence.subscribed(filter, *filter != LOG || log_is_granted);
            }
            read_log(&mut presence, CONNECTION);
            let line = line(&presence, None).await;
            assert!(line.starts_with(start), "{line}");
        }
    }

    #[test]
    fn only_the_retained_version_is_wanted() {
        let presence = Presence::new(PresenceKind::Auto, false);
        assert_eq!(presence.filters(), [VERSION, LOG]);
        assert!(presence.wants_retained(VERSION) && !presence.wants_retained(LOG));
        assert!(Presence::new(PresenceKind::Off, false).filters().is_empty());
    }
}
