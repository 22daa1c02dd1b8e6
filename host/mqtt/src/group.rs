//! A shared subscription: the sessions that take turns at the messages of one filter (section 4.8.2).
//!
//! In come members with the options of each, whether their clients are connected, and for every message how ready a member is;
//! out goes the one that gets it. A message asks a bounded number of members, however many there are. Never looks into a
//! session or a message.

use rustc_hash::FxHashMap;

use crate::{
    limits::GROUP_MEMBERS_ASKED_MAX,
    router::{Match, SessionKey},
};

/// How well a member can take a message, the best last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Readiness {
    /// Without a connection; its session keeps it.
    Absent,
    /// Connected; the message has to wait for the client to read or to acknowledge.
    Later,
    /// It can be sent at once.
    Now,
}

/// The members of one group; there is always one.
#[derive(Debug)]
pub(crate) struct Group {
    /// Those whose clients are connected, then the others.
    members: Vec<Match>,
    places: FxHashMap<SessionKey, usize>,
    /// How many are connected.
    connected: usize,
    /// The connected member that is asked first, and the other one.
    turns: [usize; 2],
}

impl Group {
    pub(crate) fn new(first: Match, is_connected: bool) -> Self {
        let mut group = Self {
            members: Vec::new(),
            places: FxHashMap::default(),
            connected: 0,
            turns: [0; 2],
        };
        group.join(first, is_connected);
        group
    }

    /// Adds a member, or replaces its options. True if it is new.
    pub(crate) fn join(&mut self, (session, options): Match, is_connected: bool) -> bool {
        if let Some(place) = self.places.get(&session) {
            self.members[*place].1 = options;
            return false;
        }
        self.places.insert(session, self.members.len());
        self.members.push((session, options));
        self.set_connected(session, is_connected);
        true
    }

    /// Removes a member. False if it is none.
    pub(crate) fn leave(&mut self, session: SessionKey) -> bool {
        self.set_connected(session, false);
        let Some(place) = self.places.remove(&session) else {
            return false;
        };
        self.members.swap_remove(place);
        if let Some((moved, _)) = self.members.get(place) {
            self.places.insert(*moved, place);
        }
        true
    }

    /// The client of a member has connected, or its connection has ended.
    pub(crate) fn set_connected(&mut self, session: SessionKey, is_connected: bool) {
        let Some(place) = self.places.get(&session).copied() else {
            return;
        };
        match (place < self.connected, is_connected) {
            (false, true) => {
                self.swap(place, self.connected);
                self.connected += 1;
            }
            (true, false) => {
                self.connected -= 1;
                self.swap(place, self.connected);
            }
            _ => {}
        }
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.members.swap(a, b);
        for place in [a, b] {
            self.places.insert(self.members[place].0, place);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// The readiest connected member, or else one of the others; among equals the one whose turn it is. The next turn is that
    /// of the one behind it. None if none of those that were asked can take the message; then the next message asks others.
    /// Also how many were asked.
    pub(crate) fn choose(
        &mut self,
        mut readiness: impl FnMut(&Match) -> Option<Readiness>,
    ) -> (Option<Match>, usize) {
        let (connected, others) = self.members.split_at(self.connected);
        let mut asked = 0;
        let kinds = [(connected, Readiness::Now), (others, Readiness::Absent)];
        for ((members, enough), turn) in kinds.into_iter().zip(&mut self.turns) {
            let from = if *turn < members.len() { *turn } else { 0 };
            let (before, in_turn) = members.split_at(from);
            let in_turn = in_turn.iter().chain(before);
            let mut best: Option<(Readiness, usize)> = None;
            let mut steps = 0;
            for member in in_turn.take(GROUP_MEMBERS_ASKED_MAX) {
                let ready = readiness(member);
                if ready > best.map(|(best, _)| best) {
                    best = ready.map(|ready| (ready, steps));
                }
                steps += 1;
                if ready >= Some(enough) {
                    break;
                }
            }
            asked += steps;
            let step = best.map_or(steps, |(_, step)| step + 1);
            *turn = (from + step).checked_rem(members.len()).unwrap_or(0);
            if best.is_some() {
                let chosen = (from + step - 1) % members.len();
                return (members.get(chosen).copied(), asked);
            }
        }
        (None, asked)
    }
}

#[cfg(test)]
mod tests {
    use super::{
        Readiness::{Absent, Later, Now},
        *,
    };
    use crate::{QoS, router::Subscription};

    const OPTIONS: Subscription = Subscription {
        qos: QoS::AtLeastOnce,
        no_local: false,
        retain_as_published: false,
        id: None,
    };

    /// Connected members 0, 1, 2.
    fn three() -> Group {
        let mut group = Group::new((0, OPTIONS), true);
        assert!(group.join((1, OPTIONS), true) && group.join((2, OPTIONS), true));
        group
    }

    /// Who gets the next messages.
    fn next<const N: usize>(group: &mut Group, ready: [Option<Readiness>; 3]) -> [SessionKey; N] {
        [(); N].map(|()| {
            let (chosen, _) = group.choose(|(key, _)| ready[*key as usize]);
            chosen.unwrap().0
        })
    }

    #[test]
    fn equals_take_turns() {
        for ready in [Now, Later] {
            assert_eq!(next(&mut three(), [Some(ready); 3]), [0, 1, 2, 0]);
        }
        let mut group = three();
        (0..3).for_each(|key| group.set_connected(key, false));
        let mut turns: [_; 3] = next(&mut group, [Some(Absent); 3]);
        assert_eq!(next(&mut group, [Some(Absent); 3]), turns);
        turns.sort_unstable();
        assert_eq!(turns, [0, 1, 2]);
    }

    #[test]
    fn the_readiest_comes_first_and_nobody_where_none_is_ready() {
        let mut group = three();
        group.set_connected(0, false);
        assert_eq!(
            next(&mut group, [Some(Absent), Some(Later), Some(Now)]),
            [2, 2]
        );
        assert_eq!(next(&mut group, [Some(Absent), Some(Later), None]), [1, 1]);
        assert_eq!(next(&mut group, [Some(Absent), None, None]), [0, 0]);
        assert_eq!(group.choose(|_| None), (None, 3));
    }

    #[test]
    fn the_turn_stays_where_members_come_and_go() {
        let mut group = three();
        assert_eq!(next(&mut group, [Some(Now); 3]), [0, 1]);
        assert!(group.leave(0) && !group.leave(0));
        let mut both: [_; 2] = next(&mut group, [Some(Now); 3]);
        both.sort_unstable();
        assert_eq!(both, [1, 2]);
        assert!(group.leave(2));
        assert!(
            !group.join((1, OPTIONS), true),
            "a second subscription is no second member"
        );
        assert_eq!(next(&mut group, [Some(Now); 3]), [1, 1]);
        assert!(group.leave(1) && group.is_empty());
        assert_eq!(group.choose(|_| Some(Now)), (None, 0));
    }

    #[test]
    fn a_message_asks_few_of_many_members() {
        const MEMBERS: u32 = 4000;
        let mut group = Group::new((0, OPTIONS), false);
        (1..MEMBERS).for_each(|key| assert!(group.join((key, OPTIONS), key % 2 == 0)));
        let asked_max = GROUP_MEMBERS_ASKED_MAX;
        let (chosen, asked) = group.choose(|(key, _)| (key % 2 == 1).then_some(Absent));
        assert!(chosen.is_some() && asked == asked_max + 1, "{asked}");
        assert_eq!(group.choose(|_| None), (None, 2 * asked_max));
        assert_eq!(group.choose(|_| Some(Later)).1, asked_max);
        // The only member with room is found by one of the next messages.
        let found = (0..MEMBERS as usize / asked_max).any(|_| {
            group
                .choose(|(key, _)| (*key == 7).then_some(Absent))
                .0
                .is_some()
        });
        assert!(found);
    }
}
