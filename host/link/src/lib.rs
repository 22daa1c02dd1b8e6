#![doc = include_str!("../README.md")]
//!
//! # Parts and invariants
//!
//! The [`Owner`] of a session puts messages, which are published at QoS 1, into its [`Outlet`]. The
//! outlet stores them in a ledger and passes them to rumqttc as far as the broker has room. [`run`]
//! polls rumqttc and reports the results to the outlet and the owner. [`Attempts`] connect, to each
//! address of a name. The owner receives incoming
//! messages in order and completes them by hand if it wants to.
//!
//! Invariants:
//!
//! * A message must not be lost with a connection or a session. It stays in the ledger until the
//!   owner removes it, unless the broker refuses it or closes every connection because of it.
//! * PUBACKs must be sent in the order of receipt, each after the messages that the received one
//!   caused. Otherwise a crash could lose a response whose request was acknowledged.
//! * The crate never reads a payload and knows no topics.
//!
//! All faults of rumqttc 0.25 are handled here, and a comment names each of them.
#![forbid(unsafe_code)]

mod addresses;
mod ledger;
pub mod limits;
mod link;
mod loss;
mod options;
mod outlet;
mod random;
mod reason;
mod receipts;
#[cfg(target_os = "linux")]
mod relay;
pub mod tls;

pub use addresses::Attempts;
pub use link::{Accepted, Arrival, End, Owner, Verdict, run};
pub use loss::{
    describe, describe_certificate, describe_io, describe_reason, is_refusal, is_unavailable,
    is_untrusted,
};
pub use options::{Options, Place};
pub use outlet::{Message, Outlet};
pub use random::random;
pub use reason::{describe_suback, reason_name};
