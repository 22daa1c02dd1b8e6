//! Tests of the store through the real binary, for behaviour that a transcript cannot express:
//! expiry, order, concurrency, quotas, watches, and faulty policies.
#![allow(missing_docs, clippy::unwrap_used)]

mod collector;
mod expiry;
mod order;
mod policies;
mod quota;
mod scan;
mod small_memory;
mod traces;
mod watches;
