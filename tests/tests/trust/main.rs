//! Tests of authentication, encryption and authorization of clients, through the real binary. The
//! server must accept only clients that prove their identity, and must allow only what the rules
//! allow.
#![allow(missing_docs, clippy::unwrap_used)]

mod authority;
mod authorization;
mod browser;
mod certificates;
mod official;
mod operators;
#[path = "../official/peer.rs"]
#[allow(dead_code, reason = "these tests only log in")]
mod peer;
mod refusals;
mod revocation;
mod tls;
mod tokens;
mod users;
mod websocket;
