//! The addresses of the admin API: one for this machine, and one over TLS for other machines.

use std::fmt;
use std::net::SocketAddr;
use std::path::{self, PathBuf};
use std::str::FromStr;

use super::ConfigError;
use super::values::socket_address;
use crate::limits;

/// The addresses of the admin API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminAddress {
    /// Where commands find it on this machine; none if that is off.
    pub local: Option<AdminPlace>,
    /// Where it listens over TLS.
    pub tls: Option<SocketAddr>,
}

/// Where the admin API listens without TLS.
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
            let text = ConfigError::without_login(text);
            format!("`{text}` is not an address and port, such as 127.0.0.1:9464 or [::]:9464")
        })
    }
}

impl Default for AdminAddress {
    fn default() -> Self {
        Self {
            local: Some(AdminPlace::Tcp(([127, 0, 0, 1], 0).into())),
            tls: None,
        }
    }
}

/// The scheme of an address over TLS.
const TLS: &str = "https://";

impl FromStr for AdminAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // The path of a socket may contain commas.
        let (local, tls) = match text.rsplit_once(',') {
            Some((local, tls)) if tls.starts_with(TLS) => (Some(local), Some(tls)),
            _ if text.starts_with(TLS) => (None, Some(text)),
            _ => (Some(text), None),
        };
        let tls = tls.map(|text| {
            let place = text.trim_start_matches(TLS).trim_end_matches('/');
            socket_address(place).ok_or_else(|| {
                let text = ConfigError::without_login(text);
                format!("`{text}` is not {TLS} with an address and port, such as https://0.0.0.0:8443 or https://[::]:8443")
            })
        });
        Ok(Self {
            local: local.map_or(Ok(Self::default().local), local_place)?,
            tls: tls.transpose()?,
        })
    }
}

fn local_place(text: &str) -> Result<Option<AdminPlace>, String> {
    if text == "off" {
        return Ok(None);
    }
    if let Some(path) = text.strip_prefix("unix:") {
        return socket_path(path).map(|path| Some(AdminPlace::Unix(path)));
    }
    let address = socket_address(text).ok_or_else(|| {
        let text = ConfigError::without_login(text);
        format!("`{text}` is not an address and port, such as 127.0.0.1:0 or [::1]:9090, not a socket, such as unix:/run/statehouse/admin, not {TLS} with an address and port, and not `off`")
    })?;
    Ok(Some(AdminPlace::Tcp(address)))
}

/// The absolute path of a socket, since commands run in other working directories.
pub fn socket_path(path: &str) -> Result<PathBuf, String> {
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
        let place = |text: &str| text.parse::<AdminAddress>().map(|it| it.local);
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

    #[test]
    fn a_tls_address_is_in_addition_to_the_local_one() {
        let parsed = |text: &str| {
            let it: AdminAddress = text.parse().unwrap();
            (it.local.map(|it| it.to_string()), it.tls)
        };
        let tls = Some(([0, 0, 0, 0], 8443).into());
        let local = |text: &str| Some(text.to_owned());
        let open = "https://0.0.0.0:8443";
        assert_eq!(parsed(open), (local("http://127.0.0.1:0"), tls));
        assert_eq!(parsed("https://0.0.0.0:8443/").1, tls);
        assert_eq!(parsed(&format!("off,{open}")), (None, tls));
        let socket = parsed(&format!("unix:/run/a,b,{open}"));
        assert_eq!(socket, (local("unix:/run/a,b"), tls));
        for wrong in [
            "https://store:8443",
            "https://0.0.0.0",
            "https://",
            "http://127.0.0.1:1",
        ] {
            assert!(wrong.parse::<AdminAddress>().is_err(), "{wrong}");
        }
        let twice = format!("{open},{open}").parse::<AdminAddress>();
        assert!(twice.is_err());
    }

    #[test]
    fn errors_show_no_password() {
        let admin = |text: &str| text.parse::<AdminAddress>().unwrap_err();
        let metrics = |text: &str| text.parse::<MetricsAddress>().unwrap_err();
        for error in [
            admin("https://u:SECRET@0.0.0.0:1"),
            admin("http://u:SECRET@127.0.0.1:1"),
            metrics("http://u:SECRET@127.0.0.1:1"),
        ] {
            assert!(
                error.contains("://***@") && !error.contains("SECRET"),
                "{error}"
            );
        }
    }
}
