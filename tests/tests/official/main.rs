//! The official client of Azure IoT Operations, unmodified, against the real binary. What its own tests and
//! examples check is checked here, and the versions besides.
#![allow(missing_docs, clippy::unwrap_used)]

mod leases;
mod locks;
mod operations;
mod peer;
mod reconnecting;
mod restart;
mod scanning;
mod swaps;
mod watching;
