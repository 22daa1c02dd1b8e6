//! Authenticates requests to the admin API: over TCP by a token that only the owner of the data
//! directory can read.
//!
//! Being on the same machine must not suffice, because of other accounts and of web pages in a
//! local browser. A Unix socket admits only its owner and root, and no web page, so it needs no
//! token.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use hyper::StatusCode;
use hyper::header::{AUTHORIZATION, CONTENT_LENGTH, HOST, HeaderMap, ORIGIN};
use serde::{Deserialize, Serialize};

use crate::config::AdminPlace;
use crate::headers::only_once;
use crate::limits;
use statehouse_files::atomic::replace;

/// Bytes of a generated token.
const TOKEN_BYTES: usize = 32;

/// The content of the file `admin` in the data directory of a running store.
#[derive(Clone, Serialize, Deserialize)]
pub struct Endpoint {
    /// Where the admin API listens.
    pub url: String,
    /// The bearer token; absent for a Unix socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
}

impl Endpoint {
    /// The path of the file.
    pub fn path(data: &Path) -> PathBuf {
        data.join("admin")
    }

    /// Reads the file.
    pub fn read(data: &Path) -> io::Result<Self> {
        let path = Self::path(data);
        if fs::metadata(&path)?.len() > limits::ADMIN_FILE_BYTES_MAX {
            return Err(io::Error::other(
                "the file is larger than an admin file can be",
            ));
        }
        serde_json::from_slice(&fs::read(path)?).map_err(io::Error::from)
    }

    /// Writes the file, readable by its owner only.
    pub fn write(&self, data: &Path) -> io::Result<()> {
        replace(&Self::path(data), &serde_json::to_vec(self)?, 0o600)
    }

    /// Removes the file, when the admin API stops.
    pub fn remove(data: &Path) -> io::Result<()> {
        fs::remove_file(Self::path(data))
    }
}

/// Generates a random token.
pub fn new_token() -> io::Result<String> {
    let mut bytes = [0; TOKEN_BYTES];
    getrandom::fill(&mut bytes).map_err(|error| {
        io::Error::other(format!("the system has no randomness for a token: {error}"))
    })?;
    Ok(blake3::hash(&bytes).to_hex().to_string())
}

/// Checks every request before it is processed.
pub(super) struct Access {
    /// Hash of the token, compared in constant time. None if the ability to connect suffices.
    token: Option<blake3::Hash>,
    /// Whether the address is reachable from this machine only.
    loopback: bool,
}

impl Access {
    pub(super) fn new(token: Option<&str>, place: &AdminPlace) -> Self {
        Self {
            token: token.map(|token| blake3::hash(token.as_bytes())),
            loopback: matches!(place, AdminPlace::Tcp(address) if address.ip().is_loopback()),
        }
    }

    /// Refuses a request that repeats a header of which the code would read only the first. Probes
    /// are checked too.
    pub(super) fn check_form(headers: &HeaderMap) -> Result<(), String> {
        only_once(headers, &[HOST, ORIGIN, AUTHORIZATION, CONTENT_LENGTH])
    }

    /// Why this request is refused.
    pub(super) fn check(&self, headers: &HeaderMap) -> Result<(), (StatusCode, &'static str)> {
        let Some(token) = self.token else {
            return Ok(());
        };
        if headers.contains_key(ORIGIN) {
            return Err((
                StatusCode::FORBIDDEN,
                "requests of web pages are refused: the Origin header is not allowed",
            ));
        }
        // DNS rebinding: a page's own name may resolve to this machine, so its requests would look
        // same-origin.
        let host = headers.get(HOST).and_then(|host| host.to_str().ok());
        if self.loopback && !host.is_some_and(is_loopback) {
            return Err((
                StatusCode::FORBIDDEN,
                "the Host header must name a loopback address",
            ));
        }
        let shown = headers
            .get(AUTHORIZATION)
            .and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        match shown {
            // Hashes compare in constant time.
            Some(shown) if blake3::hash(shown) == token => Ok(()),
            Some(_) => Err((
                StatusCode::UNAUTHORIZED,
                "the token is not the one of this store: it is in the file `admin` of its data directory, and another one after each start",
            )),
            None => Err((
                StatusCode::UNAUTHORIZED,
                "a token is missing: send `Authorization: Bearer TOKEN` with the one in the file `admin` of the data directory",
            )),
        }
    }
}

/// Whether a Host header names this machine.
fn is_loopback(host: &str) -> bool {
    if let Ok(address) = host.parse::<SocketAddr>() {
        return address.ip().is_loopback();
    }
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let name = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost")
        || name.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn headers(all: &[(hyper::header::HeaderName, &str)]) -> HeaderMap {
        let all = all.iter().cloned();
        all.map(|(name, value)| (name, value.parse().unwrap()))
            .collect()
    }

    #[test]
    fn only_the_token_is_accepted_and_web_pages_are_refused() {
        let access = Access::new(
            Some("secret"),
            &AdminPlace::Tcp(([127, 0, 0, 1], 8080).into()),
        );
        let host = || (HOST, "127.0.0.1:8080");
        let status = |all: &[_]| access.check(&headers(all)).map_err(|(status, _)| status);
        assert_eq!(status(&[host(), (AUTHORIZATION, "Bearer secret")]), Ok(()));
        for wrong in [
            "Bearer secre",
            "Bearer secrets",
            "Bearer ",
            "secret",
            "Basic secret",
        ] {
            let answer = status(&[host(), (AUTHORIZATION, wrong)]);
            assert_eq!(answer, Err(StatusCode::UNAUTHORIZED), "{wrong}");
        }
        assert_eq!(status(&[host()]), Err(StatusCode::UNAUTHORIZED));
        let right = (AUTHORIZATION, "Bearer secret");
        for other in ["store.example", "192.0.2.1:80", "localhost.example:80", ""] {
            let answer = status(&[(HOST, other), right.clone()]);
            assert_eq!(answer, Err(StatusCode::FORBIDDEN), "{other}");
        }
        assert_eq!(
            status(std::slice::from_ref(&right)),
            Err(StatusCode::FORBIDDEN)
        );
        let page = (ORIGIN, "http://127.0.0.1:8080");
        assert_eq!(
            status(&[host(), right.clone(), page.clone()]),
            Err(StatusCode::FORBIDDEN)
        );
        // Beyond loopback any Host header is accepted.
        let access = Access::new(
            Some("secret"),
            &AdminPlace::Tcp(([0, 0, 0, 0], 8080).into()),
        );
        let status = |all: &[_]| access.check(&headers(all)).map_err(|(status, _)| status);
        let elsewhere = (HOST, "store.example");
        assert_eq!(status(&[elsewhere.clone(), right.clone()]), Ok(()));
        assert_eq!(
            status(std::slice::from_ref(&elsewhere)),
            Err(StatusCode::UNAUTHORIZED)
        );
        assert_eq!(
            status(&[elsewhere, right, page]),
            Err(StatusCode::FORBIDDEN)
        );
    }

    #[test]
    fn a_header_that_may_occur_once_must_not_be_repeated() {
        let right = [
            (HOST, "127.0.0.1:8080"),
            (AUTHORIZATION, "Bearer secret"),
            (CONTENT_LENGTH, "0"),
        ];
        let single = [&right[..], &[(ORIGIN, "http://127.0.0.1")]].concat();
        Access::check_form(&headers(&single)).unwrap();
        for (name, second) in [
            (HOST, "evil.example"),
            (HOST, "127.0.0.1:8080"),
            (ORIGIN, "http://evil.example"),
            (AUTHORIZATION, "Bearer other"),
            (CONTENT_LENGTH, "1"),
        ] {
            let twice = [&single[..], &[(name.clone(), second)]].concat();
            let refusal = Access::check_form(&headers(&twice)).unwrap_err();
            assert!(refusal.contains(name.as_str()), "{name}: {refusal}");
        }
    }

    #[test]
    fn all_names_of_loopback_are_accepted() {
        for host in [
            "localhost",
            "LOCALHOST:1",
            "127.0.0.1",
            "127.1.2.3:80",
            "[::1]:80",
            "[::1]",
        ] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["[::2]:80", "10.0.0.1", "localhost.", "a:b"] {
            assert!(!is_loopback(host), "{host}");
        }
    }

    #[test]
    fn only_the_owner_can_read_the_file() {
        let data = tempfile::tempdir().unwrap();
        for token in [new_token().unwrap(), new_token().unwrap()] {
            let endpoint = Endpoint {
                url: "http://127.0.0.1:1".into(),
                token: Some(token.clone()),
            };
            endpoint.write(data.path()).unwrap();
            let mode = fs::metadata(Endpoint::path(data.path()))
                .unwrap()
                .permissions();
            assert_eq!(mode.mode() & 0o777, 0o600);
            assert_eq!(
                Endpoint::read(data.path()).unwrap().token,
                Some(token.clone())
            );
            assert_eq!(token.len(), 64);
        }
        assert_ne!(new_token().unwrap(), new_token().unwrap());
        Endpoint::remove(data.path()).unwrap();
        assert!(Endpoint::read(data.path()).is_err());
    }
}
