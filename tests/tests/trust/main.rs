//! Who is let in, over what, and what they may do there: the real binary, and clients that try.
#![allow(missing_docs, clippy::unwrap_used)]

mod authorization;
mod browser;
mod certificates;
mod official;
mod papers;
mod refusals;
mod revocation;
mod tls;
mod tokens;
mod users;
mod websocket;
