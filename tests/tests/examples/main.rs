//! The examples run, and do what they say.
#![allow(missing_docs, clippy::unwrap_used)]

mod policies;
mod set_point;
mod thermostat;
