//! Tests the examples. Each must behave as its transcript or its description says.
#![allow(missing_docs, clippy::unwrap_used)]

mod command_line;
mod policies;
mod readme;
mod set_point;
mod thermostat;
