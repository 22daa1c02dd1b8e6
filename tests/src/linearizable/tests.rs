//! The checker must accept exactly the linearizable histories.

use super::{Answer as A, Command as C, *};
use crate::dice::Dice;

fn op(asked: u64, at: u64, command: Command, answer: Answer) -> Operation {
    Operation {
        answered: Some((at, answer)),
        ..lost(asked, command)
    }
}

fn read(asked: u64, n: u64, version: Version) -> Operation {
    op(asked, asked + 1, C::Get, A::Value(n, version))
}

fn lost(asked: u64, command: Command) -> Operation {
    lost_by(asked, u64::MAX, command)
}

fn lost_by(asked: u64, over: u64, command: Command) -> Operation {
    Operation {
        client: String::new(),
        command,
        asked,
        answered: None,
        over,
    }
}

#[track_caller]
fn accepts(history: &[Operation]) {
    if let Err(violation) = check(history) {
        panic!("{violation:#?}");
    }
}

#[track_caller]
fn rejects(history: &[Operation]) {
    check(history).expect_err("no order explains it");
}

const V: [Version; 6] = [(1, 0), (1, 1), (2, 0), (3, 0), (4, 0), (5, 0)];

#[test]
fn sequential_history_is_accepted() {
    accepts(&[]);
    accepts(&[
        op(0, 1, C::Get, A::Missing),
        op(2, 3, C::Del, A::Missing),
        op(4, 5, C::DelSame(7), A::Missing),
        op(6, 7, C::SetNew(7), A::Set(V[0])),
        op(8, 9, C::SetNew(8), A::Refused(V[0])),
        op(10, 11, C::SetSame(7), A::Set(V[1])),
        op(12, 13, C::SetSame(8), A::Refused(V[1])),
        op(14, 15, C::Get, A::Value(7, V[1])),
        op(16, 17, C::DelSame(8), A::Refused(V[1])),
        op(18, 19, C::DelSame(7), A::Removed(V[1])),
        op(20, 21, C::SetSame(9), A::Set(V[2])),
        op(22, 23, C::Set(10), A::Set(V[3])),
        op(24, 25, C::Del, A::Removed(V[3])),
        op(26, 27, C::Get, A::Missing),
    ]);
}

#[test]
fn impossible_answer_is_rejected() {
    let set = op(0, 1, C::Set(1), A::Set(V[0]));
    for (command, answer) in [
        (C::Get, A::Missing),
        (C::Get, A::Value(2, V[0])),
        (C::Get, A::Value(1, V[1])),
        (C::Get, A::Refused(V[0])),
        (C::Get, A::Removed(V[0])),
        (C::Set(2), A::Refused(V[0])),
        (C::Set(2), A::Set(V[0])),
        (C::Set(2), A::Missing),
        (C::SetNew(2), A::Set(V[1])),
        (C::SetNew(2), A::Refused(V[1])),
        (C::SetSame(2), A::Set(V[1])),
        (C::SetSame(1), A::Refused(V[0])),
        (C::Del, A::Missing),
        (C::Del, A::Removed(V[1])),
        (C::Del, A::Refused(V[0])),
        (C::DelSame(1), A::Refused(V[0])),
        (C::DelSame(1), A::Missing),
        (C::DelSame(2), A::Removed(V[0])),
    ] {
        rejects(&[set.clone(), op(2, 3, command, answer)]);
    }
}

#[test]
fn overlapping_commands_may_have_either_order() {
    let (one, two) = (
        op(0, 5, C::Set(1), A::Set(V[1])),
        op(1, 4, C::Set(2), A::Set(V[0])),
    );
    accepts(&[
        one.clone(),
        two.clone(),
        op(6, 7, C::Get, A::Value(1, V[1])),
    ]);
    // Versions determine the order.
    rejects(&[
        one.clone(),
        two.clone(),
        op(6, 7, C::Get, A::Value(2, V[0])),
    ]);
    // A concurrent reader may see either value, but not the later one before the earlier one.
    let (early, late) = (A::Value(2, V[0]), A::Value(1, V[1]));
    accepts(&[
        one.clone(),
        two.clone(),
        op(2, 3, C::Get, early),
        op(6, 8, C::Get, late),
    ]);
    rejects(&[one, two, op(2, 3, C::Get, late), op(6, 8, C::Get, early)]);
}

#[test]
fn lost_write_is_rejected() {
    rejects(&[
        op(0, 1, C::Set(1), A::Set(V[0])),
        op(2, 3, C::Get, A::Missing),
    ]);
    rejects(&[
        op(0, 1, C::Set(1), A::Set(V[0])),
        op(2, 3, C::Set(2), A::Set(V[1])),
        op(4, 5, C::Get, A::Value(1, V[0])),
    ]);
}

#[test]
fn stale_read_is_rejected() {
    let writes = [
        op(0, 1, C::Set(1), A::Set(V[0])),
        op(2, 10, C::Set(2), A::Set(V[1])),
    ];
    accepts(&[&writes[..], &[read(3, 1, V[0]), read(5, 2, V[1])]].concat());
    rejects(&[&writes[..], &[read(3, 2, V[1]), read(5, 1, V[0])]].concat());
}

#[test]
fn double_effect_is_rejected() {
    // A redelivered SET was executed again and overwrote a later write.
    rejects(&[
        op(0, 1, C::Set(1), A::Set(V[0])),
        op(2, 3, C::Set(2), A::Set(V[1])),
        op(4, 5, C::Get, A::Value(1, V[2])),
    ]);
    // A SET was executed twice in a row, so the version differs.
    rejects(&[
        op(0, 1, C::Set(1), A::Set(V[0])),
        op(2, 3, C::Get, A::Value(1, V[1])),
    ]);
    // Two SET NX succeeded, and one value was removed twice.
    rejects(&[
        op(0, 5, C::SetNew(1), A::Set(V[0])),
        op(1, 4, C::SetNew(2), A::Set(V[1])),
    ]);
    rejects(&[
        op(0, 1, C::Set(1), A::Set(V[0])),
        op(2, 5, C::DelSame(1), A::Removed(V[0])),
        op(3, 4, C::Del, A::Removed(V[0])),
    ]);
    // The redelivery of a SET NX found the value of its own first execution.
    rejects(&[op(0, 9, C::SetNew(1), A::Refused(V[0]))]);
}

#[test]
fn decreasing_version_is_rejected() {
    rejects(&[
        op(0, 1, C::Set(1), A::Set(V[1])),
        op(2, 3, C::Set(2), A::Set(V[0])),
    ]);
    rejects(&[
        op(0, 1, C::Set(1), A::Set(V[1])),
        op(2, 3, C::Set(2), A::Set(V[1])),
    ]);
    // Also after a removal.
    rejects(&[
        op(0, 1, C::Set(1), A::Set(V[1])),
        op(2, 3, C::Del, A::Removed(V[1])),
        op(4, 5, C::Set(2), A::Set(V[0])),
    ]);
}

#[test]
fn unanswered_request_may_take_effect_or_not() {
    let (set, unknown) = (op(0, 1, C::Set(1), A::Set(V[0])), lost(2, C::Set(2)));
    accepts(&[set.clone(), unknown.clone(), read(4, 1, V[0])]);
    accepts(&[set.clone(), unknown.clone(), read(4, 2, V[1])]);
    // It may take effect late, after later reads.
    accepts(&[
        set.clone(),
        unknown.clone(),
        read(4, 1, V[0]),
        read(6, 2, V[1]),
    ]);
    // It must not take effect twice, be undone, have two versions, or have another write's version.
    rejects(&[
        set.clone(),
        unknown.clone(),
        read(4, 2, V[1]),
        read(6, 1, V[0]),
    ]);
    rejects(&[
        set.clone(),
        unknown.clone(),
        read(4, 2, V[1]),
        read(6, 2, V[2]),
    ]);
    rejects(&[set.clone(), unknown.clone(), read(4, 2, V[0])]);
    let again = op(6, 7, C::Set(3), A::Set(V[2]));
    rejects(&[
        set.clone(),
        unknown.clone(),
        read(4, 2, V[1]),
        again,
        read(8, 2, V[3]),
    ]);
    // It must not take effect before it was sent.
    rejects(&[set.clone(), lost(8, C::Set(2)), read(4, 2, V[1])]);
    // No read saw the request, but another answer depends on its effect.
    accepts(&[lost(0, C::Set(1)), op(2, 3, C::SetNew(2), A::Refused(V[0]))]);
    accepts(&[set.clone(), lost(2, C::Del), op(4, 5, C::Get, A::Missing)]);
    rejects(&[
        set.clone(),
        lost(2, C::DelSame(3)),
        op(4, 5, C::Get, A::Missing),
    ]);
    rejects(&[set, lost(2, C::SetNew(3)), read(4, 3, V[1])]);
}

#[test]
fn unanswered_request_has_no_effect_after_its_process() {
    let set = op(0, 1, C::Set(1), A::Set(V[0]));
    let unknown = lost_by(2, 6, C::Set(2));
    accepts(&[set.clone(), unknown.clone(), read(4, 2, V[1])]);
    // No read happened before the request was over.
    accepts(&[set.clone(), unknown.clone(), read(8, 2, V[1])]);
    accepts(&[
        set.clone(),
        unknown.clone(),
        read(5, 1, V[0]),
        read(8, 2, V[1]),
    ]);
    rejects(&[set, unknown, read(8, 1, V[0]), read(10, 2, V[1])]);
}

/// Tries all orders without memoization.
fn brute_force(state: State, latest: u64, left: &[Operation]) -> bool {
    if left.iter().all(|operation| operation.answered.is_none()) {
        return true;
    }
    (0..left.len()).any(|n| {
        let (one, mut others) = (&left[n], left.to_vec());
        others.remove(n);
        let first = others
            .iter()
            .all(|other| other.answered.is_none_or(|(at, _)| at > one.asked));
        let answer = one.answered.map(|(_, answer)| answer);
        let (late, latest) = (one.over < latest, latest.max(one.asked));
        first
            && !(late && answer.is_none())
            && state
                .after(one.command, answer)
                .is_some_and(|next| brute_force(next, latest, &others))
    })
}

/// The search must agree with [`brute_force`] on short random histories with right and wrong
/// answers.
#[test]
fn search_agrees_with_brute_force() {
    let mut dice = Dice::of(7);
    let (mut right, mut wrong) = (0, 0);
    for _ in 0..20_000 {
        let count = 2 + dice.below(4);
        let mut state = State::default();
        let mut history: Vec<Operation> = Vec::new();
        for n in 0..count {
            let value = dice.below(3);
            let command = *dice.of_these(&[
                C::Set(value),
                C::SetNew(value),
                C::SetSame(value),
                C::Get,
                C::Del,
                C::DelSame(value),
            ]);
            // Mostly an answer that a store could give, and sometimes a wrong one.
            let version = V[dice.below(6) as usize];
            let newer = V[(n as usize).min(5)];
            let answers: Vec<Answer> = [A::Set(newer), A::Missing]
                .into_iter()
                .chain(
                    [newer, version]
                        .into_iter()
                        .chain(state.entry.and_then(|it| it.1))
                        .flat_map(|v| {
                            let value = state.entry.map_or(0, |it| it.0);
                            [A::Value(value, v), A::Removed(v), A::Refused(v)]
                        }),
                )
                .collect();
            let fit: Vec<Answer> = answers
                .iter()
                .copied()
                .filter(|answer| state.after(command, Some(*answer)).is_some())
                .collect();
            let answer = if dice.below(12) == 0 || fit.is_empty() {
                *dice.of_these(&answers)
            } else {
                *dice.of_these(&fit)
            };
            state = state.after(command, Some(answer)).unwrap_or(state);
            // Spread the times, so that neighbours overlap.
            let asked = (n * 10 + 40).saturating_sub(dice.below(30)) * 64 + n;
            let at = (n * 10 + 41 + dice.below(30)) * 64 + n;
            history.push(Operation {
                client: n.to_string(),
                command,
                asked,
                answered: (dice.below(5) > 0).then_some((at, answer)),
                over: at,
            });
        }
        let explained = brute_force(State::default(), 0, &history);
        assert_eq!(check(&history).is_ok(), explained, "{history:#?}");
        *(if explained { &mut right } else { &mut wrong }) += 1;
    }
    assert!(right > 1000 && wrong > 1000, "{right} right, {wrong} wrong");
}

/// The search must end in time on a long history with many concurrent requests.
#[test]
fn long_history_is_checked_in_time() {
    let mut dice = Dice::of(11);
    let mut history = Vec::new();
    for n in 0..800_u64 {
        // Eight concurrent requests. The writes are in the order of their versions.
        let (asked, at) = (n * 10, n * 10 + 5 + dice.below(80));
        history.push(if n % 50 == 7 {
            lost(asked, C::SetNew(n))
        } else {
            op(asked, at, C::Set(n), A::Set((n + 1, 0)))
        });
    }
    accepts(&history);
    history.push(op(9_000, 9_001, C::Get, A::Missing));
    rejects(&history);
}
