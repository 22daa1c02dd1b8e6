//! A shared subscription: sessions that take turns at the messages of one filter (section 4.8.2).
//!
//! The caller reports which members are connected, and how ready each is for a message. A message
//! tries a bounded number of members, however many there are. Never looks into a session or a
//! message.

use rustc_hash::FxHashMap;

use crate::{
    limits::GROUP_MEMBERS_ASKED_MAX,
    router::{Match, SessionKey},
};

/// How well a member can take a message, in ascending order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Readiness {
    /// Disconnected; its session queues the message.
    Absent,
    /// Connected; the message must wait for the client to read or to acknowledge.
    Later,
    /// The message can be sent at once.
    Now,
}

/// The members of one shared subscription; it has at least one.
#[derive(Debug)]
pub(crate) struct Group {
    /// Connected members, then disconnected ones.
    members: Vec<Match>,
    places: FxHashMap<SessionKey, usize>,
    /// The number of connected members.
    connected: usize,
    /// The index of the next connected member, and of the next disconnected one.
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

    /// Adds a member, or replaces its options. Returns true if it is new.
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

    /// Removes a member. Returns false if the session is no member.
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

    /// Reports that the client of a member has connected or disconnected.
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

    /// Chooses the readiest connected member, or else a disconnected one, and returns the number of
    /// members tried. Among equals it is the member whose turn it is; the next turn is that of the
    /// member behind it.
    ///
    /// Returns no member if none of those tried can take the message; then the next message tries
    /// others.
    pub(crate) fn choose(
        &mut self,
        mut readiness: impl FnMut(&Match) -> Option<Readiness>,
    ) -> (Option<Match>, usize) {
        let (connected, others) = self.members.split_at(self.connected);
        let mut tried = 0;
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
            tried += steps;
            let step = best.map_or(steps, |(_, step)| step + 1);
            *turn = (from + step).checked_rem(members.len()).unwrap_or(0);
            if best.is_some() {
                let chosen = (from + step - 1) % members.len();
                return (members.get(chosen).copied(), tried);
            }
        }
        (None, tried)
    }

    /// Like [`choose`](Self::choose), but the turn stays with the chosen member.
    pub(crate) fn peek(
        &mut self,
        readiness: impl FnMut(&Match) -> Option<Readiness>,
    ) -> (Option<Match>, usize) {
        let turns = self.turns;
        let (chosen, tried) = self.choose(readiness);
        if chosen.is_some() {
            self.turns = turns;
        }
        (chosen, tried)
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

    /// The members chosen for the next messages.
    fn next<const N: usize>(group: &mut Group, ready: [Option<Readiness>; 3]) -> [SessionKey; N] {
        [(); N].map(|()| {
            let (chosen, _) = group.choose(|(key, _)| ready[*key as usize]);
            chosen.unwrap().0
        })
    }

    #[test]
    fn equally_ready_members_take_turns() {
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
    fn readiest_member_is_chosen_or_none() {
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
    fn turn_continues_when_members_join_and_leave() {
        let mut group = three();
        assert_eq!(next(&mut group, [Some(Now); 3]), [0, 1]);
        assert!(group.leave(0) && !group.leave(0));
        let mut both: [_; 2] = next(&mut group, [Some(Now); 3]);
        both.sort_unstable();
        assert_eq!(both, [1, 2]);
        assert!(group.leave(2));
        assert!(
            !group.join((1, OPTIONS), true),
            "a second subscription replaces the first one"
        );
        assert_eq!(next(&mut group, [Some(Now); 3]), [1, 1]);
        assert!(group.leave(1) && group.is_empty());
        assert_eq!(group.choose(|_| Some(Now)), (None, 0));
    }

    #[test]
    fn message_tries_few_of_many_members() {
        const MEMBERS: u32 = 4000;
        let mut group = Group::new((0, OPTIONS), false);
        (1..MEMBERS).for_each(|key| assert!(group.join((key, OPTIONS), key % 2 == 0)));
        let tried_max = GROUP_MEMBERS_ASKED_MAX;
        let (chosen, tried) = group.choose(|(key, _)| (key % 2 == 1).then_some(Absent));
        assert!(chosen.is_some() && tried == tried_max + 1, "{tried}");
        assert_eq!(group.choose(|_| None), (None, 2 * tried_max));
        assert_eq!(group.choose(|_| Some(Later)).1, tried_max);
        // One of the next messages finds the only member with room.
        let found = (0..MEMBERS as usize / tried_max).any(|_| {
            group
                .choose(|(key, _)| (*key == 7).then_some(Absent))
                .0
                .is_some()
        });
        assert!(found);
    }
}
