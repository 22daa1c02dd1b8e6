//! One MQTT 5 session over rumqttc, over as many connections as it takes.
//!
//! What enters: messages that its [`Owner`] wants published at QoS 1, and which of the received ones it has settled. What
//! leaves: these messages, until the owner has taken them out; PUBACKs in the order of receipt, each behind the messages
//! that it is to wait for; and to the owner everything that came, in order. It never loses a message because a connection
//! or a session is lost, unless it is that message that the broker closes each connection for; it never reads one, and
//! knows nothing of topics. All faults of rumqttc 0.25 are met here, each named where it is met.
//!
//! The way of a message: the owner puts it into its [`Outlet`], which keeps it in a ledger and gives it to rumqttc as far
//! as the broker has room; [`run`] polls rumqttc, and tells outlet and owner what became of it.
#![forbid(unsafe_code)]

mod ledger;
pub mod limits;
mod link;
mod loss;
mod options;
mod outlet;
mod random;
mod receipts;
pub mod tls;

pub use link::{Arrival, End, Owner, Verdict, run};
pub use loss::{describe, describe_io};
pub use options::{Options, Place};
pub use outlet::{Message, Outlet};
pub use random::random;
