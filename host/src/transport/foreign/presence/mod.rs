//! Who has gone: MQTT does not tell one client of another, but Mosquitto publishes its connection log.
//!
//! Input: messages of the broker about its clients. Output: the clients whose connections ended, in the order of the
//! messages. A broker that publishes no log proves nothing, so the start shows whether it does. Watches
//! also end without a log: with the first notification that finds no subscriber, and by [`ttl`].

pub mod mosquitto;
pub mod ttl;

use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;

use self::mosquitto::Mosquitto;
use crate::config::PresenceKind;
use crate::limits;

/// What a line of the log says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign<'a> {
    /// The broker publishes its log, so ends of connections will be read.
    Works,
    /// The connection of this client has ended.
    Gone(&'a str),
}

/// Listens to the broker's log.
pub struct Presence {
    /// None if the store is to listen to nothing.
    source: Option<Mosquitto>,
    refused: bool,
    works: watch::Sender<Option<&'static str>>,
}

impl Presence {
    /// Listens as this setting says.
    pub fn new(kind: PresenceKind) -> Self {
        Self {
            source: (kind == PresenceKind::Auto).then(Mosquitto::default),
            refused: false,
            works: watch::Sender::new(None),
        }
    }

    /// The topics to subscribe to, at QoS 1: then the log arrives in one order with requests.
    pub fn filters(&self) -> &'static [&'static str] {
        match self.source {
            Some(_) => mosquitto::FILTERS,
            None => &[],
        }
    }

    /// Whether a message is wanted on this one that was retained before the subscription: what the broker itself is.
    /// Events of long ago are not.
    pub fn wants_retained(&self, filter: &str) -> bool {
        filter == mosquitto::VERSION && self.source.is_some()
    }

    /// The broker's answer to the subscription of one of these.
    pub fn subscribed(&mut self, filter: &str, granted: bool) {
        if granted || !self.filters().contains(&filter) {
            return;
        }
        if !self.refused {
            let name = mosquitto::NAME;
            tracing::info!(
                "the broker does not let the store subscribe to {filter}, so it does not hear {name}"
            );
        }
        self.refused = true;
    }

    /// A message that is no request. It calls `gone` for each client whose connection has ended.
    pub fn read(&mut self, topic: &str, payload: &[u8], gone: &mut dyn FnMut(&str)) {
        let Some(source) = &mut self.source else {
            return;
        };
        let mut works = false;
        source.read(topic, payload, &mut |seen| match seen {
            Sign::Works => works = true,
            Sign::Gone(client) => gone(client),
        });
        if works && !self.refused && self.works.borrow().is_none() {
            let name = mosquitto::NAME;
            tracing::info!("presence: {name}");
            self.works.send_replace(Some(name));
        }
    }

    /// What there is to show of it, also while it is in other hands.
    pub fn shown(&self) -> Shown {
        Shown {
            any: self.source.is_some(),
            works: self.works.subscribe(),
        }
    }
}

/// Which source works, as soon as one has shown that it does.
#[derive(Clone)]
pub struct Shown {
    any: bool,
    works: watch::Receiver<Option<&'static str>>,
}

impl Shown {
    /// What to show at the start. Waits [`limits::PRESENCE_EVIDENCE_WAIT`] at most; what shows itself later is logged.
    pub async fn line(self, host: &str, port: u16, ttl: Option<Duration>) -> String {
        self.within(limits::PRESENCE_EVIDENCE_WAIT, host, port, ttl)
            .await
    }

    async fn within(
        mut self,
        wait: Duration,
        host: &str,
        port: u16,
        ttl: Option<Duration>,
    ) -> String {
        let heard = async {
            // Has the broker speak of something: a connection that ends before it asks for anything. Mosquitto logs
            // that too, and nobody's session or name is touched. The broker is there, since the store is attached;
            // where this fails it is as if it had said nothing.
            let _ = TcpStream::connect((host, port)).await;
            self.works
                .wait_for(Option::is_some)
                .await
                .ok()
                .and_then(|it| *it)
        };
        let works = match self.any {
            true => timeout(wait, heard).await.ok().flatten(),
            false => None,
        };
        let first = match works {
            Some(name) => format!("{name}; a watch ends with its client's connection"),
            None => "none; a watch ends with the first notification that nobody takes".to_owned(),
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

    /// With a broker that says no more than it has said.
    async fn line(presence: &Presence, ttl: Option<Duration>) -> String {
        let wait = Duration::from_millis(10);
        presence.shown().within(wait, "127.0.0.1", 9, ttl).await
    }

    #[tokio::test]
    async fn a_silent_broker_is_shown_as_one() {
        for kind in [PresenceKind::Auto, PresenceKind::Off] {
            let presence = Presence::new(kind);
            assert_eq!(
                line(&presence, None).await,
                "none; a watch ends with the first notification that nobody takes"
            );
        }
        let presence = Presence::new(PresenceKind::Off);
        let ttl = Some(Duration::from_secs(600));
        assert!(
            line(&presence, ttl)
                .await
                .ends_with(", or after 600s of silence")
        );
    }

    #[tokio::test]
    async fn a_broker_is_made_to_speak_without_asking_it_for_anything() {
        let broker = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = broker.local_addr().unwrap().port();
        let mut presence = Presence::new(PresenceKind::Auto);
        let shown = presence.shown();
        let line = tokio::spawn(async move { shown.line("127.0.0.1", port, None).await });
        let (mut connection, _) = broker.accept().await.unwrap();
        let mut sent = Vec::new();
        tokio::io::AsyncReadExt::read_to_end(&mut connection, &mut sent)
            .await
            .unwrap();
        assert!(sent.is_empty());
        presence.read(VERSION, b"mosquitto version 2.0.11", &mut |_| ());
        presence.read(
            LOG,
            b"1: New connection from 127.0.0.1:1 on port 2.",
            &mut |_| (),
        );
        assert_eq!(
            line.await.unwrap(),
            "mosquitto's connection log; a watch ends with its client's connection"
        );
    }

    #[tokio::test]
    async fn what_the_broker_refuses_does_not_work() {
        let mut presence = Presence::new(PresenceKind::Auto);
        for filter in presence.filters() {
            presence.subscribed(filter, *filter != LOG);
        }
        presence.read(VERSION, b"mosquitto version 2.0.11", &mut |_| ());
        presence.read(
            LOG,
            b"1: New connection from 127.0.0.1:1 on port 2.",
            &mut |_| (),
        );
        assert!(line(&presence, None).await.starts_with("none; "));
    }

    #[test]
    fn only_the_version_is_wanted_as_it_was_retained() {
        let presence = Presence::new(PresenceKind::Auto);
        assert_eq!(presence.filters(), [VERSION, LOG]);
        assert!(presence.wants_retained(VERSION) && !presence.wants_retained(LOG));
        assert!(Presence::new(PresenceKind::Off).filters().is_empty());
    }
}
