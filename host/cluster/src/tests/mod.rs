//! Tests of the encodings, and the simulation of a whole cluster.

mod clocks;
mod cluster;
mod copy;
mod creation;
mod encodings;
mod gathering;
mod ledger;
mod modules;
mod operations;
mod operators;
mod restored;
mod scenario;
mod seeds;
mod servers;
mod shown;
mod slow;
mod space;
mod store;
