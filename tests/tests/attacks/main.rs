//! Attacks a running server, while `statehouse_tests::victim` measures an honest client. No attack
//! may make a request of the honest client fail.
//!
//! All tests but [`helpers`] take long and are `#[ignore]`d. `bash tests/run --all` runs them, and
//! prints one table of their costs. Each test asserts its bound.
//!
//! | attack | figure | bound |
//! |---|---|---|
//! | 252 connections do not read: [`readers`] | victim p99, memory | 1 s, 512 MiB |
//! | searches, wildcards, groups, long requests: [`stalls`] | victim p99, in memory | 10 ms |
//! | 252 read buffers pinned by one byte: [`buffers`] | victim p99, RSS | 1 s, 128 MiB more |
//! | password flood: [`passwords`] | victim p99, peak RSS | 2 s, 128 MiB more |
//! | 16 half-sent admin requests: [`operators`] | an operator's wait | 15 s |
//! | 64 clients fill 128, 256 or 1024 MiB: [`memory`] | victim p99, newcomers | 5 s, served |
#![allow(missing_docs, clippy::unwrap_used)]

mod buffers;
mod helpers;
mod memory;
mod operators;
mod passwords;
mod readers;
mod stalls;
