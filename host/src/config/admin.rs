//! The address of the admin API: an address and port, the absolute path of a Unix socket, or `off`.

use std::fmt;
use std::net::SocketAddr;
use std::path::{self, PathBuf};
use std::str::FromStr;

use super::values::socket_address;
use crate::limits;

/// The address of the admin API; none if it is off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminAddress(pub Option<AdminPlace>);

/// Where the admin API listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdminPlace {
    /// An address and port: clients must present a token.
    Tcp(SocketAddr),
    /// The absolute path of a Unix socket: every account that may open it is admitted.
    Unix(PathBuf),
}

/// The address of the listener for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetricsAddress(pub SocketAddr);

impl FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let address = socket_address(text).map(Self);
        address.ok_or_else(|| {
            format!("`{text}` is not an address and port, such as 127.0.0.1:9464 or [::]:9464")
        })
    }
}

impl Default for AdminAddress {
    fn default() -> Self {
        Self(Some(AdminPlace::Tcp(([127, 0, 0, 1], 0).into())))
    }
}

impl FromStr for AdminAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Self(None));
        }
        if let Some(path) = text.strip_prefix("unix:") {
            return socket_path(path).map(|path| Self(Some(AdminPlace::Unix(path))));
        }
        let address = socket_address(text).ok_or_else(|| {
            format!("`{text}` is not an address and port, such as 127.0.0.1:0 or [::1]:9090, not a socket, such as unix:/run/statehouse/admin, and not `off`")
        })?;
        Ok(Self(Some(AdminPlace::Tcp(address))))
    }
}

/// The absolute path of a socket, since commands run in other working directories.
pub(crate) fn socket_path(path: &str) -> Result<PathBuf, String> {
    let max = limits::ADMIN_SOCKET_PATH_BYTES_MAX;
    match path::absolute(path) {
        _ if path.is_empty() || path.ends_with('/') || path.contains('\0') => Err(
            "unix: must be followed by the path of a socket, such as unix:/run/statehouse/admin"
                .into(),
        ),
        Ok(absolute) if absolute.as_os_str().len() > max => Err(format!(
            "the path of a socket has at most {max} bytes, and {} has {}: choose a shorter one",
            absolute.display(),
            absolute.as_os_str().len()
        )),
        Ok(absolute) => Ok(absolute),
        Err(error) => Err(format!("the path {path} cannot be resolved: {error}")),
    }
}

impl fmt::Display for AdminPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "http://{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_path_must_fit_into_the_systems_limit() {
        let place = |text: &str| {
            text.parse::<AdminAddress>()
                .map(|AdminAddress(place)| place)
        };
        let unix = |path: &str| Ok(Some(AdminPlace::Unix(path.into())));
        assert_eq!(place("unix:/run/admin"), unix("/run/admin"));
        let here = std::env::current_dir().unwrap().join("admin");
        assert_eq!(place("unix:admin"), unix(here.to_str().unwrap()));
        let long = |length: usize| format!("unix:/{}", "x".repeat(length - 1));
        let max = limits::ADMIN_SOCKET_PATH_BYTES_MAX;
        assert!(place(&long(max)).is_ok());
        let error = place(&long(max + 1)).unwrap_err();
        assert!(
            error.contains("at most 107 bytes") && error.contains("has 108"),
            "{error}"
        );
        for wrong in ["unix:", "unix:/run/", "unix:a\0b"] {
            assert!(place(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(place("off"), Ok(None));
        assert_eq!(
            place("localhost:90"),
            Ok(Some(AdminPlace::Tcp(([127, 0, 0, 1], 90).into())))
        );
    }
}
