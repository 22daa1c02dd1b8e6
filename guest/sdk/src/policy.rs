//! The trait that a policy implements.

use crate::{Change, Dialect, Host, Info, Notification, Outcome, Request, Span};

/// Command logic. One value lives as long as an instance of the component.
///
/// A policy must be deterministic: the same request on the same table must give the same outcome,
/// on a fresh instance too. The host re-executes redelivered requests on fresh instances, and the
/// response must have the same bytes.
pub trait Policy: Sized + 'static {
    /// Name, version and commands, for the host's log and metrics.
    fn describe() -> Info;

    /// Creates the policy from the operator's options.
    ///
    /// # Errors
    ///
    /// A sentence that names the wrong option; the host then refuses this policy.
    fn configure(options: &[(String, String)]) -> Result<Self, String>;

    /// The span of the key that a request concerns, if any. The host calls this only if requests
    /// are routed by key. The table is not accessible from here.
    fn route(&self, payload: &[u8]) -> Option<Span>;

    /// Executes one request. The writes that it stages through `host` commit together when it
    /// returns.
    fn handle(&self, host: &mut impl Host, request: &Request) -> Outcome;

    /// The notification of a change, for the watchers of one dialect.
    fn notify(&self, change: &Change, dialect: Dialect) -> Notification;
}
