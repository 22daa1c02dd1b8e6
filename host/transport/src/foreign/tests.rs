//! A store's session without a broker: the tests call the methods that the link would call.

mod log;
mod mark;

use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use rumqttc::v5::mqttbytes::QoS;
use rumqttc::v5::mqttbytes::v5::SubscribeReasonCode;
use statehouse_link::Owner;

use self::log::warnings;
use super::identity::named;
use super::{Foreign, lock, options};
use crate::{Inbound, Intake};
use statehouse_config::{ForeignConfig, OutboxBounds, PresenceKind, limits};
use statehouse_core::request::PREVIEW_TOPIC;

/// Records the ids of disconnected clients.
#[derive(Default)]
struct Disconnections(Mutex<Vec<String>>);

impl Intake for Disconnections {
    fn take(&self, batch: &mut dyn Iterator<Item = Inbound<'_>>) {
        for inbound in batch {
            if let Inbound::Disconnected(peer) = inbound {
                lock(&self.0).push(peer.client.to_string());
            }
        }
    }
}

pub(super) fn config() -> ForeignConfig {
    ForeignConfig {
        broker: "mqtt://broker".parse().unwrap(),
        user: None,
        password: None,
        password_file: None,
        ca: None,
        certificate: None,
        client_id: None,
        keeps_client_id: true,
        window: 1,
        keep_alive: Duration::from_secs(15),
        presence: PresenceKind::Off,
        watch_ttl: Some(Duration::from_secs(60)),
        standby: false,
        outbox: OutboxBounds::default(),
    }
}

fn foreign() -> (Arc<Foreign>, Arc<Disconnections>) {
    let recorded = Arc::new(Disconnections::default());
    (
        Foreign::new(recorded.clone(), &config(), "id", None),
        recorded,
    )
}

#[test]
fn no_watch_expires_while_the_store_has_no_connection() {
    let (foreign, recorded) = foreign();
    let ended = || std::mem::take(&mut *lock(&recorded.0));
    let watching = || vec![named("a")];
    let now = Instant::now();
    let at = |seconds| now + Duration::from_secs(seconds);
    // The last sign of life of the client is some time ago.
    let before = now.checked_sub(Duration::from_secs(50)).unwrap();
    foreign.arrived(&mut Vec::new());
    foreign.end_silent_watches(&watching, before);
    foreign.lost("the broker is away");
    foreign.end_silent_watches(&watching, at(1000));
    assert!(ended().is_empty(), "without a connection no watch expires");
    foreign.arrived(&mut Vec::new());
    foreign.end_silent_watches(&watching, at(30));
    assert!(
        ended().is_empty(),
        "a new connection restarts the time to live"
    );
    foreign.end_silent_watches(&watching, at(70));
    assert_eq!(ended(), ["a"]);
}

/// The requests that arrived in the pause are not read yet.
#[test]
fn no_watch_expires_because_of_a_pause_of_the_process() {
    let (foreign, recorded) = foreign();
    let ended = || std::mem::take(&mut *lock(&recorded.0));
    let watching = || vec![named("a")];
    let now = Instant::now();
    let at = |seconds| now + Duration::from_secs(seconds);
    foreign.arrived(&mut Vec::new());
    foreign.check_watches(&watching, now, now);
    foreign.check_watches(&watching, at(8), at(100));
    foreign.check_watches(&watching, at(159), at(159));
    assert!(ended().is_empty(), "the pause restarts the time to live");
    foreign.check_watches(&watching, at(160), at(160));
    assert_eq!(ended(), ["a"]);
}

/// A store that handles a request of a client just before it ends that client's watches.
struct Asked {
    foreign: Mutex<Weak<Foreign>>,
    at: Instant,
    disconnections: Disconnections,
}

impl Intake for Asked {
    fn take(&self, batch: &mut dyn Iterator<Item = Inbound<'_>>) {
        if let Some(foreign) = lock(&self.foreign).upgrade()
            && let Some(ttl) = &foreign.ttl
        {
            lock(ttl).renew("asking", self.at);
        }
        self.disconnections.take(batch);
    }
}

#[test]
fn a_request_after_the_check_for_silent_clients_keeps_watches() {
    let now = Instant::now();
    let later = now + Duration::from_secs(100);
    let asked = Arc::new(Asked {
        foreign: Mutex::default(),
        at: later,
        disconnections: Disconnections::default(),
    });
    let foreign = Foreign::new(asked.clone(), &config(), "id", None);
    foreign.arrived(&mut Vec::new());
    let watching = || vec![named("asking"), named("silent")];
    foreign.end_silent_watches(&watching, now);
    *lock(&asked.foreign) = Arc::downgrade(&foreign);
    foreign.end_silent_watches(&watching, later);
    assert_eq!(*lock(&asked.disconnections.0), ["silent"]);
}

#[test]
fn refused_subscriptions_are_logged_once_with_their_consequence() {
    use SubscribeReasonCode::{NotAuthorized, Success};
    let (foreign, _) = foreign();
    let granted = Success(QoS::AtLeastOnce);
    let at_qos_0 = Success(QoS::AtMostOnce);
    let filters = foreign.filters();
    assert_eq!(filters.len(), 3, "requests, the preview topic, the mark");
    let mark = filters[2].path.as_str();
    for (codes, expected) in [
        (
            [granted, at_qos_0, NotAuthorized],
            &[PREVIEW_TOPIC, mark][..],
        ),
        ([granted, at_qos_0, NotAuthorized], &[]),
        ([granted, granted, at_qos_0], &[]),
        ([granted, NotAuthorized, at_qos_0], &[PREVIEW_TOPIC]),
    ] {
        let logged = warnings(|| _ = foreign.subscribed(&codes));
        assert_eq!(logged.len(), expected.len(), "{logged:?}");
        for (line, topic) in logged.iter().zip(expected) {
            let start = format!("the broker does not let the store subscribe to {topic}, so ");
            assert!(line.starts_with(&start), "{line}");
        }
    }
}

#[test]
fn store_without_marks_ends_when_it_is_taken_over() {
    use SubscribeReasonCode::{NotAuthorized, Success};
    let (foreign, _) = foreign();
    let granted = Success(QoS::AtLeastOnce);
    for mark in [Success(QoS::AtMostOnce), NotAuthorized] {
        foreign.subscribed(&[granted, granted, mark]);
        assert_eq!(foreign.ends_when_taken_over(), mark == NotAuthorized);
    }
}

#[test]
fn a_temporary_client_id_leaves_no_mark_and_a_short_session() {
    for keeps_client_id in [true, false] {
        let config = ForeignConfig {
            keeps_client_id,
            ..config()
        };
        let foreign = Foreign::new(Arc::new(Disconnections::default()), &config, "id", None);
        let filters = foreign.filters();
        let marks = (filters.iter()).filter(|it| it.path.starts_with("statehouse/"));
        assert_eq!(marks.count(), usize::from(keeps_client_id));
        foreign.subscribed(&[SubscribeReasonCode::Success(QoS::AtLeastOnce)]);
        let published = foreign.state().outlet.len();
        assert_eq!(published, usize::from(keeps_client_id), "a retained mark");
        let expiry = options(&config, 1).unwrap().session_expiry;
        assert_eq!(
            expiry == limits::BROKER_SESSION_EXPIRY,
            keeps_client_id,
            "{expiry:?}"
        );
    }
}

#[test]
fn each_connection_uses_the_present_files() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("password");
    std::fs::write(&path, "before\n").unwrap();
    let config = ForeignConfig {
        user: Some("store".to_owned()),
        password_file: Some(path.clone()),
        ..config()
    };
    let foreign = Foreign::new(Arc::new(Disconnections::default()), &config, "id", None);
    let password = || foreign.place().map(|it| it.login.unwrap().1);
    assert_eq!(password().as_deref(), Some("before"));
    std::fs::write(&path, "after\n").unwrap();
    assert_eq!(password().as_deref(), Some("after"));
    std::fs::remove_file(&path).unwrap();
    assert_eq!(password(), None, "the link uses the previous one");
    std::fs::write(&path, "again\n").unwrap();
    assert_eq!(password().as_deref(), Some("again"));
}
