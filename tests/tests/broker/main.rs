//! Tests ordinary publish and subscribe between clients through the real binary, which is the only
//! broker of its gateway and so must be a complete MQTT 5 broker.
#![allow(missing_docs, clippy::unwrap_used)]

mod acknowledgements;
mod limits;
mod messages;
mod retained;
mod sessions;
mod subscriptions;
mod wills;
