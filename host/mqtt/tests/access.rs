//! Access control by the embedder: connecting, publishing and subscribing with raw clients over
//! streams.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

mod common;

use std::{
    collections::HashSet,
    future::pending,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use common::*;
use statehouse_mqtt::{
    Access, Admission, Attempt, Broker, Deciding, Identity, Limits, Message, NoService, Options,
    Origin, QoS, ReasonCode, Refusal, RefusalCount, Refused, Verdict,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use wire::{
    ConnectReturnCode, DisconnectReasonCode as Reason, LastWill, Login, Packet, PubAckReason,
    SubscribeReasonCode,
};

/// Admits the password `right`, never decides about `slow`, and takes tokens `USER MILLISECONDS`.
#[derive(Default)]
struct Rules {
    attempts: Mutex<Vec<Attempt>>,
    forbidden: Mutex<HashSet<String>>,
    /// What the broker refused without this access control, and the client ids.
    refused: Mutex<Vec<String>>,
}

impl Rules {
    fn broker(limits: Limits) -> (Broker, Arc<Self>) {
        let rules = Arc::new(Self::default());
        let options = Options {
            limits,
            access: rules.clone(),
            ..Options::default()
        };
        (Broker::new(options, Arc::new(NoService)), rules)
    }

    fn forbid(&self, what: &str) {
        self.forbidden.lock().unwrap().insert(what.to_owned());
    }

    fn allows(&self, what: &str, name: &[u8]) -> bool {
        let name = String::from_utf8_lossy(name);
        !(self.forbidden.lock().unwrap()).contains(&format!("{what} {name}"))
    }
}

fn user(name: &str) -> Arc<Identity> {
    Arc::new(Identity {
        user: Some(name.into()),
        ..Identity::default()
    })
}

impl Access for Rules {
    fn admit(&self, attempt: Attempt) -> Deciding {
        self.attempts.lock().unwrap().push(attempt.clone());
        Box::pin(async move {
            if let Some(token) = &attempt.enhanced {
                let text = String::from_utf8(token.data.to_vec()).unwrap();
                let Some((name, ms)) = text.split_once(' ') else {
                    return Verdict::Refuse(ReasonCode::BAD_USER_NAME_OR_PASSWORD, "no token");
                };
                let expires = Instant::now() + Duration::from_millis(ms.parse().unwrap());
                return Verdict::Admit(Admission {
                    identity: user(name),
                    expires: Some(expires),
                });
            }
            match attempt.password.as_deref() {
                Some(b"right") => Verdict::admit(user(attempt.user.as_deref().unwrap_or("-"))),
                Some(b"slow") => pending().await,
                _ => Verdict::Refuse(ReasonCode::BAD_USER_NAME_OR_PASSWORD, "wrong password"),
            }
        })
    }

    fn may_connect(&self, who: &Origin) -> bool {
        self.allows("connect", who.client.as_bytes())
    }

    fn may_publish(&self, _: &Origin, topic: &[u8]) -> bool {
        self.allows("publish", topic)
    }

    fn may_subscribe(&self, _: &Origin, filter: &[u8]) -> bool {
        self.allows("subscribe", filter)
    }

    fn refused(&self, refusal: &Refusal<'_>) {
        let refused = format!("{} {}", refusal.what.name(), refusal.client);
        self.refused.lock().unwrap().push(refused);
    }
}

fn hello(client: &str, password: &str, will: Option<&str>) -> Packet {
    let connect = greeting(client, false, 1000, 60);
    let will = will.map(|topic| LastWill::new(topic, "will", Q::AtMostOnce, false, None));
    Packet::Connect(connect, will, Some(Login::new("user", password)))
}

fn token(client: &str, token: &str) -> Packet {
    let mut connect = greeting(client, false, 0, 60);
    let properties = connect.properties.as_mut().unwrap();
    properties.authentication_method = Some("K8S-SAT".to_owned());
    properties.authentication_data = Some(token.to_owned().into());
    Packet::Connect(connect, None, None)
}

/// An AUTH packet (section 3.15), which rumqttc can neither decode nor build.
fn auth(reason: u8, method: &str, data: &str) -> Vec<u8> {
    let mut properties = Vec::new();
    for (id, value) in [(0x15, method), (0x16, data)] {
        properties.extend([id, 0, value.len() as u8]);
        properties.extend(value.as_bytes());
    }
    let length = properties.len() as u8;
    let mut packet = vec![0xF0, length + 2, reason, length];
    packet.extend(properties);
    packet
}

const CONTINUE: u8 = 0x18;
const REAUTHENTICATE: u8 = 0x19;

async fn connected(broker: &Broker, hello: Packet) -> Client<DuplexStream> {
    let mut client = Client::duplex(broker, 1 << 16);
    client.send(&[hello]).await;
    assert_eq!(client.connack().await.code, ConnectReturnCode::Success);
    client
}

async fn refused(broker: &Broker, hello: Packet) -> (ConnectReturnCode, Option<String>) {
    let mut client = Client::duplex(broker, 1 << 16);
    client.send(&[hello]).await;
    let ack = client.connack().await;
    assert_eq!(client.rest().await, []);
    (ack.code, ack.properties.and_then(|it| it.reason_string))
}

#[tokio::test]
async fn refused_client_gets_a_reason_and_affects_no_other() {
    let (broker, rules) = Rules::broker(Limits::default());
    let mut owner = connected(&broker, hello("a", "right", None)).await;
    let (code, why) = refused(&broker, hello("a", "wrong", None)).await;
    assert_eq!(code, ConnectReturnCode::BadUserNamePassword);
    assert_eq!(why.as_deref(), Some("wrong password"));
    // The password is right, but the user may not use this client id. The broker must check this
    // before a takeover.
    rules.forbid("connect a");
    let (code, _) = refused(&broker, hello("a", "right", None)).await;
    assert_eq!(code, ConnectReturnCode::NotAuthorized);
    rules.forbid("publish wills");
    let (code, _) = refused(&broker, hello("b", "right", Some("wills"))).await;
    assert_eq!(code, ConnectReturnCode::NotAuthorized);
    owner.ping().await;
    assert_eq!(broker.stats().sessions, 1);
}

#[tokio::test]
async fn access_control_gets_credentials_as_sent() {
    let (broker, rules) = Rules::broker(Limits::default());
    // A password without a user name (section 3.1.2.9).
    let mut client = Client::duplex(&broker, 4096);
    let connect = b"\x10\x15\0\x04MQTT\x05\x42\0\x3c\0\0\x01p\0\x05right";
    client.stream.write_all(connect).await.unwrap();
    assert_eq!(client.connack().await.code, ConnectReturnCode::Success);
    drop(connected(&broker, token("t", "anna 60000")).await);
    let attempts = rules.attempts.lock().unwrap();
    assert_eq!((&*attempts[0].client, &attempts[0].user), ("p", &None));
    assert_eq!(attempts[0].password.as_deref(), Some(&b"right"[..]));
    assert_eq!(attempts[0].door.peer, PEER);
    let token = attempts[1].enhanced.as_ref().unwrap();
    assert_eq!(
        (&*token.method, &*token.data),
        ("K8S-SAT", &b"anna 60000"[..])
    );
    // `Debug` must not print secrets into logs.
    let logged = format!("{attempts:?}");
    assert!(
        !logged.contains("right") && !logged.contains("anna"),
        "{logged}"
    );
}

#[tokio::test(start_paused = true)]
async fn pending_admissions_are_bounded_in_number_and_time() {
    let (broker, rules) = Rules::broker(Limits {
        admissions_max: 2,
        ..Limits::default()
    });
    let began = tokio::time::Instant::now();
    let mut waiting = Vec::new();
    for client in ["a", "b"] {
        let mut it = Client::duplex(&broker, 4096);
        it.send(&[hello(client, "slow", None)]).await;
        waiting.push(it);
    }
    tokio::time::sleep(Duration::from_millis(1)).await;
    let (code, _) = refused(&broker, hello("c", "slow", None)).await;
    assert_eq!(code, ConnectReturnCode::ServerBusy);
    // Clients that are decided at once need no permit.
    drop(connected(&broker, hello("d", "right", None)).await);
    let (code, _) = refused(&broker, hello("e", "wrong", None)).await;
    assert_eq!(code, ConnectReturnCode::BadUserNamePassword);
    for mut client in waiting {
        assert_eq!(client.connack().await.code, ConnectReturnCode::ServerBusy);
    }
    // One was refused at once, and two were not decided in time.
    let all = RefusalCount {
        what: Refused::Connect,
        reason: ReasonCode::SERVER_BUSY,
        count: 3,
    };
    assert!(broker.refusals().contains(&all), "{:?}", broker.refusals());
    assert_eq!(
        *rules.refused.lock().unwrap(),
        ["connect c", "connect a", "connect b"]
    );
    assert!(began.elapsed() <= Limits::default().connect_timeout + Duration::from_secs(1));
    drop(connected(&broker, hello("c", "right", None)).await);
}

#[tokio::test]
async fn forbidden_topics_and_filters_are_refused_singly() {
    let (broker, rules) = Rules::broker(Limits::default());
    let mut client = connected(&broker, hello("a", "right", None)).await;
    rules.forbid("publish t/no");
    rules.forbid("subscribe t/+");
    let subscribe = subscribe_to(&["t/+", "t/yes", "t/no"], Q::AtMostOnce);
    client.send(&[subscribe]).await;
    let Some(Packet::SubAck(ack)) = client.next().await else {
        panic!("no SUBACK")
    };
    let granted = SubscribeReasonCode::Success(Q::AtMostOnce);
    assert_eq!(
        ack.return_codes,
        [SubscribeReasonCode::NotAuthorized, granted, granted]
    );
    client
        .send(&[
            publish("t/no", Q::AtMostOnce, 0, "lost"),
            publish("t/no", Q::AtLeastOnce, 2, "refused"),
            publish("t/yes", Q::AtLeastOnce, 3, "taken"),
        ])
        .await;
    let mut reasons = Vec::new();
    let mut payloads = Vec::new();
    while reasons.len() < 2 || payloads.is_empty() {
        match client.next().await.unwrap() {
            Packet::PubAck(ack) => reasons.push((ack.pkid, ack.reason)),
            Packet::Publish(publish) => payloads.push(publish.payload),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(
        reasons,
        [(2, PubAckReason::NotAuthorized), (3, PubAckReason::Success)]
    );
    assert_eq!(payloads, ["taken"]);
}

#[tokio::test]
async fn session_resumes_for_its_user_and_restarts_for_another() {
    let (broker, _) = Rules::broker(Limits::default());
    let hello = |user: &str| {
        let connect = greeting("shared", false, 1000, 60);
        Packet::Connect(connect, None, Some(Login::new(user, "right")))
    };
    let connect_as = async |user: &str| {
        let mut client = Client::duplex(&broker, 4096);
        client.send(&[hello(user)]).await;
        let present = client.connack().await.session_present;
        (client, present)
    };
    let (mut anna, present) = connect_as("anna").await;
    assert!(!present);
    anna.listen_to("secret", Q::AtLeastOnce).await;
    // Anna resumes her session: first while connected, then after disconnecting.
    let (anna, present) = connect_as("anna").await;
    assert!(present);
    drop(anna);
    broker.batch(|batch| batch.publish(Message::new("secret", "for anna", QoS::AtLeastOnce)));
    let (mut bert, present) = connect_as("bert").await;
    assert!(!present);
    bert.ping().await;
    assert_eq!(broker.stats().subscriptions, 0);
    bert.listen_to("secret", Q::AtLeastOnce).await;
    // Anna does not get Bert's session either, and Bert's connection ends.
    let (_anna, present) = connect_as("anna").await;
    assert!(!present);
    assert_eq!(bert.disconnected().await, Some(Reason::SessionTakenOver));
    assert_eq!(broker.stats().subscriptions, 0);
    assert_eq!(broker.stats().sessions, 1);
}

#[tokio::test]
async fn revoked_rights_end_connections_and_subscriptions() {
    let (broker, rules) = Rules::broker(Limits::default());
    let mut watcher = connected(&broker, hello("watcher", "right", None)).await;
    watcher.listen_to("secret/+", Q::AtLeastOnce).await;
    watcher.listen_to("wills", Q::AtLeastOnce).await;
    let mut leaver = connected(&broker, hello("leaver", "right", Some("wills"))).await;
    let mut absent = connected(&broker, hello("absent", "right", None)).await;
    absent.listen_to("secret/+", Q::AtLeastOnce).await;
    drop(absent);
    until(|| broker.stats().connections <= 2).await;
    for forbidden in ["subscribe secret/+", "connect leaver", "publish wills"] {
        rules.forbid(forbidden);
    }
    broker.recheck();
    assert_eq!(leaver.disconnected().await, Some(Reason::NotAuthorized));
    // The watcher gets neither a message of the suspended subscription nor the forbidden will.
    watcher
        .send(&[publish("secret/1", Q::AtLeastOnce, 2, "x")])
        .await;
    watcher.send(&[Packet::PingReq(wire::PingReq)]).await;
    assert!(matches!(watcher.next().await, Some(Packet::PubAck(_))));
    assert_eq!(watcher.next().await, Some(Packet::PingResp(wire::PingResp)));
    // The subscription of a session that was disconnected at the recheck is suspended when the
    // session is resumed.
    let before = broker.stats().subscriptions;
    let absent = connected(&broker, hello("absent", "right", None)).await;
    assert_eq!(broker.stats().subscriptions, before - 1);
    drop(absent);
}

#[tokio::test]
async fn client_that_stays_loses_a_forbidden_will() {
    let (broker, rules) = Rules::broker(Limits::default());
    let mut watcher = connected(&broker, hello("watcher", "right", None)).await;
    watcher.listen_to("#", Q::AtLeastOnce).await;
    let forbidden = connected(&broker, hello("a", "right", Some("wills/a"))).await;
    let allowed = connected(&broker, hello("b", "right", Some("wills/b"))).await;
    rules.forbid("publish wills/a");
    broker.recheck();
    assert_eq!(broker.stats().connections, 3);
    drop(forbidden);
    until(|| broker.stats().connections <= 2).await;
    drop(allowed);
    let will = watcher.message().await;
    assert_eq!(will.topic, "wills/b");
}

#[tokio::test]
async fn connection_ends_at_expiry_unless_credentials_are_renewed() {
    let (broker, _) = Rules::broker(Limits::default());
    let mut client = Client::duplex(&broker, 4096);
    client.send(&[token("a", "anna 400")]).await;
    let ack = client.connack().await;
    let method = ack.properties.unwrap().authentication_method;
    assert_eq!(method.as_deref(), Some("K8S-SAT"));
    let renewal = auth(REAUTHENTICATE, "K8S-SAT", "anna 60000");
    client.stream.write_all(&renewal).await.unwrap();
    client.send(&[Packet::PingReq(wire::PingReq)]).await;
    let mut renewed = [0; 14];
    client.stream.read_exact(&mut renewed).await.unwrap();
    assert_eq!(&renewed, b"\xf0\x0c\0\x0a\x15\0\x07K8S-SAT");
    assert_eq!(client.next().await, Some(Packet::PingResp(wire::PingResp)));
    tokio::time::sleep(Duration::from_millis(500)).await;
    client.ping().await;

    let mut lazy = connected(&broker, token("b", "anna 300")).await;
    let began = Instant::now();
    assert_eq!(lazy.disconnected().await, Some(Reason::NotAuthorized));
    assert!(began.elapsed() >= Duration::from_millis(200));
}

#[tokio::test]
async fn invalid_reauthentication_ends_the_connection() {
    let (broker, _) = Rules::broker(Limits::default());
    let wrong = Reason::NotAuthorized;
    let protocol = Reason::ProtocolError;
    for (reason, method, data, expected) in [
        (REAUTHENTICATE, "K8S-SAT", "nonsense", wrong),
        // A valid token of another user.
        (REAUTHENTICATE, "K8S-SAT", "bert 60000", wrong),
        (REAUTHENTICATE, "SCRAM", "anna 60000", protocol),
        (CONTINUE, "K8S-SAT", "anna 60000", protocol),
    ] {
        let mut client = connected(&broker, token("a", "anna 60000")).await;
        let renewal = auth(reason, method, data);
        client.stream.write_all(&renewal).await.unwrap();
        let ended = client.disconnected().await;
        assert_eq!(ended, Some(expected), "{reason:#x} {method} {data}");
    }
    // A client that connected without an authentication method.
    let mut client = connected(&broker, hello("a", "right", None)).await;
    let renewal = auth(REAUTHENTICATE, "K8S-SAT", "anna 60000");
    client.stream.write_all(&renewal).await.unwrap();
    assert_eq!(client.disconnected().await, Some(protocol));
}
