//! Detects that another store has taken over the client id. Otherwise two stores with one client id
//! would disconnect each other forever, and both would serve.
//!
//! MQTT has DISCONNECT 0x8E for this (section 3.14.2.1). But it does not say which run is the later
//! one: an earlier run whose network was broken ends the connection of the later run when it
//! returns. And Mosquitto sends it in its shortest form, which rumqttc 0.25 cannot read. So each
//! run leaves a retained mark at the broker, and stops if it finds a later mark when it attaches
//! again. DISCONNECT 0x8E counts only if the marks do not work. A client that may write marks can
//! stop the store, so the broker's access rules must prevent that.
//!
//! This module decides what a mark means, and does no I/O.

use bytes::Bytes;
use data_encoding::HEXUPPER;

use statehouse_config::limits;
use statehouse_core::clock::wall_ms;

/// The prefix of the topics of marks. The client id in Base 16 follows, because it may contain
/// characters that a topic may not.
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
    /// Whether the broker has sent this run's mark back. After that a greater mark is of a later
    /// run.
    confirmed: bool,
    /// How often the broker has reported a takeover since it sent a retained mark.
    takeovers: u8,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Meaning {
    Nothing,
    /// The mark of an earlier run replaced this run's mark, so this run must publish its mark
    /// again. The clock of the earlier run was ahead, or the broker was restored to an earlier
    /// state.
    Republish,
    /// A later run has the client id.
    TakenOver,
}

impl Claim {
    pub(super) fn new(client_id: &str) -> Self {
        let mine = Mark {
            since_ms: wall_ms(),
            nonce: statehouse_link::random(),
        };
        Self::of(client_id, mine)
    }

    fn of(client_id: &str, mine: Mark) -> Self {
        Self {
            topic: TOPICS.to_owned() + &HEXUPPER.encode(client_id.as_bytes()),
            mine,
            confirmed: false,
            takeovers: 0,
        }
    }

    pub(super) fn topic(&self) -> &str {
        &self.topic
    }

    /// Whether the broker has sent this run's mark back.
    pub(super) fn is_confirmed(&self) -> bool {
        self.confirmed
    }

    /// The payload of this run's retained mark.
    pub(super) fn mark(&self) -> Bytes {
        let Mark { since_ms, nonce } = self.mine;
        format!("{since_ms} {nonce:016x}").into()
    }

    /// Handles a DISCONNECT with 0x8E. Returns whether this run must stop. Otherwise it must attach
    /// again and read the mark, which stops the earlier one of two runs.
    pub(super) fn taken_over(&mut self) -> bool {
        self.takeovers = self.takeovers.saturating_add(1);
        self.takeovers > limits::BROKER_TAKEOVERS_MAX
    }

    /// Handles a mark from the broker. `retained` is true if the mark was at the broker before the
    /// SUBSCRIBE, false if it was published since. A store that takes over the client id first ends
    /// this run's connection. So a later mark that arrives during a connection is of a client that
    /// only may publish, and is ignored.
    pub(super) fn read(&mut self, payload: &[u8], retained: bool) -> Meaning {
        let Some(seen) = parse(payload) else {
            return Meaning::Nothing;
        };
        if retained {
            self.takeovers = 0;
        }
        if seen == self.mine {
            self.confirmed = true;
            return Meaning::Nothing;
        }
        match (seen > self.mine, self.confirmed) {
            (true, true) if retained => Meaning::TakenOver,
            (true, true) => Meaning::Nothing,
            (true, false) => {
                // The mark of an earlier run whose clock was ahead of ours.
                self.mine.since_ms = seen.since_ms.saturating_add(1);
                Meaning::Republish
            }
            (false, true) => Meaning::Republish,
            // The mark of an earlier run. Ours was published and will replace it.
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

    /// The receiver finds the retained mark of another run.
    fn retained(of: &Claim, receiver: &mut Claim) -> Meaning {
        receiver.read(&of.mark(), true)
    }

    #[test]
    fn the_earlier_run_stops_even_if_its_clock_is_ahead() {
        for (since_ms, meaning) in [(1, Meaning::Nothing), (9, Meaning::Republish)] {
            let (mut first, mut second) = (claim(since_ms, 7), claim(2, 3));
            assert_eq!(first.read(&first.mark(), false), Meaning::Nothing);
            assert_eq!(retained(&first, &mut second), meaning, "{since_ms} ms");
            assert_eq!(second.read(&second.mark(), false), Meaning::Nothing);
            let found = retained(&second, &mut first);
            assert_eq!(found, Meaning::TakenOver, "{since_ms} ms");
        }
    }

    #[test]
    fn a_forged_mark_during_a_connection_stops_no_run() {
        let mut claim = claim(1, 7);
        let forged = b"99999999999999 0";
        assert_eq!(claim.read(&claim.mark(), false), Meaning::Nothing);
        assert_eq!(claim.read(forged, false), Meaning::Nothing);
        assert_eq!(claim.read(forged, true), Meaning::TakenOver);
    }

    #[test]
    fn an_earlier_mark_after_a_broker_restore_stops_no_run() {
        let (first, mut second) = (claim(1, 7), claim(2, 3));
        assert_eq!(second.read(&second.mark(), false), Meaning::Nothing);
        assert_eq!(retained(&first, &mut second), Meaning::Republish);
        assert_eq!(second.read(b"no mark at all", true), Meaning::Nothing);
    }

    #[test]
    fn takeovers_stop_a_run_only_if_it_finds_no_mark() {
        let mut claim = claim(2, 3);
        for _ in 0..3 {
            for _ in 0..limits::BROKER_TAKEOVERS_MAX {
                assert!(!claim.taken_over());
            }
            // The mark shows that this run is the later one.
            assert_eq!(claim.read(&claim.mark(), true), Meaning::Nothing);
        }
        for _ in 0..limits::BROKER_TAKEOVERS_MAX {
            assert!(!claim.taken_over());
        }
        assert_eq!(claim.read(&claim.mark(), false), Meaning::Nothing);
        assert!(claim.taken_over(), "no retained mark");
    }

    #[test]
    fn any_client_id_makes_a_valid_topic() {
        let claim = Claim::new("a/#");
        assert_eq!(claim.topic(), "statehouse/v1/attached/612F23");
        assert_eq!(parse(&claim.mark()), Some(claim.mine));
    }
}
