//! Runs the guest: WebAssembly components that decide what a command means.
//!
//! What enters: a request, and a [`Host`] through which the guest reads and stages. What leaves: an
//! outcome, or a [`Failure`] after which nothing of the call may be used.
//!
//! Architecture invariant: a policy never sees a socket, a file or a clock, and nothing here knows
//! what a command is.

mod assignment;
mod bindings;
mod budget;
mod counters;
mod digest;
mod engine;
mod guard;
mod guest;
mod instance;
mod registry;
pub mod sections;
mod selector;
mod swaps;
mod work;

pub use assignment::{
    Assignment, AssignmentError, Canary, CanaryRule, Prefix, Role, RolledBack, Route, Shadow,
};
pub use bindings::exports::statehouse::policy::handler::Info;
pub use bindings::statehouse::policy::types::{
    Access, Body, Bytes as Given, Change, Dialect, Entry, Event, Fault, Frame, Hlc, Notification,
    Outcome, Page, Repeat, Request, Span, Stamp,
};
pub use budget::Failure;
pub(crate) use budget::{Share, fuel};
pub use counters::Counters;
pub use digest::Digest;
pub use engine::{Engine, LoadError, Policy};
pub use guard::{Ended, Guard, GuardSettings, How};
pub use guest::{Denial, Host, Put};
pub(crate) use instance::slice;
pub use instance::{Call, Instance};
pub use registry::{Absent, Choice, Keyed, Part, Registry, Routes};
pub use selector::{Candidate, Selector, SelectorError};
pub use swaps::{Swap, Swaps};
pub use work::{Done, Failures, Work};
