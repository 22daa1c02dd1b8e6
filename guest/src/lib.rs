#![doc = include_str!("../README.md")]
//!
//! # Parts
//!
//! Only this crate knows RESP, the names of commands and the texts of replies; the host moves
//! bytes.
//!
//! * `command`: parses a payload into a `Command`.
//! * `semantics`: executes each command, check by check; calls `scan` for SCAN.
//! * `fence`: checks fencing tokens.
//! * `scan`, `glob`: list the keys that match a pattern, page by page.
//! * `reply`: all reply bytes.
//! * `notify`: all notification bytes.
//! * `rule`: the standard policy with an additional rule.
//! * `limits`: all limits, with reasons.
//!
//! Allocations depend only on received bytes, never on lengths that a client claims.

#![deny(unsafe_code)]

mod command;
pub mod fence;
mod glob;
mod limits;
mod notify;
mod reply;
mod rule;
mod scan;
mod semantics;

use statehouse_policy::{
    Change, Dialect, Host, Info, Notification, Outcome, Policy, Request, Span,
};

pub use command::{Command, Condition, Follow, Set};
pub use reply::Refusal;
pub use rule::{Rule, Ruled};

/// The policy that a Statehouse host contains. Another policy can build on it by a dependency on
/// this crate without default features, so that only one of the two is exported.
///
/// A policy that only refuses some requests is a [`Rule`]. A policy that adds commands holds a
/// `Standard`, created by `configure`, handles its own commands, and passes on all others. Both
/// enforce fencing tokens with [`fence`]. A policy may access a key before it passes a command on:
/// the rights of all accesses are checked.
#[derive(Debug, Clone, Copy)]
pub struct Standard(());

impl Standard {
    /// The command of a request; none if [`handle`](Policy::handle) would answer an error of form.
    #[must_use]
    pub fn command(&self, request: &Request) -> Option<Command> {
        command::parse(&request.payload, request.dialect).ok()
    }
}

impl Policy for Standard {
    fn describe() -> Info {
        Info {
            name: "standard".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commands: command::Verb::NAMES.map(str::to_owned).to_vec(),
        }
    }

    fn configure(options: &[(String, String)]) -> Result<Self, String> {
        match options.first() {
            None => Ok(Self(())),
            Some((name, _)) => Err(format!(
                "the standard policy has no options: take `{name}` out of the configuration"
            )),
        }
    }

    fn route(&self, payload: &[u8]) -> Option<Span> {
        // The dialect matters only for KEYNOTIFY in the preview, where routing a key does no harm.
        command::parse(payload, Dialect::Sdk).ok()?.key()
    }

    fn handle(&self, host: &mut impl Host, request: &Request) -> Outcome {
        semantics::handle(host, request)
    }

    fn notify(&self, change: &Change, dialect: Dialect) -> Notification {
        notify::notify(change, dialect)
    }
}

#[cfg(feature = "component")]
statehouse_policy::export!(Standard);
