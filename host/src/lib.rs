//! Statehouse: an MQTT 5 state store whose command logic is a WebAssembly component.
//!
//! # The path of a request
//!
//! ```text
//! socket ─ listener ─ mqtt ─ transport ─ request ─ core ─────────── log ─ response gate ─ mqtt ─ socket
//!          TLS, WS    codec  embedded    topic,    deduplicate      append response,
//!                     session or foreign properties policy (wasm)   flush  notifications,
//!                     router  broker     identity  commit                  PUBACK last
//! ```
//!
//! This crate is the program: it connects the parts, which are crates of their own.
//!
//! * [`app`]: the composition root. It recovers the state, connects the parts, listens, and drains.
//! * [`listener`]: accepts sockets and passes MQTT streams on, through TLS or WebSocket. It reads
//!   no MQTT.
//! * [`transport`]: the boundary between MQTT and the store, for the embedded and for a foreign
//!   broker.
//! * [`server`]: runs the state machine of `statehouse_core` under one lock. Its response gate
//!   holds responses, notifications and PUBACKs until the log position that they depend on is
//!   durable.
//! * [`shadow`]: re-executes requests with a candidate policy and compares. It never changes state.
//! * [`policies`]: loads policies, changes which one is active, takes policies from outside.
//! * [`admin`]: the HTTP API and metrics.
//! * [`cluster`]: this host as a member of a cluster: its replica of the state, and its leadership.
//!   [`front`]: passes clients on to the host that leads.
//! * [`data_directory`]: the data directory in use: recovery and snapshots.
//! * [`config`]: flags over environment over file. [`limits`]: every limit with its unit and
//!   reason.
//! * [`traces`]: which requests are traced, and the thread that sends their spans.
//! * [`logging`]: log lines through a bounded queue. [`cli`]: one file per command.
//!
//! Dependencies point one way: cli → app → admin → policies → server → transport. The architecture
//! document in `host/docs` describes all crates.
#![forbid(unsafe_code)]

pub mod admin;
pub mod app;
mod audit_log;
mod build;
pub mod cli;
#[cfg(feature = "cluster")]
pub mod cluster;
pub mod config;
pub mod data_directory;
#[cfg(feature = "cluster")]
pub mod front;
mod headers;
pub mod limits;
pub mod listener;
pub mod logging;
mod past;
mod percent;
pub mod policies;
pub mod server;
pub mod shadow;
mod time;
pub mod traces;
pub mod transport;

pub use statehouse_precompiled::STANDARD_POLICY;
