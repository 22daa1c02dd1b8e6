//! A shared subscription: the sessions that take turns at the messages of one filter (section 4.8.2).
//!
//! In come members with the options of each, and for every message how ready a member is; out goes the one that gets it.
//! Never looks into a session or a message.

use crate::router::{Match, SessionKey, Subscription};

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
    members: Vec<Match>,
    /// The member that is asked first.
    turn: usize,
}

impl Group {
    pub(crate) fn new(first: Match) -> Self {
        Self {
            members: vec![first],
            turn: 0,
        }
    }

    /// Adds a member, or replaces its options. True where it is new.
    pub(crate) fn join(&mut self, session: SessionKey, subscription: Subscription) -> bool {
        let known = self.members.iter_mut().find(|(key, _)| *key == session);
        if let Some((_, options)) = known {
            *options = subscription;
            return false;
        }
        self.members.push((session, subscription));
        true
    }

    /// Removes a member. False where it is none. The turn of the others stays.
    pub(crate) fn leave(&mut self, session: SessionKey) -> bool {
        let Some(at) = self.members.iter().position(|(key, _)| *key == session) else {
            return false;
        };
        self.members.remove(at);
        self.turn -= usize::from(at < self.turn);
        true
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// The readiest member, among equals the one whose turn it is; the next turn is that of the one behind it. None where
    /// nobody can take the message.
    pub(crate) fn choose(
        &mut self,
        mut readiness: impl FnMut(&Match) -> Option<Readiness>,
    ) -> Option<Match> {
        let (before, from) = self.members.split_at(self.turn.min(self.members.len()));
        let in_turn = from.iter().chain(before);
        let mut best: Option<(Readiness, usize)> = None;
        for (step, member) in in_turn.enumerate() {
            let Some(ready) = readiness(member) else {
                continue;
            };
            if best.is_none_or(|(best, _)| ready > best) {
                best = Some((ready, step));
            }
            if ready == Readiness::Now {
                break;
            }
        }
        let (_, step) = best?;
        let at = (self.turn + step) % self.members.len();
        self.turn = (at + 1) % self.members.len();
        self.members.get(at).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::{
        Readiness::{Absent, Later, Now},
        *,
    };
    use crate::QoS;

    const OPTIONS: Subscription = Subscription {
        qos: QoS::AtLeastOnce,
        no_local: false,
        retain_as_published: false,
        id: None,
    };

    /// Members 0, 1, 2.
    fn three() -> Group {
        let mut group = Group::new((0, OPTIONS));
        assert!(group.join(1, OPTIONS) && group.join(2, OPTIONS));
        group
    }

    /// Who gets the next messages.
    fn next<const N: usize>(group: &mut Group, ready: [Option<Readiness>; 3]) -> [SessionKey; N] {
        [(); N].map(|()| group.choose(|(key, _)| ready[*key as usize]).unwrap().0)
    }

    #[test]
    fn equals_take_turns() {
        for ready in [Now, Later, Absent] {
            assert_eq!(next(&mut three(), [Some(ready); 3]), [0, 1, 2, 0]);
        }
    }

    #[test]
    fn the_readiest_comes_first_and_nobody_where_none_is_ready() {
        let mut group = three();
        assert_eq!(
            next(&mut group, [Some(Absent), Some(Later), Some(Now)]),
            [2, 2]
        );
        assert_eq!(next(&mut group, [Some(Absent), Some(Later), None]), [1, 1]);
        assert_eq!(next(&mut group, [Some(Absent), None, None]), [0, 0]);
        assert_eq!(group.choose(|_| None), None);
    }

    #[test]
    fn the_turn_stays_where_members_come_and_go() {
        let mut group = three();
        assert_eq!(next(&mut group, [Some(Now); 3]), [0, 1]);
        assert!(group.leave(0) && !group.leave(0));
        assert_eq!(next(&mut group, [Some(Now); 3]), [2, 1]);
        assert!(group.leave(2));
        assert!(
            !group.join(1, OPTIONS),
            "a second subscription is no second member"
        );
        assert_eq!(next(&mut group, [Some(Now); 3]), [1, 1]);
        assert!(group.leave(1) && group.is_empty());
        assert_eq!(group.choose(|_| Some(Now)), None);
    }
}
