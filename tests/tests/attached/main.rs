//! Tests a store that is attached to a foreign broker: a real Mosquitto, with a relay between the
//! two that injects network faults. No fault may lose or repeat the effect of a request.
#![allow(missing_docs, clippy::unwrap_used)]

mod access;
mod broker_connection;
mod cuts;
mod exchange;
mod histories;
mod kills;
mod limits;
mod order;
mod outages;
mod presence;
mod recording_client;
mod rules;
mod scene;
mod standby;
