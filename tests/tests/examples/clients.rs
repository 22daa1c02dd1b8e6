//! Tests the clients of `examples/clients` in Python and JavaScript, each in a process of its own,
//! against a store over sockets.

pub(crate) mod driver;
mod locks;
mod losses;
mod operations;
