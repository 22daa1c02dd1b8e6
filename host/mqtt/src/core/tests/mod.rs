//! Tests of the core without sockets, by what clients receive, at times that the test chooses.

/// Checks packets against the pattern of a slice.
macro_rules! assert_packets {
    ($packets:expr, $pattern:pat $(if $guard:expr)?) => {{
        let packets = &$packets;
        assert!(matches!(&packets[..], $pattern $(if $guard)?), "{packets:?}");
    }};
}

mod absent;
mod access;
mod crash;
mod delivery;
mod full;
mod gating;
mod images;
mod ledger;
mod requests;
mod responses;
mod restart;
mod routing;
mod sessions;
mod shared;
mod turns;
mod users;
mod version_3;
mod waiting;
