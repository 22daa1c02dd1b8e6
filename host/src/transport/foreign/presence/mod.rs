//! Who has gone: MQTT does not tell one client of another, so each kind of broker has its own source.
//!
//! What enters: what the broker publishes of its clients. What leaves: signs of who came and who has gone, in the order
//! of the messages. A source that nobody has heard is no proof that all are there; so it is shown which one works.
//! Watches end without any source too: with the first notification that finds no subscriber, and by [`ttl`].

pub mod emqx;
pub mod mosquitto;
pub mod ttl;

use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::config::PresenceKind;
use crate::limits;

/// What a source has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign<'a> {
    /// The broker tells this source of its clients, and their ends will be read.
    Works,
    /// The connection of this client has ended.
    Gone(&'a str),
    /// A client has connected.
    Came {
        /// Its client id.
        client: &'a str,
        /// Its user name, where the source tells.
        user: Option<&'a str>,
    },
}

/// Reads what a broker tells of its clients.
pub trait Source: Send {
    /// What it is, for a line at the start.
    fn name(&self) -> &'static str;

    /// The topics that it has to hear.
    fn filters(&self) -> &'static [&'static str];

    /// That one of these on which a retained message is wanted: what the broker itself is. Events of long ago are not.
    fn version(&self) -> &'static str;

    /// A message, on one of these or of another source. It calls `sign` for all that it says, in order.
    fn read(&mut self, topic: &str, payload: &[u8], sign: &mut dyn FnMut(Sign<'_>));
}

/// The sources that are listened to.
pub struct Presence {
    sources: Vec<Listened>,
    works: watch::Sender<Option<&'static str>>,
}

struct Listened {
    source: Box<dyn Source>,
    refused: bool,
}

impl Presence {
    /// Listens to the sources of this kind; to all of them where the broker is to show which one works.
    pub fn new(kind: PresenceKind) -> Self {
        let sources: Vec<Box<dyn Source>> = match kind {
            PresenceKind::Auto => vec![
                Box::new(mosquitto::Mosquitto::default()),
                Box::new(emqx::Emqx::default()),
            ],
            PresenceKind::Mosquitto => vec![Box::new(mosquitto::Mosquitto::default())],
            PresenceKind::Emqx => vec![Box::new(emqx::Emqx::default())],
            PresenceKind::Off => Vec::new(),
        };
        let listened = |source| Listened {
            source,
            refused: false,
        };
        Self {
            sources: sources.into_iter().map(listened).collect(),
            works: watch::Sender::new(None),
        }
    }

    /// The topics to subscribe to, at QoS 1. What is published at QoS 1 then comes in one order with requests, as
    /// Mosquitto's log does; what is published at QoS 0, as EMQX's events may be, can overtake requests that wait or be
    /// lost: a watch may then end too early or too late.
    pub fn filters(&self) -> Vec<&'static str> {
        let filters = self.sources.iter().flat_map(|it| it.source.filters());
        filters.copied().collect()
    }

    /// Whether a message is wanted on this one that was retained before the subscription.
    pub fn wants_retained(&self, filter: &str) -> bool {
        self.sources.iter().any(|it| it.source.version() == filter)
    }

    /// What the broker said to the subscription of one of these.
    pub fn subscribed(&mut self, filter: &str, granted: bool) {
        let mut sources = self.sources.iter_mut();
        let source = sources.find(|it| it.source.filters().contains(&filter));
        let Some(listened) = source.filter(|_| !granted) else {
            return;
        };
        if !listened.refused {
            let name = listened.source.name();
            tracing::info!(
                "the broker does not let the store subscribe to {filter}, so it does not hear {name}"
            );
        }
        listened.refused = true;
    }

    /// A message that is no request. It calls `sign` for who came and who has gone.
    pub fn read(&mut self, topic: &str, payload: &[u8], sign: &mut dyn FnMut(Sign<'_>)) {
        for listened in &mut self.sources {
            let Listened { source, refused } = listened;
            let mut works = false;
            source.read(topic, payload, &mut |seen| match seen {
                Sign::Works => works = true,
                seen => sign(seen),
            });
            if works && !*refused && self.works.borrow().is_none() {
                let name = source.name();
                tracing::info!("presence: {name}");
                self.works.send_replace(Some(name));
            }
        }
    }

    /// What there is to show of it, also while it is in other hands.
    pub fn shown(&self) -> Shown {
        Shown {
            any: !self.sources.is_empty(),
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
        for kind in [
            PresenceKind::Auto,
            PresenceKind::Mosquitto,
            PresenceKind::Emqx,
            PresenceKind::Off,
        ] {
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
            presence.subscribed(filter, !filter.ends_with("/clients/#"));
        }
        presence.read("$SYS/brokers/n/version", b"5.8.0", &mut |_| ());
        assert!(line(&presence, None).await.starts_with("none; "));
    }

    #[test]
    fn every_source_hears_its_own() {
        let mut presence = Presence::new(PresenceKind::Auto);
        let mut seen = Vec::new();
        for (topic, payload) in [
            (LOG, "1: Client a disconnected."),
            (
                "$SYS/brokers/n/clients/b/disconnected",
                r#"{"clientid":"b"}"#,
            ),
            (VERSION, "mosquitto version 2.0.11"),
        ] {
            presence.read(topic, payload.as_bytes(), &mut |sign| match sign {
                Sign::Gone(client) => seen.push(client.to_owned()),
                other => panic!("{other:?}"),
            });
        }
        assert_eq!(seen, ["a", "b"]);
        assert_eq!(presence.filters().len(), 4);
        let mut retained = presence.filters();
        retained.retain(|it| presence.wants_retained(it));
        assert_eq!(retained, [VERSION, "$SYS/brokers/+/version"]);
        assert!(Presence::new(PresenceKind::Off).filters().is_empty());
    }
}
