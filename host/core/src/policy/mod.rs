//! Runs policies: WebAssembly components that implement the commands.
//!
//! A policy reads and stages through a [`Host`]. After a [`Failure`], nothing of the call may be
//! used.
//!
//! Invariant: a policy must never access a socket, a file or a clock, and this module must not
//! depend on the meaning of commands.

mod assignment;
mod bindings;
mod budget;
mod counters;
mod digest;
mod engine;
mod guard;
mod guest;
mod instance;
mod lines;
mod origin;
mod registry;
pub mod sections;
mod selector;
mod swaps;
mod work;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use assignment::{
    Assignment, AssignmentError, Canary, CanaryRule, Delivered, Prefix, Role, RolledBack, Route,
    Shadow,
};
pub use bindings::exports::statehouse::policy::handler::Info;
pub use bindings::statehouse::policy::follow::Scope;
pub use bindings::statehouse::policy::types::{
    Access, Body, Bytes as Given, Change, Dialect, Entry, Event, Fault, Frame, Hlc, Notification,
    Outcome, Page, Repeat, Request, Span, Stamp,
};
pub use budget::Failure;
pub(crate) use budget::{Share, fuel};
pub use counters::Counters;
pub use digest::Digest;
pub use engine::{Engine, LoadError, Policy, remedy};
pub use guard::{CallOutcome, EndedCall, Guard, GuardSettings};
pub use guest::{Denial, Host, Put, Reached};
pub(crate) use instance::slice;
pub use instance::{Call, Instance};
pub use lines::{Batch, Line, Lines, on_one_line};
pub use origin::{Act, Actor, Origin};
pub use registry::{Absent, Choice, KeyLookup, Part, Registry, Routes};
pub use selector::{BUILT_IN, Candidate, Selector, SelectorError};
pub use swaps::{Swap, Swaps};
pub use work::{Done, Failures, LastFailure, Work};

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A poisoned lock only means that a thread panicked between two complete updates.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
