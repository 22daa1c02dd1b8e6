//! Runs the guest: WebAssembly components that decide what a command means.
//!
//! What enters: a request, and a [`Host`] through which the guest reads and stages. What leaves: an
//! outcome, or a [`Failure`] after which nothing of the call may be used.
//!
//! Architecture invariant: a policy never sees a socket, a file or a clock, and nothing here knows
//! what a command is.

mod bindings;
mod budget;
mod engine;
mod guest;
mod instance;
mod modules;
mod registry;

pub use bindings::exports::statehouse::policy::handler::Info;
pub use bindings::statehouse::policy::types::{
    Access, Body, Bytes as Given, Change, Dialect, Entry, Event, Fault, Frame, Hlc, Notification,
    Outcome, Page, Repeat, Request, Span, Stamp,
};
pub use budget::Failure;
pub use engine::{Engine, LoadError, Policy};
pub use guest::{Denial, Host, Put};
pub(crate) use instance::slice;
pub use instance::{Call, Instance};
pub use modules::Modules;
pub use registry::{Counters, Registry};
