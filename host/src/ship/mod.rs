//! Ways to ship a policy: who may, and what comes over a directory or over MQTT.
//!
//! What enters: files and orders from outside, all of them hostile until a signature says otherwise. What leaves:
//! calls of `Control`. Nothing here touches the table of keys or the path of a request.

mod keys;
mod signature;
mod trust;

pub use keys::{KeyError, decode_base64, encode_base64, generate, public_key, secret_key};
pub use signature::{SignatureError, public, sign, verify};
pub use trust::{Trust, TrustError, digits, id, sign_order};
