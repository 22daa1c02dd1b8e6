//! Tests the examples, which must behave as their transcripts or descriptions say, and the packages
//! that are published.
#![allow(missing_docs, clippy::unwrap_used)]

mod clients;
mod command_line;
mod packages;
mod policies;
mod readme;
mod set_point;
mod thermostat;
