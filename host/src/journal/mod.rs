//! Makes effects durable, in the order of the steps that had them.
//!
//! What enters: the effects of a step. What leaves: a position, and how far everything is durable.
//! Nothing leaves the host before its position is.

use crate::store::Effects;

/// A place in the order of all steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position(pub u64);

/// Where effects are kept.
pub trait Journal: Send {
    /// Appends what a step did and says where.
    fn append(&mut self, effects: &Effects) -> Position;
    /// Everything up to here is durable.
    fn durable(&self) -> Position;
    /// What a start says about it: one line for the operator.
    fn promise(&self) -> &'static str;
}

/// Keeps nothing: every position counts as durable at once.
#[derive(Default)]
pub struct Memory {
    last: Position,
}

impl Journal for Memory {
    fn append(&mut self, _effects: &Effects) -> Position {
        self.last.0 += 1;
        self.last
    }

    fn durable(&self) -> Position {
        self.last
    }

    fn promise(&self) -> &'static str {
        "the store is in memory: a restart forgets everything"
    }
}
