use std::time::Duration;

use statehouse_mqtt::{Door, Identity, NoService, Options, Properties, PropertiesBuilder};
use statehouse_protocol::topics::ORDER_TOPIC;
use statehouse_protocol::{ConnectionId, SessionId};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::policies::delivery::{Trust, digits, generate, id, sign, sign_order};
use crate::policies::manager::tests::{Rig, STORE, rig, twin};
use statehouse_core::policy::Act;

const FILE: &[u8] = b"0123456789abc";

struct OrderRig {
    orders: Arc<PolicyOrders>,
    broker: Broker,
    audit: Arc<Audit>,
    key: wasmsign2::KeyPair,
    rig: Rig,
}

fn order_rig() -> OrderRig {
    let (rig, pair) = (rig(), generate());
    let trust = Trust::new(&[digits(&pair.pk)], false).unwrap();
    let gate = Arc::new(Gate::new(rig.control.clone(), trust));
    let audit = Arc::new(Audit::default());
    OrderRig {
        orders: PolicyOrders::new(gate, audit.clone()),
        audit,
        broker: Broker::new(Options::default(), Arc::new(NoService)),
        key: pair,
        rig,
    }
}

fn publisher() -> Origin {
    Origin {
        client: "a".into(),
        connection: ConnectionId(1),
        session: SessionId(1),
        identity: Identity::anonymous(),
    }
}

impl OrderRig {
    /// The payload of an order.
    fn payload(serial: u64, action: Action, file: &[u8]) -> Vec<u8> {
        let order = Order {
            serial,
            stores: vec![STORE.into()],
            action,
            digest: (!file.is_empty()).then(|| Digest::of(file)),
            size: Some(file.len() as u64),
            chunks: file.chunks(10).map(Digest::of).collect(),
            per_mille: None,
            rule: None,
        };
        order.payload()
    }

    fn order(&self, serial: u64, action: Action, file: &[u8]) -> Outcome {
        self.signed(&Self::payload(serial, action, file))
    }

    /// Sends this order with a signature.
    fn signed(&self, payload: &[u8]) -> Outcome {
        let signature = sign_order(payload, &self.key.sk);
        let from = publisher();
        self.orders
            .order(&self.broker, &from, payload, Some(&signature))
    }

    /// Sends a chunk of [`FILE`].
    fn chunk(&self, index: usize, bytes: &[u8]) -> Outcome {
        let place = format!("{}/{index}", Digest::of(FILE));
        self.orders.chunk(&self.broker, &place, bytes)
    }

    /// Checks the state and the serial of the retained status, and returns it.
    async fn has_status(&self, state: &str, serial: u64) -> Json {
        let status = self.status().await;
        assert_eq!(status["state"], state, "{status}");
        assert_eq!(status["serial"], serial, "{status}");
        status
    }

    /// The retained status, as a subscriber receives it.
    async fn status(&self) -> Json {
        let (mut near, far) = tokio::io::duplex(1 << 16);
        let broker = self.broker.clone();
        let door = Door::open("127.0.0.1:1".parse().unwrap());
        let serving = tokio::spawn(async move { broker.serve_connection(far, door).await });
        // A CONNECT of version 5 that starts clean, and a SUBSCRIBE of QoS 0.
        let mut sent = b"\x10\x0e\0\x04MQTT\x05\x02\0\0\0\0\x01a\x82".to_vec();
        let length = u8::try_from(STATUS.len()).unwrap();
        sent.extend([length + 6, 0, 1, 0, 0, length]);
        sent.extend(STATUS.bytes());
        sent.push(0);
        near.write_all(&sent).await.unwrap();
        let mut received = Vec::new();
        let status = loop {
            let count = near.read_buf(&mut received).await.unwrap();
            assert_ne!(count, 0, "{received:?}");
            let text = String::from_utf8_lossy(&received);
            // Only the status has braces.
            if let Some((from, to)) = text.find('{').zip(text.rfind('}'))
                && let Ok(status) = serde_json::from_str(&text[from..=to])
            {
                break status;
            }
        };
        serving.abort();
        status
    }
}

#[tokio::test]
async fn an_order_without_its_chunks_is_dropped_and_may_be_sent_again() {
    let it = order_rig();
    let before = Instant::now();
    it.order(7, Action::Load, FILE).unwrap();
    let after = Instant::now();
    it.chunk(0, &FILE[..10]).unwrap();
    let early = before + limits::ORDER_TIMEOUT - Duration::from_millis(1);
    it.orders.expire(&it.broker, early);
    assert_eq!(it.status().await["state"], "receiving");
    it.orders.expire(&it.broker, after + limits::ORDER_TIMEOUT);
    assert_eq!(it.has_status("failed", 7).await["missing"], 1);
    let (_, refusal) = it.chunk(0, &FILE[..10]).unwrap_err();
    assert!(refusal.contains("publish the order first"), "{refusal}");
    it.order(7, Action::Load, FILE).unwrap();
    assert_eq!(it.status().await["missing"], 2);
}

/// Regression: an order at QoS 0 was carried out, and its refusal reached no client.
#[tokio::test]
async fn an_order_at_qos_0_is_refused() {
    let it = order_rig();
    let order = OrderRig::payload(7, Action::Load, FILE);
    let properties = PropertiesBuilder::new()
        .user(SIGNATURE, &sign_order(&order, &it.key.sk))
        .finish()
        .and_then(Properties::parse)
        .unwrap();
    let take = |qos| {
        let request = Request {
            topic: ORDER_TOPIC.into(),
            payload: order.clone().into(),
            properties: properties.clone(),
            qos,
            dup: false,
            packet_id: 0,
            expires: None,
            token: None,
        };
        it.orders.clone().take(&it.broker, &publisher(), request);
        it.orders.lock().now.is_some()
    };
    assert!(!take(QoS::AtMostOnce));
    assert_eq!(it.audit.counts(), [("order", 1)]);
    assert!(take(QoS::AtLeastOnce));
    assert_eq!(it.audit.counts(), [("order", 1)]);
}

#[tokio::test]
async fn a_long_chunk_is_refused_with_its_limit() {
    let it = order_rig();
    it.order(7, Action::Load, FILE).unwrap();
    let put = |bytes: usize| it.chunk(0, &vec![0; bytes]);
    let (reason, text) = put(limits::CHUNK_BYTES_MAX + 1).unwrap_err();
    assert_eq!(reason, ReasonCode::QUOTA_EXCEEDED);
    assert!(text.contains("262144 bytes"), "{text}");
    let (reason, _) = put(limits::CHUNK_BYTES_MAX).unwrap_err();
    assert_eq!(reason, ReasonCode::PAYLOAD_FORMAT_INVALID);
}

/// Regression: the order was `receiving` for ten minutes, although no chunk could complete it.
#[tokio::test]
async fn a_chunk_beyond_the_named_size_ends_the_order() {
    let it = order_rig();
    let order = OrderRig::payload(7, Action::Load, FILE);
    let mut order: Order = serde_json::from_slice(&order).unwrap();
    order.size = Some(11);
    it.signed(&order.payload()).unwrap();
    it.chunk(0, &FILE[..10]).unwrap();
    let (reason, text) = it.chunk(1, &FILE[10..]).unwrap_err();
    assert_eq!(reason, ReasonCode::PAYLOAD_FORMAT_INVALID);
    assert_eq!(it.has_status("failed", 7).await["error"], text);
    it.order(7, Action::Load, FILE).unwrap();
    assert_eq!(it.status().await["missing"], 2);
}

#[tokio::test]
async fn a_newer_order_replaces_one_whose_chunks_arrive() {
    let it = order_rig();
    it.order(7, Action::Load, FILE).unwrap();
    it.order(8, Action::Load, b"abc0123456789").unwrap();
    let (_, refusal) = it.chunk(0, &FILE[..10]).unwrap_err();
    assert!(refusal.contains("publish the order first"), "{refusal}");
    assert_eq!(it.status().await["serial"], 8);
}

/// The publisher waits for the end of the order, and other orders wait for their turn.
#[tokio::test]
async fn an_order_that_panics_ends_with_a_failure() {
    let it = order_rig();
    let known = Known {
        payload: blake3::hash(b"order"),
        serial: 7,
        file: None,
    };
    it.orders.lock().now = Some(Now {
        known,
        since: Instant::now(),
        by: Actor::admin(None),
        assembly: None,
    });
    let (reason, _) = it.order(8, Action::Rollback, b"").unwrap_err();
    assert_eq!(reason, ReasonCode::IMPLEMENTATION_SPECIFIC_ERROR);
    let orders = it.orders.clone();
    orders.start(it.broker.clone(), known, Actor::admin(None), || {
        panic!("a bug")
    });
    let deadline = Instant::now() + Duration::from_secs(30);
    while it.orders.lock().now.is_some() {
        assert!(Instant::now() < deadline, "the order never ends");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let status = it.has_status("failed", 7).await;
    let error = status["error"].as_str().unwrap();
    assert!(error.contains("bug"), "{status}");
    it.order(8, Action::Rollback, b"").unwrap();
}

#[test]
fn a_policy_names_its_order_and_the_keys_that_signed_it() {
    let it = order_rig();
    let file = sign(&twin(b'a'), &it.key.sk).unwrap();
    let order = Order {
        serial: 7,
        stores: vec![STORE.into()],
        action: Action::Promote,
        digest: Some(Digest::of(&file)),
        size: None,
        chunks: Vec::new(),
        per_mille: None,
        rule: None,
    };
    let key = id(&it.key.pk);
    let by = Actor::order("a", Some("anna"), 7, key.clone());
    (it.orders.carry_out(&order, by.clone(), Some(file))).unwrap();
    let digest = order.digest.unwrap();
    let listed = it.rig.control.list().assignment;
    let origin = listed.origin(digest).unwrap();
    let at_ms = origin.loaded.as_ref().unwrap().at_ms;
    assert!(at_ms >= 1_700_000_000_000);
    let act = Some(Act { at_ms, by });
    assert_eq!((&origin.loaded, &origin.assigned), (&act, &act));
    assert_eq!(origin.signed_by.as_ref(), Some(&key));
    assert_eq!(it.rig.recorded().assignment, Some(listed));
    it.rig.control.rollback().unwrap();
    let listed = it.rig.control.list().assignment;
    let active = listed.origin(listed.active).unwrap();
    let assigned = active.assigned.as_ref().unwrap();
    assert_eq!((&assigned.by, &active.loaded), (&Actor::admin(None), &None));
}
