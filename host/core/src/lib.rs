//! The deterministic state machine of the state store.
//!
//! In go a request and a time; out come effects: writes, an answer, notifications. The machine does
//! no I/O, takes no lock and reads no clock, so that recovery, replay and shadow runs repeat exactly
//! what happened.
//!
//! * [`request`]: makes a PUBLISH a request: dialect, properties, response topic. It never reads a payload.
//! * [`store`]: the table, transactions over it, watches, quotas, and the memory of requests that may be redelivered.
//! * [`policy`]: runs the guest that decides. It never sees a socket, a file or a clock.
//! * [`log`]: the record format, the log that keeps records, and the image that they are read into.
//! * [`words`]: a request as a person reads it, for logs and tools.
//! * [`clock`]: time and versions (hybrid logical clocks).
//! * [`limits`]: every bound, with its unit and its reason.
//!
//! Authorization comes in as data ([`request::Request::rights`]): this crate does not know how rights are granted.
#![forbid(unsafe_code)]

pub mod clock;
pub mod limits;
pub mod log;
pub mod policy;
pub mod request;
pub mod store;
pub mod words;

pub use statehouse_precompiled::STANDARD_POLICY;
