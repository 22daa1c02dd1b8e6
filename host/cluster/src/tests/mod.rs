//! Tests of the encodings, and the simulation of a whole cluster.

mod encodings;
mod ledger;
mod scenario;
mod seeds;
mod store;
