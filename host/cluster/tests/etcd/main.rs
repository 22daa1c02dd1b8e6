//! The replicated log on a real etcd, from the Debian package `etcd-server`.
#![allow(clippy::unwrap_used, reason = "tests fail by panicking")]

mod kine;
mod log;
mod nodes;
mod operators;
mod protocol;
mod space;
mod store;
