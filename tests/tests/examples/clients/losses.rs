//! Lost connections and a killed store: no change of a watched key may be missing without a gap,
//! and a request has one effect.

use std::{process::Stdio, thread, time::Duration};

use serde_json::{Value, json};
use statehouse_tests::{
    Background, Mosquitto, Property, Proxy, Server, command,
    mosquitto::PERSISTENT,
    packet::kind,
    proxy::{Fate, Seen, Way},
    wait::until,
};

use super::driver::{Driver, LANGUAGES, Language, hex};

/// Values of the key, before and after the restart.
const CHANGES: u64 = 40;

fn set(key: &str, value: u64) -> Value {
    json!({"do": "set", "key": hex(key), "value": hex(value.to_string())})
}

/// The number in a value, from its hexadecimal form.
fn number(data: &Value) -> u64 {
    let text = data_encoding::HEXLOWER
        .decode(data.as_str().unwrap().as_bytes())
        .unwrap();
    String::from_utf8(text).unwrap().parse().unwrap()
}

#[test]
fn watch_over_a_killed_store_misses_no_change_without_a_gap() {
    for language in LANGUAGES {
        let mut server = Server::restartable(&[]);
        let url = format!("mqtt://{}", server.address());
        let connect = json!({"do": "connect", "url": url, "timeout_ms": 60_000});
        let [mut writer, mut reader] = [language; 2].map(Driver::start);
        writer.ask(connect.clone());
        reader.ask(connect);
        reader.ask(json!({"do": "watch", "key": hex("key")}));
        for value in 1..=CHANGES {
            writer.begin(set("key", value));
        }
        for value in 1..=CHANGES {
            let written = writer.end();
            assert_eq!(written["ok"]["applied"], true, "{language:?}: {written}");
            if value == CHANGES / 4 {
                server.kill_and_restart();
            }
        }
        let mut next = || {
            let next = json!({"do": "next", "key": hex("key"), "timeout_ms": 60_000});
            reader.ask(next)
        };
        // The changes before the gap.
        let mut last = 0;
        let gap = loop {
            let event = next();
            if event.get("gap").is_some() {
                break event;
            }
            assert_eq!(number(&event["data"]), last + 1, "{language:?}");
            last += 1;
        };
        assert!(last < CHANGES, "{language:?}: {gap} after all changes");
        // All changes are made, so a GET after the gap returns the last one. The changes after the
        // gap follow each other.
        writer.ask(set("key", CHANGES + 1));
        let mut last = None;
        while last != Some(CHANGES + 1) {
            let now = number(&next()["data"]);
            assert!(
                last.is_none_or(|last| now == last + 1),
                "{language:?}: {now} after {last:?}"
            );
            last = Some(now);
        }
    }
}

fn serve_behind(broker: &Mosquitto) -> Background {
    let mut serve = command(&["serve", "--broker", &broker.url()]);
    serve.current_dir(broker.directory()).stderr(Stdio::null());
    let store = Background::start(&mut serve);
    store.wait_for("ready");
    store
}

/// The broker restarts without its sessions, and the client is connected before the store.
#[test]
fn watch_waits_for_the_store_behind_a_restarted_broker() {
    for language in LANGUAGES {
        let mut broker = Mosquitto::start();
        let store = serve_behind(&broker);
        let mut reader = Driver::connect(language, broker.address());
        reader.ask(json!({"do": "watch", "key": hex("key")}));
        drop(store);
        broker.kill();
        broker.restart();
        // The broker has no subscriber for the registration of the watch.
        broker.wait_for_log("rc16)");
        let _store = serve_behind(&broker);
        let next = json!({"do": "next", "key": hex("key"), "timeout_ms": 60_000});
        let event = reader.ask(next);
        assert!(event.get("gap").is_some(), "{language:?}: {event}");
    }
}

/// Regression: one PUBACK of a rate limit ended the watch.
#[test]
fn watches_wait_for_the_rate_limit_after_a_restart() {
    const KEYS: [&str; 3] = ["one", "two", "three"];
    for language in LANGUAGES {
        let mut server = Server::restartable(&[]);
        let mut reader = Driver::connect(language, server.address());
        for key in KEYS {
            reader.ask(json!({"do": "watch", "key": hex(key)}));
        }
        server.kill();
        server.restart_with(&[("max_client_rate", "1")]);
        for key in KEYS {
            let next = json!({"do": "next", "key": hex(key), "timeout_ms": 60_000});
            let event = reader.ask(next);
            assert!(event.get("gap").is_some(), "{language:?} {key}: {event}");
        }
    }
}

/// Regression: Mosquitto does not save a session whose last connection began with Clean Start.
#[test]
fn session_survives_the_restart_of_a_persistent_broker() {
    for language in LANGUAGES {
        let mut broker = Mosquitto::with(PERSISTENT);
        let _store = serve_behind(&broker);
        let proxy = Proxy::start(broker.address());
        let mut store = Driver::connect(language, proxy.address());
        store.ask(set("key", 1));
        broker.stop();
        broker.restart();
        let resumed = || -> Vec<bool> {
            let seen = proxy.seen();
            let connacks = seen.iter().filter(|it| it.packet.kind() == kind::CONNACK);
            connacks.map(|it| it.packet.ack().session_present).collect()
        };
        until("the client connects again", || resumed().len() > 1);
        assert_eq!(resumed(), [false, true], "{language:?}");
        store.ask(set("key", 2));
    }
}

/// Regression: the broker had acknowledged the request, and lost its response with the session. The
/// client waited until its timeout. If the store executed the request again, SET NX would fail.
#[test]
fn request_is_resent_if_the_broker_loses_the_session() {
    for language in LANGUAGES {
        let mut broker = Mosquitto::start();
        let _store = serve_behind(&broker);
        let proxy = Proxy::start(broker.address());
        let mut store = Driver::connect(language, proxy.address());
        proxy.script(|seen| match (seen.way, seen.packet.kind()) {
            (Way::FromBroker, kind::PUBLISH) => Fate::Hold,
            _ => Fate::Pass,
        });
        let mut request = set("key", 1);
        request["nx"] = true.into();
        store.begin(request);
        until("PUBACK and response", || {
            let seen = proxy.seen();
            let is_puback =
                |it: &Seen| it.way == Way::FromBroker && it.packet.kind() == kind::PUBACK;
            proxy.held() == 1 && seen.iter().any(is_puback)
        });
        proxy.refuse(true);
        proxy.pass();
        broker.kill();
        broker.restart();
        // The store is there before the client.
        broker.wait_for_log("Sending SUBACK to");
        proxy.refuse(false);
        let result = store.end();
        assert_eq!(result["ok"]["applied"], true, "{language:?}: {result}");
    }
}

/// Regression: both libraries cannot read the PUBACK 0x95 of Mosquitto. paho resent the request for
/// ever, and MQTT.js read no further packet.
#[test]
fn request_refused_as_too_large_is_not_resent() {
    for language in LANGUAGES {
        let broker = Mosquitto::with(&["message_size_limit 1000"]);
        let _store = serve_behind(&broker);
        let proxy = Proxy::start(broker.address());
        let mut store = Driver::connect(language, proxy.address());
        let large = hex("x".repeat(2000));
        let refused = store.attempt(json!({"do": "set", "key": hex("key"), "value": large}));
        assert_eq!(refused["error"], "denied", "{language:?}: {refused}");
        store.ask(set("key", 1));
        assert_eq!(proxy.connections(), 2, "{language:?}");
    }
}

/// The connection ends before the response to a SET NX. If the store took the resent request for
/// another one, it would refuse it, since the key exists.
#[test]
fn resent_request_gets_the_response_of_its_first_delivery() {
    for language in LANGUAGES {
        let server = Server::start();
        let proxy = Proxy::start(server.address());
        let mut store = Driver::connect(language, proxy.address());
        let mut lost = 0;
        proxy.script(move |seen| {
            let is_response = seen.way == Way::FromBroker && seen.packet.kind() == kind::PUBLISH;
            lost += usize::from(is_response);
            match is_response && lost == 1 {
                true => Fate::CutBefore,
                false => Fate::Pass,
            }
        });
        let mut request = set("key", 1);
        request["nx"] = true.into();
        let result = store.ask(request);
        assert_eq!(result["applied"], true, "{language:?}: {result}");
        assert_eq!(proxy.connections(), 2, "{language:?}");
        // The session repeats the response, so it may arrive before the store gets the duplicate.
        until("the duplicate", || server.metric("duplicates_total") == 1);
    }
}

/// Regression: the JavaScript client gave each resent request its whole time again.
#[test]
fn resent_request_expires_with_its_timeout() {
    for language in LANGUAGES {
        let server = Server::start();
        let proxy = Proxy::start(server.address());
        let mut store = Driver::connect(language, proxy.address());
        proxy.script(|seen| match (seen.connection, seen.packet.kind()) {
            (0, kind::PUBLISH) => Fate::Hold,
            _ => Fate::Pass,
        });
        store.begin(set("key", 1));
        until("the request", || proxy.held() == 1);
        thread::sleep(Duration::from_millis(2500));
        proxy.cut();
        assert_eq!(store.end()["ok"]["applied"], true, "{language:?}");
        let seen = proxy.seen().into_iter();
        let requests =
            seen.filter(|it| it.way == Way::ToBroker && it.packet.kind() == kind::PUBLISH);
        let properties = requests.flat_map(|it| it.packet.publish().properties);
        let expiries: Vec<u32> = properties
            .filter_map(|it| match it {
                Property::MessageExpiry(seconds) => Some(seconds),
                _ => None,
            })
            .collect();
        // The timeout is 30 s.
        let fits = matches!(expiries[..], [30, 1..=28]);
        assert!(fits, "{language:?}: {expiries:?}");
    }
}

/// Regression: the JavaScript client waited for ever for the SUBACK, and called a connection that
/// was lost before it a refusal.
#[test]
fn connection_without_a_suback_is_not_usable() {
    let server = Server::start();
    for language in LANGUAGES {
        for fate in [Fate::Hold, Fate::CutBefore] {
            let proxy = Proxy::start(server.address());
            proxy.script(move |seen| match seen.packet.kind() {
                kind::SUBACK => fate,
                _ => Fate::Pass,
            });
            let url = format!("mqtt://{}", proxy.address());
            let connect = json!({"do": "connect", "url": url, "timeout_ms": 1500});
            let failed = Driver::start(language).attempt(connect);
            let code = &failed["error"];
            assert_eq!(code, "transport", "{language:?}, {fate:?}: {failed}");
        }
    }
}

/// Regression: MQTT.js waited for the acknowledgement of an earlier request, and stayed connected
/// for ever.
#[test]
fn client_that_is_closed_while_it_reconnects_is_disconnected() {
    for language in LANGUAGES {
        let server = Server::start();
        let proxy = Proxy::start(server.address());
        let mut store = Driver::connect(language, proxy.address());
        proxy.script(|seen| match (seen.connection, seen.packet.kind()) {
            (0, kind::PUBACK) | (1.., kind::CONNACK) if seen.way == Way::FromBroker => Fate::Hold,
            _ => Fate::Pass,
        });
        store.ask(set("key", 1));
        until("the PUBACK", || proxy.held() == 1);
        proxy.cut();
        until("the CONNACK", || proxy.held() == 2);
        store.ask(json!({"do": "close"}));
        proxy.pass();
        proxy.release(|_| {});
        until(&format!("{language:?} disconnects"), || {
            server.metric("connections") == 0
        });
    }
}

/// A store that is the broker recognizes a duplicate within one session only.
#[test]
fn session_outlives_the_longest_request() {
    for language in LANGUAGES {
        let server = Server::start();
        let proxy = Proxy::start(server.address());
        let url = format!("mqtt://{}", proxy.address());
        let mut store = Driver::start(language);
        store.ask(json!({"do": "connect", "url": url, "timeout_ms": 119_500}));
        let seen = proxy.seen();
        let connect = seen.iter().find(|it| it.packet.kind() == kind::CONNECT);
        // The property Session Expiry Interval, in seconds.
        let expiry: [u8; 5] = [0x11, 0, 0, 0, 120];
        let bytes = connect.unwrap().packet.bytes();
        assert!(bytes.windows(5).any(|it| it == expiry), "{language:?}");
    }
}

/// A request whose caller gave up while it waited behind others must not take effect on the same
/// connection. Mosquitto takes a message expiry of 0 for none.
#[test]
fn queued_request_does_not_take_effect_after_its_timeout() {
    let server = Server::start();
    let broker = Mosquitto::start();
    let _store = serve_behind(&broker);
    for address in [server.address(), broker.address()] {
        let proxy = Proxy::start(address);
        let url = format!("mqtt://{}", proxy.address());
        let mut store = Driver::start(Language::Python);
        // The client sends one request at a time.
        store.ask(json!({"do": "connect", "url": url, "timeout_ms": 1500, "in_flight": 1}));
        proxy.script(|seen| match seen.packet.kind() == kind::PUBLISH {
            true => Fate::Hold,
            false => Fate::Pass,
        });
        for key in ["sent", "queued"] {
            let failed = store.attempt(set(key, 1));
            assert_eq!(failed["error"], "timeout", "{key}: {failed}");
        }
        assert_eq!(proxy.held(), 1, "the second request does not wait");
        proxy.pass();
        proxy.release(|_| {});
        while store.attempt(set("later", 1)).get("error").is_some() {
            thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(proxy.connections(), 1);
        let queued = store.ask(json!({"do": "get", "key": hex("queued")}));
        assert_eq!(queued, Value::Null);
    }
}

/// A request whose caller gave up must not take effect on a later connection: neither one that was
/// sent and not acknowledged, nor one that was made without a connection.
#[test]
fn abandoned_request_does_not_take_effect_later() {
    for language in LANGUAGES {
        let server = Server::start();
        let proxy = Proxy::start(server.address());
        let url = format!("mqtt://{}", proxy.address());
        let mut store = Driver::start(language);
        store.ask(json!({"do": "connect", "url": url, "timeout_ms": 1500}));
        proxy.script(|seen| match seen.packet.kind() == kind::PUBLISH {
            true => Fate::Hold,
            false => Fate::Pass,
        });
        let failed = store.attempt(set("sent", 1));
        assert_eq!(failed["error"], "timeout", "{language:?}: {failed}");
        assert_eq!(proxy.held(), 1, "{language:?}");
        proxy.refuse(true);
        proxy.pass();
        proxy.cut();
        let failed = store.attempt(set("unsent", 1));
        assert_eq!(failed["error"], "transport", "{language:?}: {failed}");
        proxy.refuse(false);
        while store.attempt(set("later", 1)).get("error").is_some() {
            thread::sleep(Duration::from_millis(50));
        }
        let mut other = server.store("other");
        assert_eq!(other.get("sent"), None, "{language:?}");
        assert_eq!(other.get("unsent"), None, "{language:?}");
    }
}
