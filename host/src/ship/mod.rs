//! Ways to ship a policy: who may, and what comes over a directory or over MQTT.
//!
//! What enters: files and orders from outside, all of them hostile until a signature says otherwise. What leaves:
//! calls of [`Control`](crate::control::Control). Nothing here touches the table of keys or the path of a request.

mod drop;
mod gate;
mod keys;
mod order;
mod signature;
mod topic;
mod trust;

pub use drop::Drop;
pub use gate::{Gate, ShipError};
pub use keys::{KeyError, decode_base64, encode_base64, generate, public_key, secret_key};
pub use order::{Action, Order, OrderError};
pub use signature::{SignatureError, public, sign, signers, verify};
pub use topic::{CHUNKS, ORDER, PolicyOrders, SIGNATURE, STATUS};
pub use trust::{Trust, TrustError, digits, id, sign_order};
