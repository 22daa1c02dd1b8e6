//! Encoding and decoding round-trip, records are small, and invalid bytes are errors.

use proptest::prelude::*;
use statehouse_protocol::SessionId;

use super::*;
use crate::{
    Recovery,
    limits::SUBSCRIPTION_ID_OVER,
    session_queue::{Queued, Scope},
    simulation::session_began,
};

fn content() -> impl Strategy<Value = (QoS, bool, Option<u64>, Vec<u8>, Vec<u8>)> {
    let qos = prop_oneof![
        Just(QoS::AtMostOnce),
        Just(QoS::AtLeastOnce),
        Just(QoS::ExactlyOnce)
    ];
    let bytes = || prop::collection::vec(any::<u8>(), 0..200);
    (qos, any::<bool>(), any::<Option<u64>>(), bytes(), bytes())
}

/// Encodes changes and checks that decoding returns the same.
fn check_round_trip(changes: &[Change<'_>]) {
    let mut encoder = Encoder::default();
    for change in changes {
        encoder.write(change);
    }
    let bytes = encoder.take();
    let read: Result<Vec<_>, _> = Decoder::new(&bytes).unwrap().collect();
    assert_eq!(read.unwrap(), changes);
    // Every shorter batch is a shorter list or an error.
    for end in 1..bytes.len() {
        let read: Result<Vec<_>, _> = Decoder::new(&bytes[..end]).unwrap().collect();
        assert!(read.is_err() || read.unwrap().len() < changes.len());
    }
}

proptest! {
    #[test]
    fn every_change_round_trips(
        session in any::<u64>(),
        number in any::<u64>(),
        packet_id in 1_u16..,
        (qos, retain, expires_ms, topic, payload) in content(),
        ids in prop::collection::vec(1_u32..SUBSCRIPTION_ID_OVER, 0..4),
        client in "\\PC{1,20}",
        seconds in any::<u32>(),
        expiry_s in any::<Option<u32>>(),
        flags in any::<(bool, bool, bool)>(),
        reason in any::<u8>(),
    ) {
        let bytes = ContentBytes { topic: &topic, payload: &payload, properties: b"" };
        let content = Content { qos, retain, expires_ms, bytes: Some(bytes) };
        let will = RecordedWill { content: content.clone(), delay_s: seconds, expiry_s };
        let subscription =
            Subscription { qos, no_local: flags.0, retain_as_published: flags.1, id: ids.first().copied() };
        let sharing = Sharing { filter: &payload, qos, retain: flags.0 };
        let parts = [
            Part::Begin { client: &client, expiry_s: seconds, will: None },
            Part::Attach { expiry_s: seconds, will: Some(will) },
            Part::Owner(&client),
            Part::Expiry(seconds),
            Part::NoWill,
            Part::Detach(number),
            Part::End,
            Part::Subscribe { filter: &topic, subscription, retained_pending: flags.2 },
            Part::Unsubscribe(&topic),
            Part::Message { number, content: content.clone(), subscription_ids: ids.clone().into(), shared: None },
            Part::Message { number, content: content.clone(), subscription_ids: ids.clone().into(), shared: Some(sharing) },
            Part::Message {
                number,
                content: Content { bytes: None, ..content.clone() },
                subscription_ids: ids.into(),
                shared: None,
            },
            Part::Sent { number, packet_id },
            Part::Released { number, packet_id },
            Part::Removed(number),
            Part::Received { packet_id, reason: ReasonCode(reason) },
            Part::Completed(packet_id),
        ];
        let mut changes: Vec<_> = parts.into_iter().map(|part| Change::Session(SessionId(session), part)).collect();
        changes.push(Change::Retained { message: content.clone(), from: Some(&client) });
        changes.push(Change::Retained { message: content, from: None });
        changes.push(Change::RetainedRemoved(&topic));
        check_round_trip(&changes);
    }

    #[test]
    fn any_bytes_decode_or_return_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let mut recovery = Recovery::default();
        _ = recovery.apply(&bytes);
        let mut versioned = vec![FORMAT];
        versioned.extend(bytes);
        _ = recovery.apply(&versioned);
    }

    /// Random bytes close to valid batches: existing kinds, small numbers.
    #[test]
    fn any_small_bytes_decode_or_return_an_error(bytes in prop::collection::vec(0_u8..36, 0..300)) {
        let mut versioned = vec![FORMAT];
        versioned.extend(bytes);
        _ = Recovery::default().apply(&versioned);
    }
}

#[test]
fn wrong_lengths_and_counts_are_errors() {
    let huge = [0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x01];
    let fault = |bytes: &[u8]| Recovery::default().apply(bytes).unwrap_err().text;
    assert_eq!(fault(&[]), "no changes");
    assert!(fault(&[FORMAT + 1]).starts_with("changes of a later format"));
    assert!(fault(&[FORMAT, 99, 0, 1]).starts_with("a change of a later kind"));
    let mut topic = vec![FORMAT, tag::RETAINED_REMOVED];
    topic.extend(huge);
    assert_eq!(fault(&topic), "the changes end within a change");
    let mut ids = vec![FORMAT, tag::MESSAGE, 0, 1, 1, 1, 1, b't', 0, 0];
    ids.extend(huge);
    ids.push(7);
    assert_eq!(fault(&ids), "the changes end within a change");
    let mut number = vec![FORMAT, tag::DETACH, 0, 1];
    number.extend([0xFF; 9]);
    number.push(2);
    assert_eq!(fault(&number), "a number is out of range");
    let long = [0x80, 0x80, 0x04];
    let mut topic = vec![FORMAT, tag::RETAINED_REMOVED];
    topic.extend(long);
    topic.resize(topic.len() + 0x1_0000, b'a');
    assert_eq!(fault(&topic), "a topic is too long");
    let shared = [FORMAT, tag::MESSAGE, 0, 1, 1, SAME_BYTES | 1, 0];
    assert_eq!(fault(&shared), "a message shares the bytes of none");
    assert_eq!(
        fault(&[FORMAT, tag::SENT, 0, 1, 1, 0]),
        "a packet identifier is out of range"
    );
    assert_eq!(
        fault(&[FORMAT, tag::EXPIRY, 0, 1, 0xFF, 0xFF, 0xFF, 0xFF, 0x1F]),
        "a number is out of range"
    );
}

#[test]
fn records_are_small() {
    let session = 3 << 32 | 200;
    let written = |part: Part<'_>| {
        let mut encoder = Encoder::default();
        encoder.write(&Change::Session(SessionId(session), part));
        encoder.len()
    };
    let number = 5000;
    assert!(written(Part::Removed(number)) <= 7);
    let packet_id = 300;
    assert!(written(Part::Sent { number, packet_id }) <= 9);
    let clock = Clock::now();
    let queued = |message: &Message, ids: &[u32]| Queued {
        message: message.clone(),
        subscription_ids: ids.into(),
        scope: Scope::Session,
        shared: None,
    };
    let message = Message::new("a/topic", vec![b'x'; 100], QoS::AtLeastOnce);
    let mut encoder = Encoder::default();
    encoder.message(SessionId(session), number, &queued(&message, &[1]), &clock);
    assert!(encoder.len() <= 7 + 100 + 14, "{}", encoder.len());
    let first = encoder.len();
    // The same message for another session: its bytes are not written again.
    let same = queued(&message, &[1]);
    encoder.message(SessionId(session + 1), number, &same, &clock);
    assert!(encoder.len() - first <= 10);
    // Equal bytes of another message are written again.
    let other = queued(&message.detached(), &[]);
    encoder.message(SessionId(session), number + 1, &other, &clock);
    assert!(encoder.len() - first > 100);
    let mut recovery = Recovery::default();
    for (session, client) in [(session, "a"), (session + 1, "b")] {
        let began = session_began(SessionId(session), client);
        recovery.apply(&began).unwrap();
    }
    recovery.apply(encoder.bytes()).unwrap();
    let other = &recovery.sessions[&SessionId(session + 1)].messages[&number];
    assert_eq!(
        other.content.as_ref().unwrap().message.payload,
        message.payload
    );
}
