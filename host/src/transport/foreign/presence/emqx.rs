//! EMQX's client events, which it publishes under `$SYS/brokers/NODE/clients/ID/`.
//!
//! What enters: events. What leaves: signs of who came and who has gone. In a cluster an event may come late, from the
//! node that a client left: what ended before its present connection began is no sign. The end of a connection that the
//! same client took over is none either, since which of the two events comes first is open; the watches of the old
//! connection then go on with the new one.
//!
//! EMQX lets everybody publish under `$SYS/` who may publish everywhere: its rules have to forbid it, or a client can
//! tell of another that it has gone.

use std::borrow::Cow;
use std::collections::HashMap;

use serde::Deserialize;

use super::{Sign, Source};
use crate::limits;

/// Where all of its topics begin.
const BROKERS: &str = "$SYS/brokers/";

/// Retained, so that it shows at once whether this is EMQX.
const VERSION: &str = "$SYS/brokers/+/version";

/// How the end of a connection is called that the same client took over: with its session, or without.
const TAKEN_OVER: [&str; 3] = ["takenover", "takeovered", "discarded"];

/// The source.
#[derive(Default)]
pub struct Emqx {
    /// When the present connections of clients began, in milliseconds of the node's clock.
    since: HashMap<blake3::Hash, u64>,
}

/// An event, as far as it matters.
#[derive(Deserialize)]
struct Event<'a> {
    #[serde(borrow)]
    clientid: Cow<'a, str>,
    #[serde(borrow, default)]
    username: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    reason: Option<Cow<'a, str>>,
    connected_at: Option<u64>,
    disconnected_at: Option<u64>,
}

impl Source for Emqx {
    fn name(&self) -> &'static str {
        "EMQX's client events"
    }

    fn filters(&self) -> &'static [&'static str] {
        // A client id may have slashes.
        &[VERSION, "$SYS/brokers/+/clients/#"]
    }

    fn version(&self) -> &'static str {
        VERSION
    }

    fn read(&mut self, topic: &str, payload: &[u8], sign: &mut dyn FnMut(Sign<'_>)) {
        let Some((_node, topic)) = topic
            .strip_prefix(BROKERS)
            .and_then(|topic| topic.split_once('/'))
        else {
            return;
        };
        if topic == "version" {
            sign(Sign::Works);
            return;
        }
        let Some((client, event)) = topic
            .strip_prefix("clients/")
            .and_then(|topic| topic.rsplit_once('/'))
        else {
            return;
        };
        if payload.len() > limits::PRESENCE_EVENT_BYTES_MAX {
            return;
        }
        let Ok(said) = serde_json::from_slice::<Event<'_>>(payload) else {
            return;
        };
        if said.clientid != client {
            return;
        }
        sign(Sign::Works);
        match event {
            "connected" => {
                self.came(client, said.connected_at);
                // What Erlang prints for a user name that there is not.
                let user = said.username.as_deref().filter(|it| *it != "undefined");
                sign(Sign::Came { client, user });
            }
            "disconnected" if self.gone(client, &said) => sign(Sign::Gone(client)),
            _ => {}
        }
    }
}

impl Emqx {
    fn came(&mut self, client: &str, at: Option<u64>) {
        let Some(at) = at else { return };
        if self.since.len() >= limits::PRESENCE_CLIENTS_MAX {
            // From here on a late event counts, until the clients connect again.
            self.since.clear();
        }
        let since = self.since.entry(key(client)).or_default();
        *since = (*since).max(at);
    }

    /// Whether this is the end of the client's present connection.
    fn gone(&mut self, client: &str, said: &Event<'_>) -> bool {
        let reason = said.reason.as_deref().unwrap_or_default();
        if TAKEN_OVER.contains(&reason) {
            return false;
        }
        // Version 4 does not say when the connection began that ended.
        let of = said.connected_at.or(said.disconnected_at);
        let key = key(client);
        if let (Some(since), Some(of)) = (self.since.get(&key), of)
            && of < *since
        {
            return false;
        }
        self.since.remove(&key);
        true
    }
}

/// As long as a client id may be, what is kept of it is short.
fn key(client: &str) -> blake3::Hash {
    blake3::hash(client.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(signs: &mut Vec<String>) -> impl FnMut(Sign<'_>) {
        |sign| {
            signs.push(match sign {
                Sign::Works => return,
                Sign::Gone(client) => format!("-{client}"),
                Sign::Came { client, user } => format!("+{client}/{}", user.unwrap_or_default()),
            });
        }
    }

    fn connected(client: &str, at: u64) -> (String, String) {
        let payload = format!(r#"{{"clientid":"{client}","connected_at":{at}}}"#);
        (
            format!("$SYS/brokers/emqx@10.0.0.1/clients/{client}/connected"),
            payload,
        )
    }

    fn disconnected(client: &str, of: u64, reason: &str) -> (String, String) {
        let payload =
            format!(r#"{{"clientid":"{client}","connected_at":{of},"reason":"{reason}"}}"#);
        (
            format!("$SYS/brokers/emqx@10.0.0.2/clients/{client}/disconnected"),
            payload,
        )
    }

    fn signs(events: &[(String, String)]) -> Vec<String> {
        let mut source = Emqx::default();
        let mut signs = Vec::new();
        let mut note = note(&mut signs);
        for (topic, payload) in events {
            source.read(topic, payload.as_bytes(), &mut note);
        }
        drop(note);
        signs
    }

    /// The examples of EMQX's documentation, of versions 4 and 5.
    #[test]
    fn events_of_both_versions_are_read() {
        let topic = |event| format!("$SYS/brokers/emqx@127.0.0.1/clients/emqtt-8348/{event}");
        let seen = signs(&[
            (
                topic("connected"),
                r#"{"username":"foo","ts":1625572213873,"sockport":1883,"proto_ver":4,"proto_name":"MQTT",
                    "keepalive":60,"ipaddress":"127.0.0.1","expiry_interval":0,"connected_at":1625572213873,
                    "connack":0,"clientid":"emqtt-8348","clean_start":true}"#
                    .into(),
            ),
            (
                topic("disconnected"),
                r#"{"username":"foo","ts":1625572213873,"sockport":1883,"reason":"tcp_closed","proto_ver":4,
                    "proto_name":"MQTT","ipaddress":"127.0.0.1","disconnected_at":1625572213873,
                    "clientid":"emqtt-8348"}"#
                    .into(),
            ),
            (
                topic("connected"),
                r#"{"clientid":"emqtt-8348","username":"undefined","ipaddress":"127.0.0.1","sockport":1883,
                    "protocol":"mqtt","proto_name":"MQTT","proto_ver":5,"connected_at":1625572214000,
                    "ts":1625572214001,"keepalive":60,"clean_start":true,"expiry_interval":0}"#
                    .into(),
            ),
            (
                topic("disconnected"),
                r#"{"clientid":"emqtt-8348","username":"undefined","ipaddress":"127.0.0.1","sockport":1883,
                    "protocol":"mqtt","proto_name":"MQTT","proto_ver":5,"connected_at":1625572214000,
                    "ts":1625572215001,"reason":"keepalive_timeout","disconnected_at":1625572215000}"#
                    .into(),
            ),
        ]);
        assert_eq!(
            seen,
            [
                "+emqtt-8348/foo",
                "-emqtt-8348",
                "+emqtt-8348/",
                "-emqtt-8348"
            ]
        );
    }

    #[test]
    fn a_late_end_does_not_end_the_connection_that_came_since() {
        let late = [
            connected("a", 10),
            connected("a", 20),
            disconnected("a", 10, "tcp_closed"),
            disconnected("a", 20, "normal"),
        ];
        assert_eq!(signs(&late), ["+a/", "+a/", "-a"]);
        // Version 4 says when it ended only.
        let mut four = disconnected("a", 0, "tcp_closed");
        four.1 = r#"{"clientid":"a","disconnected_at":15,"reason":"tcp_closed"}"#.into();
        assert_eq!(signs(&[connected("a", 20), four]), ["+a/"]);
    }

    #[test]
    fn a_connection_that_was_taken_over_is_no_end_of_its_client() {
        for reason in TAKEN_OVER {
            let seen = signs(&[
                connected("a", 10),
                disconnected("a", 10, reason),
                connected("a", 20),
            ]);
            assert_eq!(seen, ["+a/", "+a/"], "{reason}");
        }
        // Somebody with the right to do so has ended it.
        let seen = signs(&[connected("a", 10), disconnected("a", 10, "kicked")]);
        assert_eq!(seen, ["+a/", "-a"]);
    }

    #[test]
    fn who_connected_before_the_store_did_can_go() {
        assert_eq!(signs(&[disconnected("a", 10, "normal")]), ["-a"]);
    }

    #[test]
    fn slashes_in_a_client_id_name_nobody_else() {
        let id = "victim/disconnected/x";
        assert_eq!(signs(&[disconnected(id, 1, "normal")]), [format!("-{id}")]);
        let mut other = disconnected("victim", 1, "normal");
        other.0 = "$SYS/brokers/n/clients/x/victim/disconnected".into();
        assert_eq!(signs(&[other]), Vec::<String>::new());
    }

    #[test]
    fn what_is_no_event_says_nothing() {
        let topic = "$SYS/brokers/n/clients/a/disconnected";
        let long = format!(
            r#"{{"clientid":"a","ipaddress":"{}"}}"#,
            "1".repeat(limits::PRESENCE_EVENT_BYTES_MAX)
        );
        let nested = format!(r#"{{"clientid":"a","x":{}"#, "[".repeat(5000));
        for (topic, payload) in [
            (topic, ""),
            (topic, "{}"),
            (topic, r#"{"clientid":7}"#),
            (topic, r#"{"clientid":"b"}"#),
            (topic, &long),
            (topic, &nested),
            ("$SYS/brokers/n/clients/a/subscribed", r#"{"clientid":"a"}"#),
            ("$SYS/brokers/clients/a/disconnected", r#"{"clientid":"a"}"#),
            ("$SYS/broker/clients/a/disconnected", r#"{"clientid":"a"}"#),
        ] {
            let seen = signs(&[(topic.to_owned(), payload.to_owned())]);
            assert_eq!(seen, Vec::<String>::new(), "{topic} {payload:.80}");
        }
    }

    #[test]
    fn what_is_remembered_of_clients_is_bounded() {
        let mut source = Emqx::default();
        let mut ignore = |_: Sign<'_>| {};
        for n in 0..=limits::PRESENCE_CLIENTS_MAX {
            let (topic, payload) = connected(&format!("c{n}"), 10);
            source.read(&topic, payload.as_bytes(), &mut ignore);
        }
        assert_eq!(source.since.len(), 1);
    }

    #[test]
    fn its_version_shows_that_it_is_there() {
        let mut works = 0;
        let mut source = Emqx::default();
        source.read("$SYS/brokers/emqx@a/version", b"5.8.0", &mut |sign| {
            assert_eq!(sign, Sign::Works);
            works += 1;
        });
        assert_eq!(works, 1);
    }
}
