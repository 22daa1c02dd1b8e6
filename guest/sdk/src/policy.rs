//! What an author implements.

use crate::{Change, Dialect, Host, Info, Notification, Outcome, Request, Span};

/// Command logic. One value lives as long as an instance of the component.
///
/// A policy is a function of what it is given: the same request over the same table must give the same
/// outcome, on a fresh instance too, because the host runs a duplicate again and owes it the same bytes.
pub trait Policy: Sized + 'static {
    /// Name, version and commands, for the host's log and metrics.
    fn describe() -> Info;

    /// Makes the policy from the operator's options.
    ///
    /// # Errors
    ///
    /// A sentence that says which option is wrong; the host then refuses this policy.
    fn configure(options: &[(String, String)]) -> Result<Self, String>;

    /// Where the key is that a request is about, if it is about one. Asked only where requests are routed
    /// by key; no table can be reached from here.
    fn route(&self, payload: &[u8]) -> Option<Span>;

    /// Runs one request. What it stages through `host` commits together when it returns.
    fn handle(&self, host: &mut impl Host, request: &Request) -> Outcome;

    /// What the watchers of one dialect are told of a change.
    fn notify(&self, change: &Change, dialect: Dialect) -> Notification;
}
