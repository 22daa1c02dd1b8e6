//! The store attached to a broker that is not its own: a real Mosquitto, with a relay between the two that breaks what
//! a network breaks.
#![allow(missing_docs, clippy::unwrap_used)]

mod access;
mod asker;
mod cuts;
mod doors;
mod histories;
mod kills;
mod limits;
mod order;
mod outages;
mod points;
mod presence;
mod rules;
mod scene;
mod standby;
