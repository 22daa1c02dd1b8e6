//! Attacks on a running server. `statehouse_tests::victim` measures an honest client during each.
//!
//! All but [`helpers`] take long and are `#[ignore]`d: `bash tests/run --all` runs them and prints
//! one table of their costs. "Asked" is what a test asserts; the honest client never sees a failure.
//!
//! | attack | figure | asked |
//! |---|---|---|
//! | 252 connections do not read: [`readers`] | victim p99, memory | 1 s, 512 MiB |
//! | searches, wildcards, groups, requests that take long: [`stalls`] | victim p99 | 10 ms |
#![allow(missing_docs, clippy::unwrap_used)]

mod helpers;
mod readers;
mod stalls;
