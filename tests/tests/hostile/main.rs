//! Tests of hostile input over real sockets. After every attack, the server must serve old and new
//! clients, and must not have lost data, panicked or leaked descriptors. Its memory must stay
//! within a limit far below the sizes that the attack claimed or sent.
//!
//! The list names each class of faults that brokers had, and its tests. `mqtt` is
//! `host/mqtt/tests`, which runs the broker alone, and `trust` is the neighbouring directory.
//!
//! * Memory before CONNECT: [`lengths`] (a first packet of 256 MiB, of each type), `mqtt/hostile`.
//! * False lengths: [`lengths`] (too short, too long, cut anywhere, over TCP and WebSocket),
//!   [`slow`].
//! * Integers of five bytes: [`lengths`] (remaining length, property length, subscription
//!   identifier).
//! * Packets before CONNECT or in the wrong direction: [`packets`], `mqtt/hostile`.
//! * Invalid topics and properties: [`packets`], [`topics`], [`properties`] (each property in each
//!   packet, leaked wills).
//! * Endless QoS 2 exchanges: [`exchanges`].
//! * MQTT 3.1.1: [`version_3`] (forbidden packets and CONNECTs of that version).
//! * Takeover of sessions: [`takeovers`]; `mqtt/hostile` and `mqtt/clients` for the order of the
//!   messages of a session.
//! * Authentication: `trust/users` (missing, incomplete or oversized credentials, names that are
//!   patterns), `trust/tokens`, `trust/certificates`.
//! * Empty or bad rules: `trust/authorization` (the store does not start, or the previous rules
//!   remain).
//! * Client ids that are patterns: `trust/users`, `trust/authorization`.
//! * Delivery after a right was revoked: `trust/authorization`; `trust/users`, `trust/revocation`
//!   and `trust/tokens` for whole connections.
//! * Loops, depth, log bombs: [`topics`] (65 536 levels, 100 000 filters), `trust/users` (names of
//!   60 kB in the log).
//! * RESP: [`requests`], and `transcripts/malformed-*` byte for byte.
//! * Clock readings: [`requests`] (absurd timestamps), `transcripts/clocks-*`.
//! * Reserved topics: [`requests`] (response topics, forged notifications, answers to other
//!   clients).
//! * Thousands of slow handshakes: [`slow`], `trust/tls`.
//! * Clients that never read: [`floods`].
//! * A flood of logins: `trust/users` (a thousand guesses at once).
#![allow(missing_docs, clippy::unwrap_used)]

mod exchanges;
mod floods;
mod lengths;
mod packets;
mod properties;
mod requests;
mod slow;
mod takeovers;
mod topics;
mod version_3;
mod witness;
