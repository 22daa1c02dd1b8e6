//! A client behind the broker that writes down all that it is told. An answer may come more than once there, and so may
//! a notification; what must not happen is that the answer to a change comes in two versions. A read simply runs again.

use std::{
    collections::{HashMap, HashSet},
    net::SocketAddr,
    time::{Duration, Instant},
};

use statehouse_tests::{
    Client, Connect, Heard, Hlc, Packet, Property, Publish, Request, Store,
    client::PATIENCE,
    packet::kind,
    store::{NOTIFICATION_PREFIX, hex, version},
};

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Told {
    /// The RESP bytes, readable.
    pub(crate) text: String,
    pub(crate) version: Option<Hlc>,
}

/// A client whose session outlives its connections.
pub(crate) struct Asker {
    pub(crate) store: Store,
    address: SocketAddr,
    /// By correlation data, the first that came.
    answers: HashMap<Vec<u8>, Told>,
    /// Correlation data of requests whose answers may differ.
    reads: HashSet<Vec<u8>>,
    /// How many answers to changes came once more.
    pub(crate) repeated: usize,
    /// Every notification as it came, also those that came before.
    pub(crate) notifications: Vec<Publish>,
}

/// The CONNECT of a session that outlives any test.
fn connect(id: &str) -> Connect {
    Connect::resume(id, 3600)
}

impl Asker {
    /// A session that was not there before.
    pub(crate) fn begin(address: SocketAddr, id: &str) -> Asker {
        let client = Client::connect(address, &connect(id));
        assert!(!client.session_present(), "{id} had a session");
        Asker {
            store: Store::behind(client, id),
            address,
            answers: HashMap::new(),
            reads: HashSet::new(),
            repeated: 0,
            notifications: Vec::new(),
        }
    }

    /// Connects again; whether the broker still had the session.
    pub(crate) fn resume(&mut self) -> bool {
        // What had come is acknowledged, so it does not come again.
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

    /// Sends a request of these arguments.
    pub(crate) fn send<A: AsRef<[u8]>>(&mut self, arguments: &[A]) -> Request {
        let request = self.store.command(arguments);
        if arguments[0].as_ref() == b"GET" {
            self.reads.extend(request.correlation.clone());
        }
        self.store.client.start(request.publish());
        request
    }

    /// Sends a request once more, as a client does that does not know what became of it.
    pub(crate) fn send_again(&mut self, request: &Request) {
        self.store.client.start(request.publish());
    }

    /// Waits for the answer to a request.
    #[track_caller]
    pub(crate) fn answer(&mut self, request: &Request) -> Told {
        let shown = request.payload.escape_ascii().to_string();
        self.until(&format!("the answer to {shown}"), |asker| {
            asker.answer_so_far(request).cloned()
        })
    }

    /// The answer to a request, where it has come.
    pub(crate) fn answer_so_far(&self, request: &Request) -> Option<&Told> {
        self.answers.get(request.correlation.as_ref()?)
    }

    /// Asks and waits for the answer.
    #[track_caller]
    pub(crate) fn ask<A: AsRef<[u8]>>(&mut self, arguments: &[A]) -> Told {
        let request = self.send(arguments);
        self.answer(&request)
    }

    /// SET; the version.
    #[track_caller]
    pub(crate) fn set(&mut self, key: &str, value: &str) -> Hlc {
        let told = self.ask(&["SET", key, value]);
        assert_eq!(told.text, "+OK\\r\\n");
        told.version.unwrap()
    }

    /// KEYNOTIFY.
    #[track_caller]
    pub(crate) fn watch(&mut self, key: &str) {
        assert_eq!(self.ask(&["KEYNOTIFY", key]).text, "+OK\\r\\n");
    }

    /// The key holds this value, of this version.
    #[track_caller]
    pub(crate) fn expect(&mut self, key: &str, value: &str, version: &Hlc) {
        let told = self.ask(&["GET", key]);
        let expected = format!("${}\\r\\n{value}\\r\\n", value.len());
        assert_eq!(
            (told.text, told.version.as_ref()),
            (expected, Some(version))
        );
    }

    /// The versions of a key's notifications, each as it came first.
    pub(crate) fn versions(&self, key: &str) -> Vec<Hlc> {
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

    /// Waits until it was told of this version of a key.
    #[track_caller]
    pub(crate) fn hear(&mut self, key: &str, version: &Hlc) {
        let what = format!("the notification of {key} at {version}");
        self.until(&what, |asker| {
            asker.versions(key).contains(version).then_some(())
        });
    }

    /// Takes in what comes until something is so.
    #[track_caller]
    pub(crate) fn until<T>(&mut self, what: &str, is_so: impl Fn(&Asker) -> Option<T>) -> T {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(so) = is_so(self) {
                return so;
            }
            match self
                .store
                .client
                .poll(end.saturating_duration_since(Instant::now()))
            {
                Heard::Packet(packet) => self.take(&packet),
                other => panic!("{} waits for {what}: {other:?}", self.store.id),
            }
        }
    }

    /// Takes in what comes within this time; false at the end of the connection.
    pub(crate) fn listen(&mut self, time: Duration) -> bool {
        let end = Instant::now() + time;
        loop {
            match self
                .store
                .client
                .poll(end.saturating_duration_since(Instant::now()))
            {
                Heard::Packet(packet) => self.take(&packet),
                Heard::Silence => return true,
                Heard::Closed => return false,
            }
        }
    }

    fn take(&mut self, packet: &Packet) {
        match packet.kind() {
            kind::PUBLISH => self.note(packet.publish()),
            kind::PUBACK => {
                // 0x10: nobody is subscribed to requests, as long as the store is not back.
                let ack = packet.ack();
                assert!(matches!(ack.reason, 0 | 0x10), "{ack:?}");
            }
            kind::PINGRESP | kind::SUBACK => {}
            _ => panic!("{packet:?}"),
        }
    }

    fn note(&mut self, publish: Publish) {
        if publish.topic.starts_with(NOTIFICATION_PREFIX) {
            return self.notifications.push(publish);
        }
        let told = Told {
            text: publish.payload.escape_ascii().to_string(),
            version: version(&publish),
        };
        let correlation = correlation(&publish).expect("an answer");
        match self.answers.get(&correlation) {
            None => {
                self.answers.insert(correlation, told);
            }
            Some(_) if self.reads.contains(&correlation) => {}
            Some(first) => {
                assert_eq!(*first, told, "another answer than the first time");
                self.repeated += 1;
            }
        }
    }
}

fn correlation(publish: &Publish) -> Option<Vec<u8>> {
    publish
        .properties
        .iter()
        .find_map(|property| match property {
            Property::CorrelationData(data) => Some(data.clone()),
            _ => None,
        })
}
