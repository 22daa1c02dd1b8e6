//! Statehouse: an MQTT 5 state store whose command logic is a WebAssembly component.
//!
//! # The path of a request
//!
//! ```text
//! socket ─ mqtt ─ transport ─ request ─ store ──────────── journal ─ outbox ─ transport ─ socket
//!          codec  embedded    topic,    duplicate?         records,  reply,
//!          session  or        properties, policy (wasm)    group     notifications,
//!          router foreign     delivery  over a transaction commit    PUBACK last
//! ```
//!
//! Each module, what enters it, what leaves it, and what it never does:
//!
//! * `statehouse_mqtt` (a crate of its own): bytes in, packets out, and back. It knows nothing of the store.
//! * `statehouse_link` (a crate of its own): one session with somebody else's broker, over as many connections as it takes.
//! * [`listener`]: sockets in, streams of MQTT out, where TLS or WebSocket is between. It reads no MQTT.
//! * [`access`]: who a client is, by what it shows: users, certificates, tokens; and what it may do, by rules. It opens no
//!   connection and touches no key.
//! * [`transport`]: the seam. Requests and ends of connections come in; publish, settle and kick go out.
//! * `statehouse_core` (a crate of its own): the deterministic state machine. `request` makes a PUBLISH a request, `store`
//!   decides with a `policy`, `log` says what records mean. An event in, effects out; no I/O, no clock, no lock.
//! * `statehouse_protocol` (a crate of its own): key patterns, rights and log positions, which all parts share.
//! * `statehouse_precompiled` (a crate of its own): components in, components as machine code out. It compiles none twice.
//! * `statehouse_wal` (a crate of its own): records in, files out, and how far everything is durable.
//! * [`outbox`]: holds replies, notifications and PUBACKs until their position is durable.
//! * [`shadow`]: runs requests again beside all this, to compare a candidate. It changes nothing, and nobody waits for it.
//! * [`server`]: wires these together under one lock.
//! * [`control`]: loads policies and changes which one answers, while all of that goes on.
//!
//! Beside the path: [`limits`] (every bound with its reason), [`config`] (flags over environment over
//! file), [`storage`] (a data directory in use: recovery and snapshots), [`reload`] (files that are read again
//! while the store runs), [`audit`] (refusals and their reasons), [`logging`] (log lines on their way to
//! stderr), `replace` (small files that are replaced atomically) and `cli` (one file per command).
//!
//! Tools that are not part of serving are crates: `statehouse_offline` (a data directory read from outside: history,
//! replay, backup, doctor), `statehouse_testkit` (the store for policy authors) and `statehouse_loadgen` (`bench`).
//!
//! Dependencies point one way: cli → control → server → transport, access → `statehouse_core` → `statehouse_protocol`.
#![forbid(unsafe_code)]

pub mod admin;
pub mod cli;
pub mod config;
pub mod control;
mod headers;
pub mod limits;
pub mod listener;
pub mod logging;
mod opening;
pub mod outbox;
pub mod server;
pub mod shadow;
pub mod ship;
pub mod storage;
pub mod transport;

pub use statehouse_precompiled::STANDARD_POLICY;
