//! The policies of a running store.
//!
//! * [`startup`]: loads the recorded assignment at a start.
//! * [`manager`]: loads policies and changes which one is active, while requests are served.
//! * [`delivery`]: policies from outside: signatures, signed orders over MQTT, the watched
//!   directory.

pub mod delivery;
pub mod manager;
pub(crate) mod startup;
