//! The standard policy: the commands of the state store protocol, in all three dialects.
//!
//! The bytes of a request enter; table operations and one reply leave. This is the only place that knows
//! RESP, the names of commands, or a word of a reply: the host moves bytes.
//!
//! * `command`: from bytes to a `Command`, or the error of form.
//! * `semantics`: what SET, GET, DEL, VDEL and KEYNOTIFY do, check by check.
//! * `fence`: what a fencing token must be.
//! * `scan`, `glob`: which keys a pattern names, page by page.
//! * `reply`: every byte string that is answered.
//! * `notify`: what watchers are told.
//! * `rule`: the standard policy and one rule more.
//! * `limits`: every bound, with its reason.
//!
//! Nothing here allocates by what a client claims, only by what it sent.

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

pub use command::{Command, Condition, Set};
pub use reply::Refusal;
pub use rule::{Rule, Ruled};

/// The policy that a Statehouse host brings along. Another policy can be built on top of it, and depends on this crate
/// without default features, so that only one of the two is exported.
///
/// One that refuses some requests and changes nothing else is a [`Rule`]. One that adds commands holds a `Standard`, made by
/// `configure`, handles what it adds itself and hands everything else on. Either respects fencing tokens by
/// [`fence`]. A key that it touches for one access it may hand on: the rights are those of all.
#[derive(Debug, Clone, Copy)]
pub struct Standard(());

impl Standard {
    /// The command that a request asks for; none where [`handle`](Policy::handle) would answer an error of form.
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
        // The dialect decides about KEYNOTIFY in the preview only, where a key that is routed does no harm.
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
