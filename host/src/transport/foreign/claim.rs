//! Who has the store's client id: two stores with one would throw each other out for ever, and both would serve.
//!
//! MQTT has DISCONNECT 0x8E for it (section 3.14.2.1), but Mosquitto sends that in its shortest form, which rumqttc 0.25
//! cannot read. So each run leaves a retained mark at the broker, and stops where it finds a later one when it attaches
//! again. Whoever may write there can stop it so: that is for the broker's rules to prevent.
//!
//! What enters: marks. What leaves: what to do about them. It knows of no connection.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;

/// What the topics of marks begin with; the client id in Base 16 follows, since it may hold what a topic may not.
const TOPICS: &str = "statehouse/v1/attached/";

/// The mark of one run of a store. Later ones are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Mark {
    since_ms: u64,
    nonce: u64,
}

/// This run's claim to a client id.
#[derive(Debug)]
pub(super) struct Claim {
    topic: String,
    mine: Mark,
    /// The broker has shown this run its own mark: whoever leaves a greater one came later.
    stands: bool,
}

/// What a mark means.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    /// Nothing new.
    Nothing,
    /// An earlier run's is in the place of this one's, which is to be left again: its clock was ahead, or the broker was
    /// set back.
    Overtake,
    /// Somebody who came later has the client id.
    TakenOver,
}

impl Claim {
    /// A claim from now on.
    pub(super) fn new(client_id: &str) -> Self {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH);
        let since_ms = since_1970.unwrap_or_default().as_millis();
        let mine = Mark {
            since_ms: u64::try_from(since_ms).unwrap_or_default(),
            nonce: statehouse_link::random(),
        };
        Self::of(client_id, mine)
    }

    fn of(client_id: &str, mine: Mark) -> Self {
        let mut topic = TOPICS.to_owned();
        for byte in client_id.bytes() {
            // Writing to a string cannot fail.
            let _ = write!(topic, "{byte:02X}");
        }
        Self {
            topic,
            mine,
            stands: false,
        }
    }

    /// Where the marks are.
    pub(super) fn topic(&self) -> &str {
        &self.topic
    }

    /// Whether the broker has shown this run's mark.
    pub(super) fn stands(&self) -> bool {
        self.stands
    }

    /// This run's mark, to be retained.
    pub(super) fn mark(&self) -> Bytes {
        let Mark { since_ms, nonce } = self.mine;
        format!("{since_ms} {nonce:016x}").into()
    }

    /// A mark that the broker shows; `retained` where it was there at the SUBSCRIBE, and does not come over the connection
    /// at this moment. Whoever takes the client id breaks this one's connection first, so a later mark that comes without
    /// that is somebody's who only may publish.
    pub(super) fn read(&mut self, payload: &[u8], retained: bool) -> Meaning {
        let Some(seen) = parse(payload) else {
            return Meaning::Nothing;
        };
        if seen == self.mine {
            self.stands = true;
            return Meaning::Nothing;
        }
        match (seen > self.mine, self.stands) {
            (true, true) if retained => Meaning::TakenOver,
            (true, true) => Meaning::Nothing,
            (true, false) => {
                // Of an earlier run whose clock was ahead of ours.
                self.mine.since_ms = seen.since_ms.saturating_add(1);
                Meaning::Overtake
            }
            (false, true) => Meaning::Overtake,
            // Of an earlier run: ours is on its way.
            (false, false) => Meaning::Nothing,
        }
    }
}

fn parse(payload: &[u8]) -> Option<Mark> {
    let (since_ms, nonce) = std::str::from_utf8(payload).ok()?.split_once(' ')?;
    Some(Mark {
        since_ms: since_ms.parse().ok()?,
        nonce: u64::from_str_radix(nonce, 16).ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(since_ms: u64, nonce: u64) -> Claim {
        Claim::of("id", Mark { since_ms, nonce })
    }

    /// A broker shows each mark to whoever is attached.
    fn left(by: &Claim, seen_by: &mut Claim) -> Meaning {
        seen_by.read(&by.mark(), true)
    }

    #[test]
    fn the_earlier_one_stops_when_it_finds_the_later_ones_mark() {
        let (mut first, mut second) = (claim(1, 7), claim(2, 3));
        assert_eq!(first.read(&first.mark(), false), Meaning::Nothing);
        assert_eq!(left(&first, &mut second), Meaning::Nothing);
        assert_eq!(second.read(&second.mark(), false), Meaning::Nothing);
        assert_eq!(left(&second, &mut first), Meaning::TakenOver);
    }

    #[test]
    fn a_run_whose_clock_is_behind_takes_over_all_the_same() {
        let (mut first, mut second) = (claim(9, 7), claim(2, 3));
        assert_eq!(first.read(&first.mark(), false), Meaning::Nothing);
        assert_eq!(left(&first, &mut second), Meaning::Overtake);
        assert_eq!(second.read(&second.mark(), false), Meaning::Nothing);
        assert_eq!(left(&second, &mut first), Meaning::TakenOver);
    }

    #[test]
    fn nobody_is_stopped_by_a_mark_while_the_connection_holds() {
        let mut claim = claim(1, 7);
        let forged = b"99999999999999 0";
        assert_eq!(claim.read(&claim.mark(), false), Meaning::Nothing);
        assert_eq!(claim.read(forged, false), Meaning::Nothing);
        assert_eq!(claim.read(forged, true), Meaning::TakenOver);
    }

    #[test]
    fn a_broker_that_was_set_back_stops_nobody() {
        let (first, mut second) = (claim(1, 7), claim(2, 3));
        assert_eq!(second.read(&second.mark(), false), Meaning::Nothing);
        assert_eq!(left(&first, &mut second), Meaning::Overtake);
        assert_eq!(second.read(b"no mark at all", true), Meaning::Nothing);
    }

    #[test]
    fn a_topic_holds_any_client_id() {
        let claim = Claim::new("a/#");
        assert_eq!(claim.topic(), "statehouse/v1/attached/612F23");
        assert_eq!(parse(&claim.mark()), Some(claim.mine));
    }
}
