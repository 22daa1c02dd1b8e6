//! Tests of the commands for authors of policies: `statehouse policy test`, `check`, `bench`,
//! `new`, `build`, and `statehouse explain`.
#![allow(missing_docs, clippy::unwrap_used)]

mod check;
mod explain;
mod projects;
mod transcripts;
