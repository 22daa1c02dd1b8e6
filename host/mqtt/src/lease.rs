//! Permission to decide, if several hosts could serve the same clients.
//!
//! A broker with a lease decides input only while the lease is valid: after the bytes of a client
//! were read, and before they have any effect. Otherwise a host that was replaced without its
//! knowledge could answer from an old state.

use std::{future::Future, pin::Pin};

/// The permission of one host to decide.
pub trait Lease: Send + Sync + 'static {
    /// Whether input that arrived before this call may be decided now. Called before every turn of
    /// a connection, so it must be cheap.
    fn is_valid(&self) -> bool;

    /// Waits until input that arrived before this call may be decided. The caller then decides
    /// without another wait. Returns false if this host must not decide any more.
    fn renewed(&self) -> Pin<Box<dyn Future<Output = bool> + Send + '_>>;
}
