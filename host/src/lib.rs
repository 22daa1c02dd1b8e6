//! Statehouse: an MQTT 5 state store whose command logic is a WebAssembly component.
//!
//! This crate is the program: it connects the parts, which are crates of their own.
//!
//! * [`app`]: the composition root. It recovers the state, connects the parts, listens, and drains.
//! * [`policies`]: loads policies, changes which one is active, takes policies from outside.
//! * [`admin`]: the HTTP API and metrics.
//! * [`cluster`]: this host as a member of a cluster: its replica of the state, and its leadership.
//! * [`data_directory`]: the data directory in use: recovery and snapshots.
//! * [`cli`]: one file per command.
//!
//! Dependencies point one way: cli → app → admin → policies → `statehouse_server` →
//! `statehouse_transport`. `host/docs/architecture.md` describes all crates, and the path of a
//! request.
#![forbid(unsafe_code)]

pub mod admin;
pub mod app;
mod audit_log;
mod build;
pub mod cli;
#[cfg(feature = "cluster")]
pub mod cluster;
pub mod data_directory;
mod past;
pub mod policies;
mod time;

pub use statehouse_precompiled::STANDARD_POLICY;
