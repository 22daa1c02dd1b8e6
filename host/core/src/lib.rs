//! The deterministic state machine of the state store.
//!
//! It takes a request and a time, and returns effects: writes, an answer, notifications. The
//! machine does no I/O, takes no lock and reads no clock (except for traces), so that recovery,
//! replay and shadow runs repeat exactly what happened.
//!
//! * [`Core`]: the one place that decides. Everything below is called by it.
//! * [`request`]: parses a PUBLISH into a request (dialect, properties, response topic). It never
//!   reads a payload.
//! * [`store`]: the table, transactions, watches, quotas, and the dedup table.
//! * [`policy`]: runs the guest that implements the commands. It has no access to sockets, files or
//!   clocks.
//! * [`log`]: the record format, the trait of the log, and the image that recovery builds from
//!   records.
//! * [`trace`]: the trace context of a request.
//! * [`trial`]: the requests that a policy must answer before a store accepts it.
//! * [`words`]: the words of a request, for logs and tools.
//! * [`clock`]: time and versions (hybrid logical clocks).
//! * [`limits`]: every limit, with its unit and its reason.
//!
//! Authorization is an input ([`request::Request::grants`]): this crate does not know how rights
//! are granted.
#![forbid(unsafe_code)]

pub mod clock;
pub mod limits;
pub mod log;
mod machine;
pub mod policy;
pub mod request;
pub mod store;
pub mod trace;
pub mod trial;
pub mod words;

pub use machine::{Assigned, Core, Decision, Input, Now, Outcome, Output, Settings, Swapped};
pub use statehouse_precompiled::STANDARD_POLICY;
