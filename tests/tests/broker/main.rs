//! Ordinary publish and subscribe between clients through the real binary: the gateway's one broker.
#![allow(missing_docs, clippy::unwrap_used)]

mod acknowledgements;
mod limits;
mod messages;
mod retained;
mod sessions;
mod subscriptions;
mod wills;
