//! Whether what clients saw of one key can be explained by one command after the other, each at a moment between its
//! request and its answer (Herlihy and Wing, "Linearizability", 1990).
//!
//! The search is that of Wing and Gong with Lowe's memory of what failed ("Testing for linearizability", 2017). It
//! is our own because it is small, and because two things matter here that a general checker does not know: commands
//! with conditions, and requests whose connection broke, which may have had their effect at any time until the process
//! died, or never.
//! Keys are independent of each other, so each is checked alone. Versions are part of the model: they rise from
//! write to write, and whoever names one names that of the value, which also keeps the search short.

use std::collections::HashMap;

/// Wall and counter.
pub type Version = (u64, u32);

/// A command on the key. Values are numbers, best never the same twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// SET without options.
    Set(u64),
    /// SET NX.
    SetNew(u64),
    /// SET NEX with its own value.
    SetSame(u64),
    /// GET.
    Get,
    /// DEL.
    Del,
    /// VDEL.
    DelSame(u64),
}

/// What came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// A SET was done.
    Set(Version),
    /// A condition did not hold of the value of this version.
    Refused(Version),
    /// GET found this.
    Value(u64, Version),
    /// There is no such key.
    Missing,
    /// The value of this version was removed.
    Removed(Version),
}

/// One request. Times are from one clock that shows no moment twice.
#[derive(Clone, Debug)]
pub struct Operation {
    /// Who asked, to be shown.
    pub client: String,
    /// What.
    pub command: Command,
    /// When it was sent, or just before.
    pub asked: u64,
    /// What was answered, and a moment after that; nothing where that is not known.
    pub answered: Option<(u64, Answer)>,
    /// Where it was not answered: a moment after which it can have no effect any more.
    pub over: u64,
}

/// No order explains the history.
#[derive(Debug)]
pub struct Violation {
    /// The longest sequence that still had an explanation.
    pub explained: Vec<Operation>,
    /// What could have come next, and cannot.
    pub stuck_at: Vec<Operation>,
}

/// The key between two commands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct State {
    /// The version is not known where no answer told it.
    entry: Option<(u64, Option<Version>)>,
    /// The newest that is known to have been handed out.
    newest: Version,
}

impl State {
    /// The key after a command with this answer, any where it is not known; none where that cannot be the answer.
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

    /// An answer names the version of the entry.
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

/// A set of operations.
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

/// What has its place already.
#[derive(Clone)]
struct Placed {
    answered: Set,
    unanswered: Set,
    /// When the last of them was asked: what was over by then can have no place any more.
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

/// What failed, or is being tried: whoever has used the same and more of what may happen can do no better.
#[derive(Default)]
struct Tried(HashMap<(Set, u64, State), Vec<Set>>);

impl Tried {
    fn is_new(&mut self, placed: &Placed, state: State, operations: &[&Operation]) -> bool {
        let mut used = placed.unanswered.clone();
        for (n, operation) in operations.iter().enumerate() {
            // Used or not, it makes no difference any more.
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

/// A place that was filled, and what else could fill it.
struct Step {
    before: State,
    latest_before: u64,
    candidates: Vec<usize>,
    chosen: usize,
}

/// Looks for an order that explains the history of a key that was not there at first.
///
/// # Errors
/// Where there is none.
pub fn check(history: &[Operation]) -> Result<(), Box<Violation>> {
    let mut operations: Vec<&Operation> = history.iter().collect();
    operations.sort_by_key(|operation| operation.asked);
    let answered = |n: &usize| operations[*n].answered.is_some();
    let owed = (0..operations.len()).filter(answered).count();

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
    while done < owed {
        // The candidates are taken from the end.
        if let Some(n) = candidates.pop() {
            let answer = operations[n].answered.map(|(_, answer)| answer);
            let Some(next) = state.after(operations[n].command, answer) else {
                continue;
            };
            // What changed nothing and was not answered may as well not have happened.
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

/// What may come next: whatever was asked before any that waits was answered. Those whose answer is not known come
/// first in the list, and so are tried last.
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
        // Of those with an answer the one that was answered first is tried first.
        (answered.is_some(), answered.map(|(at, _)| u64::MAX - at))
    });
    all
}

#[cfg(test)]
mod tests;
