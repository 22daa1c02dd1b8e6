//! A store with a client id that another run may take over: requests and the retained mark.

use rumqttc::v5::mqttbytes::v5::{PubAck, PubAckReason, Publish, PublishProperties};
use statehouse_core::request::REQUEST_TOPIC;
use statehouse_link::{Accepted, Arrival, End};

use super::super::Phase;
use super::*;

/// Counts requests.
#[derive(Default)]
struct Requests(Mutex<usize>);

impl Intake for Requests {
    fn take(&self, batch: &mut dyn Iterator<Item = Inbound<'_>>) {
        *lock(&self.0) += batch.count();
    }
}

struct Scene {
    foreign: Arc<Foreign>,
    requests: Arc<Requests>,
}

impl Scene {
    /// A store whose mark is at the broker.
    fn new() -> Self {
        let scene = Self::unconnected();
        scene.connect(false);
        scene.subscribe();
        assert_eq!(scene.published(), [true], "a retained mark");
        scene.mark(scene.own_mark(), false);
        scene.acknowledge();
        scene
    }

    fn unconnected() -> Self {
        let requests = Arc::new(Requests::default());
        let config = ForeignConfig {
            window: 64,
            ..config()
        };
        Self {
            foreign: Foreign::new(requests.clone(), &config, "id", None),
            requests,
        }
    }

    fn connect(&self, session_present: bool) {
        self.foreign.connected(Accepted {
            session_present,
            retain_available: true,
        });
        self.foreign.arrived(&mut Vec::new());
    }

    fn subscribe(&self) {
        let granted = SubscribeReasonCode::Success(QoS::AtLeastOnce);
        let count = self.foreign.filters().len();
        self.foreign.subscribed(&vec![granted; count]);
        self.foreign.arrived(&mut Vec::new());
    }

    /// The messages to the broker, and whether each is retained.
    fn published(&self) -> Vec<bool> {
        let state = self.foreign.state();
        let all = state.outlet.iter();
        all.map(|(_, outgoing)| outgoing.message.retain).collect()
    }

    fn own_mark(&self) -> Vec<u8> {
        lock(self.foreign.claim.as_ref().unwrap()).mark().to_vec()
    }

    fn arrive(&self, publish: Publish, receipt: Option<u64>) {
        let publish = Publish {
            properties: Some(PublishProperties::default()),
            ..publish
        };
        self.foreign
            .arrived(&mut vec![Arrival::Message(publish, receipt)]);
    }

    fn mark(&self, mark: Vec<u8>, retain: bool) {
        let topic = lock(self.foreign.claim.as_ref().unwrap())
            .topic()
            .to_owned();
        let publish = Publish {
            topic: topic.into(),
            payload: mark.into(),
            retain,
            ..Publish::default()
        };
        self.arrive(publish, None);
    }

    fn request(&self, receipt: u64) {
        let publish = Publish {
            topic: REQUEST_TOPIC.into(),
            qos: QoS::AtLeastOnce,
            ..Publish::default()
        };
        self.arrive(publish, Some(receipt));
    }

    /// The broker acknowledges all messages.
    fn acknowledge(&self) {
        self.acknowledge_with(PubAckReason::Success);
    }

    fn acknowledge_with(&self, reason: PubAckReason) {
        let numbers: Vec<u64> = {
            let state = self.foreign.state();
            state.outlet.iter().map(|(number, _)| number).collect()
        };
        let acknowledged = |number| {
            let ack = PubAck {
                pkid: 1,
                reason,
                properties: None,
            };
            Arrival::Acknowledged(number, ack)
        };
        let mut arrivals: Vec<_> = numbers.into_iter().map(acknowledged).collect();
        self.foreign.arrived(&mut arrivals);
    }

    fn requests(&self) -> usize {
        *lock(&self.requests.0)
    }
}

#[test]
fn requests_after_a_reconnection_wait_for_the_mark() {
    let scene = Scene::new();
    scene.request(1);
    assert_eq!(scene.requests(), 1);
    for round in 0..2 {
        scene.foreign.lost("the network is broken");
        scene.connect(true);
        scene.request(2);
        scene.subscribe();
        assert_eq!(scene.published(), [false], "a mark that replaces none");
        assert_eq!(scene.requests(), 1 + round, "the broker may send a mark");
        scene.mark(scene.own_mark(), true);
        assert_eq!(scene.requests(), 1 + round);
        scene.acknowledge();
        assert_eq!(scene.requests(), 2 + round);
    }
}

#[test]
fn a_lost_session_publishes_the_mark_again_before_requests() {
    let scene = Scene::new();
    scene.foreign.lost("the broker restarts");
    scene.connect(false);
    scene.request(1);
    scene.subscribe();
    assert_eq!(scene.published(), [true]);
    assert_eq!(scene.requests(), 0);
    scene.acknowledge();
    assert_eq!(scene.requests(), 1);
}

#[test]
fn a_run_that_finds_a_later_mark_executes_no_request() {
    let scene = Scene::new();
    scene.foreign.lost("the network is broken");
    scene.connect(true);
    scene.request(1);
    scene.subscribe();
    scene.mark(b"99999999999999 0".to_vec(), true);
    scene.acknowledge();
    assert_eq!(scene.requests(), 0);
    let phase = scene.foreign.phase().borrow().clone();
    assert!(
        matches!(phase, Phase::Ended(End::TakenOver(_))),
        "{phase:?}"
    );
}

/// Such a broker would close each connection.
#[test]
fn a_broker_without_retained_messages_gets_no_retained_mark() {
    let scene = Scene::new();
    let accepted = |session_present, retain_available| Accepted {
        session_present,
        retain_available,
    };
    for (session_present, logged) in [(false, 1), (true, 0), (false, 0)] {
        scene.foreign.lost("the broker restarts");
        let lines = warnings(|| scene.foreign.connected(accepted(session_present, false)));
        assert_eq!(lines.len(), logged, "{lines:?}");
        scene.request(1);
        scene.subscribe();
        assert_eq!(scene.published(), [false]);
        let before = scene.requests();
        scene.acknowledge();
        assert_eq!(scene.requests(), before + 1, "nothing waits for a mark");
        assert!(scene.foreign.ends_when_taken_over(), "no mark is found");
    }
    scene.foreign.lost("the broker restarts");
    scene.foreign.connected(accepted(false, true));
    scene.subscribe();
    assert_eq!(scene.published(), [true]);
}

#[test]
fn a_taken_over_connection_ends_no_run_that_finds_its_mark() {
    let scene = Scene::new();
    for _ in 0..2 * limits::BROKER_TAKEOVERS_MAX {
        assert!(!scene.foreign.ends_when_taken_over());
        scene.foreign.lost("taken over");
        scene.connect(true);
        scene.subscribe();
        scene.mark(scene.own_mark(), true);
    }
    let temporary = ForeignConfig {
        keeps_client_id: false,
        ..config()
    };
    let foreign = Foreign::new(scene.requests.clone(), &temporary, "id", None);
    assert!(foreign.ends_when_taken_over(), "it has no mark");
}

/// Mosquitto's `acl_file` refuses no subscription, so nothing else shows that the store has no read
/// rights.
#[test]
fn undelivered_mark_is_logged_once_with_its_consequence() {
    for (is_delivered, logged) in [(true, 0), (false, 1)] {
        let scene = Scene::unconnected();
        let mut lines = Vec::new();
        for _ in 0..2 {
            scene.connect(false);
            scene.subscribe();
            if is_delivered {
                scene.mark(scene.own_mark(), false);
            }
            scene.acknowledge();
            let now = Instant::now();
            let early = warnings(|| scene.foreign.log_progress(now));
            assert_eq!(early, [""; 0]);
            let later = now + limits::BROKER_MARK_WAIT;
            lines.extend(warnings(|| scene.foreign.log_progress(later)));
            scene.foreign.lost("the broker restarts");
        }
        assert_eq!(lines.len(), logged, "{lines:?}");
        assert!(
            lines
                .iter()
                .all(|line| line.contains("receive no requests"))
        );
    }
}

#[test]
fn refused_mark_is_logged_once_with_its_consequence() {
    let scene = Scene::unconnected();
    for (reason, logged) in [
        (PubAckReason::NotAuthorized, 1),
        (PubAckReason::NotAuthorized, 0),
        (PubAckReason::Success, 0),
        (PubAckReason::NotAuthorized, 1),
    ] {
        scene.connect(true);
        scene.subscribe();
        let lines = warnings(|| scene.acknowledge_with(reason));
        assert_eq!(lines.len(), logged, "{lines:?}");
        let consequence = "may not detect that another one took its client id";
        assert!(lines.iter().all(|line| line.contains(consequence)));
        scene.foreign.lost("the broker restarts");
    }
    assert_eq!(scene.foreign.state().sums.refused, 3);
}
