//! Ways to ship a policy: signatures, the drop directory, and orders over MQTT.
//!
//! Files and orders from outside lead to calls of [`Control`](crate::policies::manager::Control).
//! An input must be treated as hostile until its signature is verified. This module must never
//! touch the store's table or the path of a request.

mod drop;
mod gate;
mod keys;
mod order;
mod signature;
mod topic;
mod trust;

pub use drop::DropDirectory;
pub use gate::{Gate, ShipError};
pub use keys::{KeyError, generate, public_key, secret_key};
pub use order::{Action, Order, OrderError};
pub use signature::{SignatureError, public, sign, signers, verify};
pub use topic::{PolicyOrders, SIGNATURE, STATUS};
pub use trust::{Trust, TrustError, digits, id, sign_order};
