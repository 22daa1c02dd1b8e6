//! The address of the store. All connections of a benchmark go to the same one.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use crate::cli::output::Failure;
use crate::cli::remote::START_ONE;
use statehouse_config::BrokerUrl;

/// How long an address of a name may take to accept a connection before the next one is asked, as
/// in other commands.
const ADDRESS_WAIT: Duration = Duration::from_secs(1);

pub(super) fn resolve(url: &BrokerUrl) -> Result<SocketAddr, Failure> {
    let (host, port) = (&url.host, url.port);
    let unknown = |why: String| {
        Failure::transport(format!(
            "cannot resolve the host {host}: {why}. {START_ONE}"
        ))
    };
    let all = (host.as_str(), port)
        .to_socket_addrs()
        .map_err(|error| unknown(error.to_string()))?;
    let all: Vec<SocketAddr> = all.collect();
    accepting(&all).ok_or_else(|| unknown("it has no address".to_owned()))
}

/// The first of several addresses that accepts a connection, or else the first one: `localhost` may
/// have an address at which the store does not listen. None if there is no address.
fn accepting(all: &[SocketAddr]) -> Option<SocketAddr> {
    let accepts = |it: &&SocketAddr| TcpStream::connect_timeout(it, ADDRESS_WAIT).is_ok();
    let (first, others) = all.split_first()?;
    let found = match others {
        // Its error is reported by the first connection of the benchmark.
        [] => None,
        _ => all.iter().find(accepts),
    };
    Some(*found.unwrap_or(first))
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Regression: `bench --host localhost` failed if the name had an IPv6 address too.
    #[test]
    fn address_that_accepts_is_chosen() {
        let open = || TcpListener::bind("127.0.0.1:0").unwrap();
        let (listener, closed) = (open(), open());
        let [accepts, refuses] = [&listener, &closed].map(|it| it.local_addr().unwrap());
        drop(closed);
        assert_eq!(accepting(&[refuses, accepts]), Some(accepts));
        assert_eq!(accepting(&[accepts, refuses]), Some(accepts));
        assert_eq!(accepting(&[refuses, refuses]), Some(refuses));
        assert_eq!(accepting(&[]), None);
    }
}
