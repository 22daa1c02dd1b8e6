//! Tests of the encodings, and the simulation of a whole cluster.

mod cluster;
mod copy;
mod encodings;
mod gathering;
mod ledger;
mod operations;
mod operators;
mod restored;
mod scenario;
mod seeds;
mod space;
mod store;
