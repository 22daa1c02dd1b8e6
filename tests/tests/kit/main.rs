//! What the author of a policy uses: `statehouse policy test`, `check`, `bench`, `new`, `build`, and `explain`.
#![allow(missing_docs, clippy::unwrap_used)]

mod check;
mod explain;
mod projects;
mod transcripts;
