//! Clients as MQTT has them: a session outlives connections, and what was not acknowledged is sent again.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use statehouse_core::clock::Stamp;
use statehouse_core::request::{Delivery, Dialect, PREVIEW_TOPIC, REQUEST_TOPIC};
use statehouse_core::store::{Key, Mode};
use statehouse_mqtt::{Properties, PropertiesBuilder};
use statehouse_wal::simulation::Dice;

/// What an answer says: payload and version.
pub(crate) type Said = (Bytes, Option<Stamp>);

/// A request that was sent at least once and not acknowledged.
pub(crate) struct Asked {
    /// Its number among all requests of the run.
    pub(crate) id: u64,
    pub(crate) packet_id: u16,
    pub(crate) topic: &'static str,
    pub(crate) payload: Bytes,
    pub(crate) properties: Properties,
    /// For a story.
    pub(crate) words: String,
    /// The last connection that it was sent over, and how often it was sent.
    pub(crate) sent_over: u64,
    pub(crate) sent: u32,
    /// The last record of the step that ran it, and what it answered; where a redelivery is owed that.
    pub(crate) ran: Option<(u64, Said)>,
    /// Until when it is remembered at least.
    pub(crate) until_ms: u64,
    /// The same of an earlier time, where it ran anew since its time was over: that may be lost.
    pub(crate) before: Option<((u64, Said), u64)>,
    /// What reached the client, and whether a redelivery is owed that.
    pub(crate) heard: Option<(bool, Said)>,
    /// What an answer that is no error tells of.
    pub(crate) about: About,
}

/// What a read tells of.
#[derive(Clone)]
pub(crate) enum About {
    Key(Key),
    /// Of who hears of a key.
    Watch(Key),
    All,
    Nothing,
}

/// A request without its place in a session.
#[derive(Clone)]
struct Thought {
    topic: &'static str,
    payload: Bytes,
    properties: Properties,
    words: String,
    about: About,
}

/// What comes over a connection.
pub(crate) enum Arrival {
    Answer {
        id: u64,
        owed: bool,
        said: Said,
    },
    /// Of the copy with this number.
    Acknowledgement {
        id: u64,
        copy: u32,
    },
}

impl Arrival {
    /// What it answers to this request is not what another run of it has to. Whether it would have been.
    pub(crate) fn disown(&mut self, request: u64) -> bool {
        match self {
            Self::Answer { id, owed, .. } if *id == request => std::mem::take(owed),
            _ => false,
        }
    }
}

pub(crate) struct Client {
    pub(crate) name: Arc<str>,
    pub(crate) session: u64,
    pub(crate) connection: Option<u64>,
    pub(crate) in_flight: VecDeque<Asked>,
    /// Whether it sets DUP where it sends again. Some clients do not.
    pub(crate) sets_dup: bool,
    /// Sent by the host, not read yet.
    pub(crate) inbox: VecDeque<Arrival>,
    next_packet_id: u16,
    /// Whether it takes the lowest free packet identifier, and not the next.
    thrifty: bool,
    /// The last request that was acknowledged: scripts send the very same again.
    last: Option<Thought>,
    /// The last ones that were acknowledged to a foreign broker, which may bring them again all the same: their client
    /// did not see that the broker had them.
    pub(crate) done: VecDeque<Asked>,
}

/// Acknowledged requests that may come again.
const DONE_MAX: usize = 4;

/// What commands a run is made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taste {
    pub(crate) keys: u64,
    /// Values of several kilobytes, so that a snapshot has many pieces.
    pub(crate) fat: bool,
    /// Fencing tokens, one in so many requests.
    pub(crate) tokens: u64,
    /// Whether the very same request may be a new one.
    pub(crate) reuse: bool,
    pub(crate) faulty: bool,
    /// Whether everybody watches, and what is watched ends soon.
    pub(crate) watchful: bool,
}

impl Client {
    pub(crate) fn new(index: usize, session: u64, dice: &mut Dice) -> Self {
        Self {
            name: format!("client-{index}").into(),
            session,
            connection: None,
            in_flight: VecDeque::new(),
            sets_dup: !dice.once_in(3),
            inbox: VecDeque::new(),
            next_packet_id: 1,
            thrifty: dice.once_in(2),
            last: None,
            done: VecDeque::new(),
        }
    }

    /// Whether it is a client of a foreign broker.
    pub(crate) fn is_foreign(&self) -> bool {
        Mode::of_session(self.session) == Mode::Foreign
    }

    /// Brings a request that was done with again; its place.
    pub(crate) fn undo(&mut self, which: u64) -> Option<usize> {
        let connection = self.connection?;
        let count = self.done.len() as u64;
        let at = which.checked_rem(count)?;
        let mut asked = self.done.remove(at as usize)?;
        asked.sent_over = connection;
        self.in_flight.push_back(asked);
        Some(self.in_flight.len() - 1)
    }

    /// The next request to be sent over this connection: first what was sent over an earlier one.
    pub(crate) fn to_send_again(&self) -> Option<usize> {
        let connection = self.connection?;
        self.in_flight
            .iter()
            .position(|it| it.sent_over != connection)
    }

    /// Marks a request as sent, and says how.
    pub(crate) fn send(&mut self, at: usize) -> Delivery {
        let connection = self.connection.expect("connected");
        let dup = self.sets_dup && self.in_flight[at].sent > 0;
        let foreign = self.is_foreign();
        let asked = &mut self.in_flight[at];
        // Over one connection nothing is sent twice without DUP.
        let dup = dup || asked.sent_over == connection;
        asked.sent_over = connection;
        asked.sent += 1;
        if foreign {
            // Nothing but the identity tells.
            return Delivery {
                session: self.session,
                connection: self.session,
                packet_id: 0,
                dup: true,
            };
        }
        Delivery {
            session: self.session,
            connection,
            packet_id: asked.packet_id,
            dup,
        }
    }

    /// Thinks of a request and puts it behind those in flight.
    pub(crate) fn think(&mut self, id: u64, now_ms: u64, taste: Taste, dice: &mut Dice) {
        let packet_id = self.packet_id();
        // Where the flag does not tell, a packet identifier that comes again would.
        let reuse = taste.reuse && !self.sets_dup && !self.thrifty && dice.once_in(8);
        let thought = match self.last.take().filter(|_| reuse) {
            Some(last) => last,
            None => request(&self.name, id, now_ms, taste, dice),
        };
        let Thought {
            topic,
            payload,
            properties,
            words,
            about,
        } = thought;
        self.in_flight.push_back(Asked {
            id,
            packet_id,
            topic,
            payload,
            properties,
            words,
            about,
            sent_over: 0,
            sent: 0,
            ran: None,
            until_ms: 0,
            before: None,
            heard: None,
        });
    }

    fn packet_id(&mut self) -> u16 {
        if self.thrifty {
            let used = |id: &u16| self.in_flight.iter().any(|it| it.packet_id == *id);
            return (1..).find(|id| !used(id)).expect("few are in flight");
        }
        self.next_packet_id += 1;
        self.next_packet_id - 1
    }

    /// Takes one arrival in. True where a request is done with.
    pub(crate) fn read(&mut self) -> Option<Asked> {
        match self.inbox.pop_front()? {
            Arrival::Answer { id, owed, said } => {
                let asked = self.in_flight.iter_mut().find(|it| it.id == id)?;
                if owed && let Some((true, heard)) = &asked.heard {
                    assert_eq!(*heard, said, "request {id} was answered otherwise before");
                }
                asked.heard = Some((owed, said));
                None
            }
            Arrival::Acknowledgement { id, copy } => {
                // A foreign broker tells copies apart; a client knows packet identifiers only.
                let foreign = self.is_foreign();
                let is_it = |it: &Asked| it.id == id && (!foreign || it.sent == copy);
                let at = self.in_flight.iter().position(is_it)?;
                let asked = self.in_flight.remove(at)?;
                // The PUBACK is written after the answer, on the same connection.
                assert!(
                    asked.heard.is_some(),
                    "request {} was acknowledged first",
                    asked.id
                );
                self.last = Some(Thought {
                    topic: asked.topic,
                    payload: asked.payload.clone(),
                    properties: asked.properties.clone(),
                    words: asked.words.clone(),
                    about: asked.about.clone(),
                });
                if self.is_foreign() {
                    self.done.truncate(DONE_MAX - 1);
                    self.done.push_front(asked);
                    return None;
                }
                Some(asked)
            }
        }
    }

    /// What was answered to a request is not what another run of it has to. Whether it would have been.
    pub(crate) fn disown(&mut self, request: u64) -> bool {
        let asked = self.in_flight.iter_mut().chain(&mut self.done);
        let heard = asked
            .filter(|it| it.id == request)
            .filter_map(|it| it.heard.as_mut())
            .fold(false, |promised, (owed, _)| {
                std::mem::take(owed) || promised
            });
        let arrivals = self.inbox.iter_mut();
        arrivals.fold(heard, |promised, it| it.disown(request) || promised)
    }

    /// The connection is lost, with everything that was not read. A foreign broker's is the store's own, and what the
    /// broker has for the client is not lost with it.
    pub(crate) fn disconnect(&mut self) -> Option<u64> {
        if !self.is_foreign() {
            self.inbox.clear();
        }
        self.connection.take()
    }

    /// The session is over, and nothing of it will be sent again.
    pub(crate) fn begin_session(&mut self, session: u64) {
        self.disconnect();
        self.in_flight.clear();
        self.last = None;
        self.session = session;
    }
}

/// A random request.
fn request(client: &str, id: u64, now_ms: u64, taste: Taste, dice: &mut Dice) -> Thought {
    let key = format!("key {}", dice.below(taste.keys));
    let value = |dice: &mut Dice| match dice.below(4) {
        0 => format!("value {}", dice.below(3)),
        _ if taste.fat => {
            // Just below what is kept of what a request saw, and just above it.
            let bytes = [14_000, 9_000, 17_000][dice.below(3) as usize];
            format!("{id:04}").repeat(bytes / 4)
        }
        _ => format!("value of {id}"),
    };
    let set_below = if taste.fat { 12 } else { 10 };
    let mut words: Vec<String> = match dice.below(20) {
        kind if kind < set_below => {
            let mut words = vec!["SET".into(), key, value(dice)];
            match dice.below(6) {
                0 => words.push("NX".into()),
                1 => words.push("NEX".into()),
                2 => words.extend(["NEX".into(), value(dice)]),
                _ => {}
            }
            if dice.once_in(3) {
                let ms = [1, 50, 1_000, 30_000, 400_000][dice.below(5) as usize];
                words.extend(["PX".into(), ms.to_string()]);
            }
            words
        }
        10..=12 => vec!["GET".into(), key],
        13 | 14 => vec!["DEL".into(), key],
        15 | 16 => vec!["VDEL".into(), key, value(dice)],
        17 => vec!["KEYNOTIFY".into(), key],
        18 => vec!["KEYNOTIFY".into(), key, "STOP".into()],
        _ => vec!["SCAN".into(), "key *".into()],
    };
    if taste.faulty && dice.once_in(2) {
        let key = format!("key {}", dice.below(taste.keys));
        words = match dice.below(4) {
            0 => vec!["SET".into(), key, "panic".into()],
            1 => vec!["SET".into(), key, "fine".into()],
            _ => vec!["HIDE".into(), key],
        };
    }
    if taste.watchful && dice.once_in(2) {
        let key = format!("key {}", dice.below(taste.keys));
        words = match dice.below(3) {
            0 => vec!["SET".into(), key, "v".into(), "PX".into(), "50".into()],
            _ => vec!["KEYNOTIFY".into(), key],
        };
    }
    let dialect = match dice.below(6) {
        0 => Dialect::Documents,
        1 => Dialect::Preview,
        _ => Dialect::Sdk,
    };
    let mut properties = PropertiesBuilder::new()
        .response_topic(&format!("answers/{client}"))
        .correlation_data(&id.to_be_bytes());
    if dialect == Dialect::Sdk {
        properties = properties.user("__protVer", "1.0");
    }
    let mut say = |name, wall: u64, dice: &mut Dice| {
        let reading = format!("{wall:015}:{:05}:{client}", dice.below(3));
        properties = std::mem::take(&mut properties).user(name, &reading);
    };
    if !dice.once_in(30) {
        let wall = match dice.below(20) {
            0 => now_ms + 61_000,
            1 => now_ms + 59_000,
            2 => now_ms.saturating_sub(1_000_000),
            _ => now_ms + dice.below(2_000) - 1_000,
        };
        say(dialect.version_property(), wall, dice);
    }
    if dice.once_in(taste.tokens) {
        say(
            dialect.fencing_property(),
            now_ms + dice.below(1_000) - 500,
            dice,
        );
    }
    if dice.once_in(5) {
        properties = properties.user("aio-persistence", "true");
    }
    let properties = properties.finish().expect("short properties");
    let arguments: Vec<&[u8]> = words.iter().map(String::as_bytes).collect();
    let payload = statehouse_policy::resp::request(&arguments).into();
    let topic = match dialect {
        Dialect::Preview => PREVIEW_TOPIC,
        _ => REQUEST_TOPIC,
    };
    let mut story = words.join(" ");
    story.truncate(60);
    let properties = Properties::parse(properties).expect("just made");
    let about = match &words[0][..] {
        "GET" | "SET" | "DEL" | "VDEL" => About::Key(Key::from(words[1].clone())),
        "KEYNOTIFY" => About::Watch(Key::from(words[1].clone())),
        "SCAN" => About::All,
        _ => About::Nothing,
    };
    Thought {
        topic,
        payload,
        properties,
        words: story,
        about,
    }
}
