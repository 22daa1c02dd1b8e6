//! Tests MQTT 3.1.1 through the real binary, statement by statement of the standard, with raw
//! sockets and with other projects' clients. `host/docs/mqtt-3-conformance.md` lists which check
//! shows which statement. The same checks run against Mosquitto, which shows that they demand only
//! what the standard demands.
#![allow(missing_docs, clippy::unwrap_used)]

mod access;
mod clients;
mod conformance;
mod connect;
mod delivery;
mod limits;
mod malformed;
mod ordering;
mod restarts;
mod retained;
mod scene;
mod sessions;
mod subscriptions;
mod transports;
mod versions;
mod wills;
