//! The core without sockets: what clients see, with the time in the test's hand.

mod delivery;
mod requests;
mod routing;
mod sessions;
