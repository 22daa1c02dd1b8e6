//! A client as MQTT 5 and MQTT 3.1.1 describe it: its session state, its connections, and what it
//! received.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use statehouse_mqtt::simulation::Wire;
use statehouse_protocol::SessionId;

use crate::followers::Follower;
use crate::operation::Operation;
use crate::packet::{self, Ack, Level, Publish};

/// A PUBLISH that the broker has not completed.
pub(crate) struct Outgoing {
    pub(crate) number: u64,
    pub(crate) operation: Operation,
    pub(crate) publish: Publish,
    /// PUBREC arrived, so PUBREL is due instead of the PUBLISH.
    pub(crate) released: bool,
}

/// What a packet of a client is, for the oracle.
#[derive(Clone, Debug)]
pub(crate) enum Sent {
    Connect {
        /// Of the will, if it has one.
        will_delay_s: Option<u32>,
    },
    Subscribe {
        id: u16,
        filters: Vec<(String, u8)>,
    },
    Publish {
        number: u64,
        operation: Operation,
        qos: u8,
        dup: bool,
    },
    Ack,
    Disconnect {
        reason: u8,
    },
}

/// The number of the request that changed a key, and the new value if there is one.
pub(crate) type Notification = (u64, Option<Vec<u8>>);

/// One network connection.
#[derive(Default)]
pub(crate) struct Link {
    pub(crate) number: u64,
    pub(crate) level: Level,
    /// The broker's end.
    pub(crate) wire: Option<Wire>,
    /// Packets on their way to the broker.
    pub(crate) up: VecDeque<(Vec<u8>, Sent)>,
    /// Bytes of the first of them that the broker has.
    pub(crate) up_done: usize,
    /// Bytes that left the broker and did not arrive.
    pub(crate) down: VecDeque<u8>,
    /// Bytes that arrived and are no whole packet.
    pub(crate) inbox: Vec<u8>,
    /// Bytes that left the broker and are no whole packet.
    pub(crate) egress: Vec<u8>,
    pub(crate) connacked: bool,
    /// The client has opened another connection, and reads nothing from this one.
    pub(crate) abandoned: bool,
    /// Packet ids of the client's exchanges by this connection: their number.
    pub(crate) exchanges: HashMap<u16, u64>,
    /// The position of the CONNECT, and of each SUBSCRIBE.
    pub(crate) positions: HashMap<u16, u64>,
    /// Zero if the session is not durable.
    pub(crate) connected_at: u64,
    /// Whether the user of a session that is not durable is recorded.
    pub(crate) user_recorded: bool,
    /// Whether the broker had a session, and the session's number.
    pub(crate) resumed: bool,
    pub(crate) session: SessionId,
    /// The keys that this connection watches; false if it is open whether it still does.
    pub(crate) watches: BTreeMap<String, bool>,
    /// The keys for which it was open at some time.
    pub(crate) open_keys: HashSet<String>,
    /// Notifications that this connection must receive, in order for each key.
    pub(crate) owed: BTreeMap<String, VecDeque<Notification>>,
    /// The last version of each watched key.
    pub(crate) versions: HashMap<String, String>,
    /// Unacknowledged PUBLISH packets of the broker.
    pub(crate) in_flight: HashSet<u16>,
}

impl Link {
    pub(crate) fn new(number: u64, level: Level) -> Self {
        Self {
            number,
            level,
            ..Self::default()
        }
    }

    pub(crate) fn send(&mut self, bytes: Vec<u8>, sent: Sent) {
        self.up.push_back((bytes, sent));
    }

    /// Whether the broker still serves it.
    pub(crate) fn is_served(&self) -> bool {
        self.wire.as_ref().is_some_and(|it| !it.is_closing())
    }
}

/// A client and its session.
#[derive(Default)]
pub(crate) struct Client {
    pub(crate) index: usize,
    pub(crate) name: String,
    pub(crate) expiry_s: u32,
    pub(crate) receive_max: u16,
    pub(crate) filters: Vec<(String, u8)>,
    /// The delay of its will in seconds, if it brings one.
    pub(crate) will_delay_s: Option<u32>,
    pub(crate) watches: bool,
    /// Whether it sends no requests. Each of its connections has either version of MQTT.
    pub(crate) messenger: bool,
    /// A client that watches a prefix, and no keys.
    pub(crate) follower: Option<Follower>,
    /// Whether it sets DUP when it sends a QoS 1 message again. Some clients do not.
    pub(crate) sets_dup: bool,
    /// The open connections. Only the last one is the client's; the others end.
    pub(crate) links: Vec<Link>,
    pub(crate) outgoing: VecDeque<Outgoing>,
    next_id: u16,
    /// The number of the session that the client knows of.
    pub(crate) session: SessionId,
    /// Subscribed in this session.
    pub(crate) subscribed: bool,
    /// Packet ids of QoS 2 messages whose PUBREL has not arrived.
    pub(crate) received: HashSet<u16>,
    /// How often each message arrived, and with which QoS.
    pub(crate) arrived: HashMap<u64, (u64, u8)>,
    /// The last first arrival on each topic, by QoS of the publisher and of the delivery.
    pub(crate) last: HashMap<(String, u8, u8), u64>,
    /// Wills that arrived.
    pub(crate) wills: BTreeMap<String, u64>,
    /// Each response with its version.
    pub(crate) responses: HashMap<u64, (Vec<u8>, Option<String>)>,
    /// Requests that were acknowledged with success.
    pub(crate) acknowledged: Vec<u64>,
    /// When the session was left without a connection.
    pub(crate) detached_ms: u64,
    /// The last position of each CONNECT, and the value of `detached_ms` before it.
    pub(crate) attachments: Vec<(u64, u64)>,
}

impl Client {
    pub(crate) fn new(index: usize) -> Self {
        Self {
            index,
            name: format!("c{index}"),
            expiry_s: 3600,
            receive_max: 100,
            filters: vec![(format!("r/c{index}"), 1)],
            watches: true,
            sets_dup: true,
            next_id: 1,
            ..Self::default()
        }
    }

    pub(crate) fn link(&mut self) -> Option<&mut Link> {
        self.links.last_mut().filter(|it| !it.abandoned)
    }

    /// The connection over which the client may send packets.
    pub(crate) fn open(&mut self) -> Option<&mut Link> {
        self.link().filter(|it| it.connacked)
    }

    pub(crate) fn packet_id(&mut self) -> u16 {
        loop {
            let id = self.next_id;
            self.next_id = if id == 40 { 1 } else { id + 1 };
            if !self.outgoing.iter().any(|it| it.publish.packet_id == id) {
                return id;
            }
        }
    }

    /// Sends what this session has not completed, in order (section 4.4).
    pub(crate) fn resend(&mut self) {
        let Self {
            outgoing,
            links,
            sets_dup,
            ..
        } = self;
        let link = links.last_mut().filter(|it| !it.abandoned);
        let Some(link) = link else { return };
        for it in outgoing.iter_mut() {
            link.exchanges.insert(it.publish.packet_id, it.number);
            if it.released {
                link.send(packet::ack(Ack::Pubrel, it.publish.packet_id), Sent::Ack);
                continue;
            }
            it.publish.dup = *sets_dup || it.publish.qos == 2;
            link.send(packet::publish(link.level, &it.publish), sent(it));
        }
    }

    /// Sends a new PUBLISH.
    pub(crate) fn publish(&mut self, number: u64, operation: Operation, mut publish: Publish) {
        if publish.qos > 0 {
            publish.packet_id = self.packet_id();
        }
        let it = Outgoing {
            number,
            operation,
            publish,
            released: false,
        };
        let Some(link) = self.link() else {
            return;
        };
        link.exchanges.insert(it.publish.packet_id, number);
        link.send(packet::publish(link.level, &it.publish), sent(&it));
        if it.publish.qos > 0 {
            self.outgoing.push_back(it);
        }
    }

    /// The log ends at this position, at this time: the session may be that of an earlier CONNECT.
    pub(crate) fn crash(&mut self, position: u64, now_ms: u64) {
        if self.links.iter().any(|it| it.wire.is_some()) {
            self.detached_ms = now_ms;
        }
        while let Some((_, detached_ms)) = self.attachments.pop_if(|it| it.0 > position) {
            self.detached_ms = detached_ms;
        }
        self.attachments.clear();
        self.links.clear();
    }

    /// The broker has no session of this client any more.
    pub(crate) fn begin_session(&mut self) {
        self.outgoing.clear();
        self.received.clear();
        self.last.clear();
        self.arrived.clear();
        self.subscribed = false;
    }

    pub(crate) fn subscribe(&mut self) {
        let filters = self.filters.clone();
        let id = self.packet_id() + 100;
        if let Some(link) = self.link() {
            let bytes = packet::subscribe(link.level, id, &filters);
            link.send(bytes, Sent::Subscribe { id, filters });
        }
    }
}

fn sent(it: &Outgoing) -> Sent {
    Sent::Publish {
        number: it.number,
        operation: it.operation.clone(),
        qos: it.publish.qos,
        dup: it.publish.dup,
    }
}
