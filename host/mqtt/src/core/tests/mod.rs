//! The core without sockets: what clients see, with the time in the test's hand.

mod access;
mod crash;
mod delivery;
mod full;
mod gating;
mod images;
mod ledger;
mod requests;
mod restart;
mod routing;
mod sessions;
mod shared;
mod turns;
