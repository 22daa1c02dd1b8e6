//! Tests of several hosts over etcd: real processes that are killed and paused, and clients that
//! use the addresses of all hosts.
#![allow(missing_docs, clippy::unwrap_used)]

mod kills;
