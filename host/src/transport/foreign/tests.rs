//! A store's session without a broker: what the link would call is called here.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rumqttc::v5::mqttbytes::QoS;
use rumqttc::v5::mqttbytes::v5::SubscribeReasonCode;
use statehouse_link::Owner;

use super::identity::named;
use super::{Foreign, lock, options};
use crate::config::{ForeignConfig, PresenceKind};
use crate::limits;
use crate::transport::{Inbound, Intake};

/// Notes who has gone.
#[derive(Default)]
struct Noted(Mutex<Vec<String>>);

impl Intake for Noted {
    fn take_within(&self, _: Duration, batch: &mut dyn Iterator<Item = Inbound<'_>>) {
        for inbound in batch {
            if let Inbound::Gone(peer) = inbound {
                lock(&self.0).push(peer.client.to_string());
            }
        }
    }
}

fn config() -> ForeignConfig {
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
    }
}

fn foreign() -> (Arc<Foreign>, Arc<Noted>) {
    let noted = Arc::new(Noted::default());
    (Foreign::new(noted.clone(), &config(), "id"), noted)
}

#[test]
fn no_watch_ends_because_the_store_itself_was_cut_off() {
    let (foreign, noted) = foreign();
    let gone = || std::mem::take(&mut *lock(&noted.0));
    let watching = || vec![named("a")];
    let now = Instant::now();
    let at = |seconds| now + Duration::from_secs(seconds);
    // The client was heard last some time ago.
    let before = now.checked_sub(Duration::from_secs(50)).unwrap();
    foreign.arrived(&mut Vec::new());
    foreign.end_watches_of_silent(&watching, before);
    foreign.lost("the broker is away");
    foreign.end_watches_of_silent(&watching, at(1000));
    assert!(gone().is_empty(), "without a connection nobody is heard");
    foreign.arrived(&mut Vec::new());
    foreign.end_watches_of_silent(&watching, at(30));
    assert!(gone().is_empty(), "time begins anew with a connection");
    foreign.end_watches_of_silent(&watching, at(70));
    assert_eq!(gone(), ["a"]);
}

#[test]
fn a_client_id_that_nobody_has_again_leaves_next_to_nothing_at_the_broker() {
    for keeps_client_id in [true, false] {
        let config = ForeignConfig {
            keeps_client_id,
            ..config()
        };
        let foreign = Foreign::new(Arc::new(Noted::default()), &config, "id");
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
