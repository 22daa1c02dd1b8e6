//! Which wills must be published (MQTT 5, sections 3.1.2.5 and 3.1.3.2.2).

use std::collections::BTreeMap;

use crate::trace::Tally;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// The connection is open.
    Armed,
    /// The connection is lost, and the delay runs until this time.
    Pending(u64),
    Never,
    Must,
    /// A crash came before the broker's decision was durable, or the disk was full.
    Maybe,
}

struct Will {
    link: u64,
    client: usize,
    delay_s: u32,
    fate: Fate,
    /// Where the log was when the fate was decided; none if that was just now.
    position: Option<u64>,
}

/// The wills of a run. A will is named after the connection that brought it.
#[derive(Default)]
pub(crate) struct Wills(Vec<Will>);

impl Wills {
    pub(crate) fn arm(&mut self, link: u64, client: usize, delay_s: u32) {
        self.0.push(Will {
            link,
            client,
            delay_s,
            fate: Fate::Armed,
            position: None,
        });
    }

    fn decide(&mut self, which: impl Fn(&Will) -> bool, fate: impl Fn(&Will) -> Fate) {
        for will in self.0.iter_mut().filter(|it| which(it)) {
            will.fate = fate(will);
            will.position = None;
        }
    }

    /// The connection ended without DISCONNECT 0x00.
    pub(crate) fn lost(&mut self, link: u64, expiry_s: u32, now_ms: u64, tally: &mut Tally) {
        self.decide(
            |it| it.link == link && it.fate == Fate::Armed,
            |it| match it.delay_s.min(expiry_s) {
                0 => Fate::Must,
                delay_s => Fate::Pending(now_ms + u64::from(delay_s) * 1000),
            },
        );
        let now = |it: &Will| it.link == link && it.fate == Fate::Must;
        if self.0.iter().any(now) {
            tally.count("wills at once");
        }
    }

    /// The client sent DISCONNECT 0x00.
    pub(crate) fn disconnected(&mut self, link: u64, tally: &mut Tally) {
        let which = |it: &Will| it.link == link && it.fate == Fate::Armed;
        if self.0.iter().any(which) {
            tally.count("wills cancelled by DISCONNECT");
        }
        self.decide(which, |_| Fate::Never);
    }

    /// A connection of the client was accepted. A will whose delay runs is published only if the
    /// session ended.
    pub(crate) fn connected(&mut self, client: usize, resumed: bool, tally: &mut Tally) {
        let which = |it: &Will| it.client == client && matches!(it.fate, Fate::Pending(_));
        if resumed && self.0.iter().any(which) {
            tally.count("wills cancelled by a new connection");
        }
        self.decide(which, |_| if resumed { Fate::Never } else { Fate::Must });
    }

    /// Time has passed.
    pub(crate) fn due(&mut self, now_ms: u64, tally: &mut Tally) {
        let which = |it: &Will| matches!(it.fate, Fate::Pending(at) if at <= now_ms);
        if self.0.iter().any(which) {
            tally.count("wills after a delay");
        }
        self.decide(which, |_| Fate::Must);
    }

    /// The host has handled what decided the last fates; its log ends here.
    pub(crate) fn stamp(&mut self, position: u64, has_room: bool) {
        for will in &mut self.0 {
            if will.position.is_none() && will.fate == Fate::Must && !has_room {
                // A full disk refuses the message to a durable session.
                will.fate = Fate::Maybe;
            }
            will.position.get_or_insert(position);
        }
    }

    /// Nothing behind this position survived.
    pub(crate) fn crash(&mut self, position: u64) {
        for will in &mut self.0 {
            let open = matches!(will.fate, Fate::Armed | Fate::Pending(_));
            if open || will.position.is_none_or(|it| it > position) {
                will.fate = Fate::Maybe;
            }
        }
    }

    /// Compares with what the observer received.
    pub(crate) fn check(&self, arrived: &BTreeMap<String, u64>) {
        for will in &self.0 {
            let times = arrived.get(&format!("w{}", will.link)).copied();
            let times = times.unwrap_or(0);
            let Will { link, fate, .. } = will;
            let right = match fate {
                Fate::Must => times == 1,
                Fate::Maybe => times <= 1,
                Fate::Armed | Fate::Pending(_) | Fate::Never => times == 0,
            };
            assert!(
                right,
                "obligation 6: the will of link {link} is {fate:?}, and was published {times} times"
            );
        }
    }
}
