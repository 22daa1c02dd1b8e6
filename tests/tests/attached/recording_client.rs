//! A client of the broker that records all answers and notifications.
//!
//! Behind a foreign broker, answers and notifications may arrive more than once. All answers to one
//! change must be equal: a second effect would have another version. A redelivered read is executed
//! again, so its answers may differ.

use std::{
    collections::{HashMap, HashSet},
    net::SocketAddr,
    time::{Duration, Instant},
};

use statehouse_tests::{
    Client, Connect, Heard, Hlc, Packet, Publish, Request, Store,
    client::PATIENCE,
    packet::kind,
    store::{NOTIFICATION_PREFIX, hex, version},
};

/// The content of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecordedAnswer {
    /// The RESP bytes, escaped.
    pub(crate) text: String,
    pub(crate) version: Option<Hlc>,
}

/// A client with a session that outlives its connections.
pub(crate) struct RecordingClient {
    pub(crate) store: Store,
    address: SocketAddr,
    /// The first answer to each request, by correlation data.
    answers: HashMap<Vec<u8>, RecordedAnswer>,
    /// Correlation data of reads, which may have different answers.
    reads: HashSet<Vec<u8>>,
    /// The number of duplicate answers to changes.
    pub(crate) repeated: usize,
    /// All notifications in order of arrival, with duplicates.
    pub(crate) notifications: Vec<Publish>,
}

/// The CONNECT of a session that expires after the longest test.
fn connect(id: &str) -> Connect {
    Connect::resume(id, 3600)
}

impl RecordingClient {
    /// Starts a new session. The broker must not have one with this id.
    pub(crate) fn begin(address: SocketAddr, id: &str) -> RecordingClient {
        let client = Client::connect(address, &connect(id));
        assert!(!client.session_present(), "{id} had a session");
        RecordingClient {
            store: Store::behind(client, id),
            address,
            answers: HashMap::new(),
            reads: HashSet::new(),
            repeated: 0,
            notifications: Vec::new(),
        }
    }

    /// Connects again. Returns whether the broker still had the session.
    pub(crate) fn resume(&mut self) -> bool {
        // These packets are acknowledged already, so the broker does not send them again.
        for packet in self.store.client.drain() {
            self.take(&packet);
        }
        let client = Client::connect(self.address, &connect(&self.store.id));
        let present = client.session_present();
        self.store = match present {
            true => {
                let mut store = Store::on(client, &self.store.id);
                store.is_broker = false;
                store
            }
            false => Store::behind(client, &self.store.id),
        };
        present
    }

    /// Sends a request with these arguments.
    pub(crate) fn send<A: AsRef<[u8]>>(&mut self, arguments: &[A]) -> Request {
        let request = self.store.command(arguments);
        if arguments[0].as_ref() == b"GET" {
            self.reads.extend(request.correlation.clone());
        }
        self.store.client.start(request.publish());
        request
    }

    /// Sends a request again, as a client does that does not know whether it was executed.
    pub(crate) fn send_again(&mut self, request: &Request) {
        self.store.client.start(request.publish());
    }

    /// Waits for the answer to a request.
    #[track_caller]
    pub(crate) fn answer(&mut self, request: &Request) -> RecordedAnswer {
        let shown = request.payload.escape_ascii().to_string();
        self.receive_until(&format!("the answer to {shown}"), |client| {
            client.answer_so_far(request).cloned()
        })
    }

    /// Waits for the answers to requests. Returns their versions.
    #[track_caller]
    pub(crate) fn versions(&mut self, requests: &[Request]) -> Vec<Hlc> {
        let mut versions = Vec::new();
        for request in requests {
            versions.push(self.answer(request).version.unwrap());
        }
        versions
    }

    /// The answer to a request, if it has arrived.
    pub(crate) fn answer_so_far(&self, request: &Request) -> Option<&RecordedAnswer> {
        self.answers.get(request.correlation.as_ref()?)
    }

    /// Sends a request and waits for the answer.
    #[track_caller]
    pub(crate) fn ask<A: AsRef<[u8]>>(&mut self, arguments: &[A]) -> RecordedAnswer {
        let request = self.send(arguments);
        self.answer(&request)
    }

    /// Sets a key. Returns the version.
    #[track_caller]
    pub(crate) fn set(&mut self, key: &str, value: &str) -> Hlc {
        let answer = self.ask(&["SET", key, value]);
        assert_eq!(answer.text, "+OK\\r\\n");
        answer.version.unwrap()
    }

    /// Watches a key.
    #[track_caller]
    pub(crate) fn watch(&mut self, key: &str) {
        assert_eq!(self.ask(&["KEYNOTIFY", key]).text, "+OK\\r\\n");
    }

    /// Asserts that the key has this value and version.
    #[track_caller]
    pub(crate) fn assert_value(&mut self, key: &str, value: &str, version: &Hlc) {
        let answer = self.ask(&["GET", key]);
        let expected = format!("${}\\r\\n{value}\\r\\n", value.len());
        assert_eq!(answer.text, expected);
        assert_eq!(answer.version.as_ref(), Some(version));
    }

    /// The versions in a key's notifications, in order of first arrival.
    pub(crate) fn notified_versions(&self, key: &str) -> Vec<Hlc> {
        let topic_end = format!("/{}", hex(key.as_bytes()));
        let mut versions = Vec::new();
        for notification in &self.notifications {
            let version = version(notification).expect("a notification has a version");
            if notification.topic.ends_with(&topic_end) && !versions.contains(&version) {
                versions.push(version);
            }
        }
        versions
    }

    /// Waits for the notification of this version of a key.
    #[track_caller]
    pub(crate) fn wait_for_notification(&mut self, key: &str, version: &Hlc) {
        let what = format!("the notification of {key} at {version}");
        self.receive_until(&what, |client| {
            client
                .notified_versions(key)
                .contains(version)
                .then_some(())
        });
    }

    /// Receives packets until `find` returns something.
    #[track_caller]
    pub(crate) fn receive_until<T>(
        &mut self,
        what: &str,
        find: impl Fn(&RecordingClient) -> Option<T>,
    ) -> T {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = find(self) {
                return found;
            }
            let left = end.saturating_duration_since(Instant::now());
            match self.store.client.poll(left) {
                Heard::Packet(packet) => self.take(&packet),
                other => panic!("{} waits for {what}: {other:?}", self.store.id),
            }
        }
    }

    /// Receives packets for this time. Returns false if the connection ends.
    pub(crate) fn receive_for(&mut self, time: Duration) -> bool {
        let end = Instant::now() + time;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.store.client.poll(left) {
                Heard::Packet(packet) => self.take(&packet),
                Heard::Silence => return true,
                Heard::Closed => return false,
            }
        }
    }

    fn take(&mut self, packet: &Packet) {
        match packet.kind() {
            kind::PUBLISH => self.record(packet.publish()),
            kind::PUBACK => {
                // 0x10: no subscriber for requests, because the store is not connected.
                let ack = packet.ack();
                assert!(matches!(ack.reason, 0 | 0x10), "{ack:?}");
            }
            kind::PINGRESP | kind::SUBACK => {}
            _ => panic!("{packet:?}"),
        }
    }

    fn record(&mut self, publish: Publish) {
        if publish.topic.starts_with(NOTIFICATION_PREFIX) {
            return self.notifications.push(publish);
        }
        let answer = RecordedAnswer {
            text: publish.payload.escape_ascii().to_string(),
            version: version(&publish),
        };
        let correlation = publish.correlation().expect("an answer").to_vec();
        match self.answers.get(&correlation) {
            None => {
                self.answers.insert(correlation, answer);
            }
            Some(_) if self.reads.contains(&correlation) => {}
            Some(first) => {
                assert_eq!(*first, answer, "a redelivered request has another answer");
                self.repeated += 1;
            }
        }
    }
}
