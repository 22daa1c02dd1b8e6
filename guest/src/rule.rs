//! The standard policy with an additional rule, which suffices for most policies.
//!
//! A rule sees only well-formed requests and never writes a reply; the standard policy does both.

use std::marker::PhantomData;

use statehouse_policy::{
    Change, Dialect, Host, Info, Notification, Outcome, Policy, Request, Span,
};

use crate::{Command, Refusal, Standard};

/// A condition that a request must meet before the standard policy executes it. [`Ruled`] makes a
/// policy of it.
///
/// A rule that protects keys from reads must also refuse each [`Command::Follow`] of a prefix that
/// is a prefix of a protected key, the empty one included: its notifications contain the values.
pub trait Rule: 'static {
    /// The policy's name, for the host's log and metrics.
    const NAME: &'static str;

    /// The policy's version.
    const VERSION: &'static str;

    /// Decides whether the standard policy may execute this command. Writes staged through `host`
    /// commit in either case.
    ///
    /// # Errors
    ///
    /// The refusal that the client is answered with.
    fn admit(host: &mut impl Host, request: &Request, command: &Command) -> Result<(), Refusal>;
}

/// The standard policy with a [`Rule`]. It has the standard commands and no options.
pub struct Ruled<R> {
    standard: Standard,
    rule: PhantomData<fn() -> R>,
}

impl<R: Rule> Policy for Ruled<R> {
    fn describe() -> Info {
        Info {
            name: R::NAME.to_owned(),
            version: R::VERSION.to_owned(),
            ..Standard::describe()
        }
    }

    fn configure(options: &[(String, String)]) -> Result<Self, String> {
        Ok(Self {
            standard: Standard::configure(options)?,
            rule: PhantomData,
        })
    }

    fn route(&self, payload: &[u8]) -> Option<Span> {
        self.standard.route(payload)
    }

    fn handle(&self, host: &mut impl Host, request: &Request) -> Outcome {
        if let Some(command) = self.standard.command(request)
            && let Err(refusal) = R::admit(host, request, &command)
        {
            return refusal.outcome(request, Some(command.index()));
        }
        self.standard.handle(host, request)
    }

    fn notify(&self, change: &Change, dialect: Dialect) -> Notification {
        self.standard.notify(change, dialect)
    }
}
