//! The store through the real binary, where a transcript cannot say it: time, order, many at once, and
//! policies that misbehave.
#![allow(missing_docs, clippy::unwrap_used)]

mod expiry;
mod order;
mod policies;
mod quota;
mod scan;
mod watches;
