//! Checks that the history of one key is linearizable: a sequential order must explain all answers,
//! with each command at a moment between its request and its answer (Herlihy and Wing,
//! "Linearizability", 1990).
//!
//! The search is that of Wing and Gong with Lowe's memoization ("Testing for linearizability",
//! 2017). A general checker lacks two features that this one needs: conditional commands, and
//! requests whose connection broke. Such a request may take effect at any time until the process
//! dies, or never.
//!
//! Keys are independent of each other, so each key is checked alone. Versions are part of the
//! model: every write has a higher version than the one before, and an answer with a version names
//! the version of the value. This also shortens the search.

use std::collections::HashMap;

/// Wall and counter.
pub type Version = (u64, u32);

/// A command on the key. Values are numbers and should be unique.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// SET without options.
    Set(u64),
    /// SET NX.
    SetNew(u64),
    /// SET NEX with its own value.
    SetSame(u64),
    Get,
    Del,
    /// VDEL.
    DelSame(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// A SET wrote a value with this version.
    Set(Version),
    /// The value with this version did not satisfy the condition.
    Refused(Version),
    /// GET found this value and version.
    Value(u64, Version),
    /// The key does not exist.
    Missing,
    /// The value with this version was removed.
    Removed(Version),
}

/// One request. All times are from one clock that never shows the same time twice.
#[derive(Clone, Debug)]
pub struct Operation {
    /// The client, for the failure message.
    pub client: String,
    pub command: Command,
    /// The time of sending, or just before.
    pub asked: u64,
    /// A time after the answer, and the answer. `None` if the outcome is unknown.
    pub answered: Option<(u64, Answer)>,
    /// For a request without an answer: the time after which it can have no effect.
    pub over: u64,
}

/// The history is not linearizable.
#[derive(Debug)]
pub struct Violation {
    /// The longest sequence that explains its answers.
    pub explained: Vec<Operation>,
    /// The operations that could have been next, none of which fits.
    pub stuck_at: Vec<Operation>,
}

/// The state of the key between two commands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct State {
    /// The value and its version. The version is unknown until an answer contains it.
    entry: Option<(u64, Option<Version>)>,
    newest: Version,
}

impl State {
    /// The state after a command with this answer, or with any answer if it is unknown. Returns
    /// `None` if this answer is impossible.
    fn after(self, command: Command, answer: Option<Answer>) -> Option<State> {
        let entry = self.entry;
        let value = entry.map(|(value, _)| value);
        let (writes, removes) = match command {
            Command::Set(new) => (Some(new), false),
            Command::SetNew(new) => (entry.is_none().then_some(new), false),
            Command::SetSame(new) => (value.is_none_or(|old| old == new).then_some(new), false),
            Command::Get => (None, false),
            Command::Del => (None, entry.is_some()),
            Command::DelSame(old) => (None, value == Some(old)),
        };
        let mut next = self;
        if let Some(new) = writes {
            next.entry = Some((new, None));
        }
        match answer {
            None => {}
            Some(Answer::Set(version)) if writes.is_some() => next = next.named(version)?,
            Some(Answer::Removed(version)) if removes => next = next.named(version)?,
            Some(Answer::Value(seen, version))
                if command == Command::Get && value == Some(seen) =>
            {
                next = next.named(version)?;
            }
            Some(Answer::Refused(version))
                if command != Command::Get && entry.is_some() && writes.is_none() && !removes =>
            {
                next = next.named(version)?;
            }
            Some(Answer::Missing) if entry.is_none() && writes.is_none() => {}
            Some(_) => return None,
        }
        if removes {
            next.entry = None;
        }
        Some(next)
    }

    /// Applies the version of the entry that an answer contains.
    fn named(mut self, version: Version) -> Option<State> {
        let (value, known) = self.entry?;
        match known {
            Some(known) => (known == version).then_some(self),
            None if version > self.newest => {
                self.newest = version;
                self.entry = Some((value, Some(version)));
                Some(self)
            }
            None => None,
        }
    }
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Set(Vec<u64>);

impl Set {
    fn has(&self, n: usize) -> bool {
        self.0[n / 64] >> (n % 64) & 1 == 1
    }

    fn flip(&mut self, n: usize) {
        self.0[n / 64] ^= 1 << (n % 64);
    }

    fn is_within(&self, other: &Set) -> bool {
        self.0
            .iter()
            .zip(&other.0)
            .all(|(one, two)| one & !two == 0)
    }
}

/// The operations that have a place in the order.
#[derive(Clone)]
struct Placed {
    answered: Set,
    unanswered: Set,
    /// The latest sending time among them. Unanswered operations that were over by then have no
    /// place any more.
    latest: u64,
}

impl Placed {
    fn has(&self, n: usize) -> bool {
        self.answered.has(n) || self.unanswered.has(n)
    }

    fn flip(&mut self, n: usize, operation: &Operation) {
        match operation.answered {
            Some(_) => self.answered.flip(n),
            None => self.unanswered.flip(n),
        }
    }
}

/// Searches that failed or are in progress. A search from the same state that has used a superset
/// of the unanswered operations cannot do better.
#[derive(Default)]
struct Tried(HashMap<(Set, u64, State), Vec<Set>>);

impl Tried {
    fn is_new(&mut self, placed: &Placed, state: State, operations: &[&Operation]) -> bool {
        let mut used = placed.unanswered.clone();
        for (n, operation) in operations.iter().enumerate() {
            // The operation cannot be placed any more, so it does not matter whether it was used.
            if used.has(n) && operation.over < placed.latest {
                used.flip(n);
            }
        }
        let key = (placed.answered.clone(), placed.latest, state);
        let known = self.0.entry(key).or_default();
        if known.iter().any(|less| less.is_within(&used)) {
            return false;
        }
        known.push(used);
        true
    }
}

/// A place in the order, with the remaining candidates for it.
struct Step {
    before: State,
    latest_before: u64,
    candidates: Vec<usize>,
    chosen: usize,
}

/// Searches for an order that explains the history of a key. The key must not exist at first. Fails
/// if no order explains the history.
pub fn check(history: &[Operation]) -> Result<(), Box<Violation>> {
    let mut operations: Vec<&Operation> = history.iter().collect();
    operations.sort_by_key(|operation| operation.asked);
    let answered = |n: &usize| operations[*n].answered.is_some();
    let goal = (0..operations.len()).filter(answered).count();

    let nothing = Set(vec![0; operations.len().div_ceil(64)]);
    let mut placed = Placed {
        answered: nothing.clone(),
        unanswered: nothing,
        latest: 0,
    };
    let mut state = State::default();
    let mut steps: Vec<Step> = Vec::new();
    let mut done = 0;
    let mut tried = Tried::default();
    let mut longest: Vec<usize> = Vec::new();
    let mut stuck_at: Vec<usize> = Vec::new();
    let mut candidates = candidates_of(&operations, &placed);
    while done < goal {
        // The candidates are taken from the end.
        if let Some(n) = candidates.pop() {
            let answer = operations[n].answered.map(|(_, answer)| answer);
            let Some(next) = state.after(operations[n].command, answer) else {
                continue;
            };
            // Without an answer and a change, the operation has the same result as if it never ran.
            if answer.is_none() && next == state {
                continue;
            }
            let latest_before = placed.latest;
            placed.flip(n, operations[n]);
            placed.latest = latest_before.max(operations[n].asked);
            if !tried.is_new(&placed, next, &operations) {
                placed.flip(n, operations[n]);
                placed.latest = latest_before;
                continue;
            }
            done += usize::from(answer.is_some());
            steps.push(Step {
                before: state,
                latest_before,
                candidates,
                chosen: n,
            });
            state = next;
            candidates = candidates_of(&operations, &placed);
            if steps.len() > longest.len() {
                longest = steps.iter().map(|step| step.chosen).collect();
                stuck_at.clone_from(&candidates);
            }
        } else {
            let Some(step) = steps.pop() else {
                let named = |all: Vec<usize>| all.into_iter().map(|n| operations[n].clone());
                return Err(Box::new(Violation {
                    explained: named(longest).collect(),
                    stuck_at: named(stuck_at).collect(),
                }));
            };
            placed.flip(step.chosen, operations[step.chosen]);
            done -= usize::from(operations[step.chosen].answered.is_some());
            placed.latest = step.latest_before;
            state = step.before;
            candidates = step.candidates;
        }
    }
    Ok(())
}

/// The operations that may be next: those that were sent before the first answer among the unplaced
/// operations. The caller tries the list from its end. So operations without an answer are at the
/// front, to be tried last.
fn candidates_of(operations: &[&Operation], placed: &Placed) -> Vec<usize> {
    let mut first_answer = u64::MAX;
    let mut all = Vec::new();
    for (n, operation) in operations.iter().enumerate() {
        if placed.has(n) {
            continue;
        }
        if operation.asked > first_answer {
            break;
        }
        match operation.answered {
            Some((at, _)) => first_answer = first_answer.min(at),
            None if operation.over < placed.latest => continue,
            None => {}
        }
        all.push(n);
    }
    all.sort_by_key(|n| {
        let answered = operations[*n].answered;
        // The operation with the earliest answer is tried first.
        (answered.is_some(), answered.map(|(at, _)| u64::MAX - at))
    });
    all
}

#[cfg(test)]
mod tests;
