//! Bad input over real sockets. After every blow another client's data is still there, newcomers are served,
//! and nothing is leaked.
#![allow(missing_docs, clippy::unwrap_used)]

mod floods;
mod packets;
mod requests;
mod slow;
mod witness;
