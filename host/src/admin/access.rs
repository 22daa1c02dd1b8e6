//! Who may use the administration: over TCP whoever shows a token that only the owner of the data directory can read.
//!
//! What enters: the head of a request. What leaves: nothing, or a refusal. Being on this machine is not enough: other
//! accounts are on it, and so are the pages that somebody's browser shows. Through a socket of the file system comes nobody
//! but its owner and root, as with those of container engines, and no page: there a token would only be a second key beside
//! the same door.

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

/// Bytes of a token that is made here.
const TOKEN_BYTES: usize = 32;

/// What the file `admin` in the data directory holds while a store runs.
#[derive(Clone, Serialize, Deserialize)]
pub struct Door {
    /// Where the administration listens.
    pub url: String,
    /// What to show there; nothing at a socket of the file system.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
}

impl Door {
    /// Where the file is.
    pub fn path(data: &Path) -> PathBuf {
        data.join("admin")
    }

    /// Reads it.
    pub fn read(data: &Path) -> io::Result<Self> {
        let path = Self::path(data);
        if fs::metadata(&path)?.len() > limits::ADMIN_FILE_BYTES_MAX {
            return Err(io::Error::other("it is too large to be one"));
        }
        serde_json::from_slice(&fs::read(path)?).map_err(io::Error::from)
    }

    /// Writes it for its owner's eyes only.
    pub fn write(&self, data: &Path) -> io::Result<()> {
        replace(&Self::path(data), &serde_json::to_vec(self)?, 0o600)
    }

    /// Nobody listens any more.
    pub fn remove(data: &Path) -> io::Result<()> {
        fs::remove_file(Self::path(data))
    }
}

/// A token that nobody can guess.
pub fn new_token() -> io::Result<String> {
    let mut bytes = [0; TOKEN_BYTES];
    getrandom::fill(&mut bytes).map_err(|error| {
        io::Error::other(format!("the system has no randomness for a token: {error}"))
    })?;
    Ok(blake3::hash(&bytes).to_hex().to_string())
}

/// Looks at every request before anything else does.
pub(super) struct Access {
    /// Of the token, so that comparing takes as long for a nearly right one as for a wrong one. None where being able to connect
    /// is enough.
    token: Option<blake3::Hash>,
    /// Whether only this machine reaches the address.
    loopback: bool,
}

impl Access {
    pub(super) fn new(token: Option<&str>, place: &AdminPlace) -> Self {
        Self {
            token: token.map(|token| blake3::hash(token.as_bytes())),
            loopback: matches!(place, AdminPlace::Tcp(address) if address.ip().is_loopback()),
        }
    }

    /// Refuses a request that repeats a header of which the code would read only the first. This applies to probes too.
    pub(super) fn check_form(headers: &HeaderMap) -> Result<(), String> {
        only_once(headers, &[HOST, ORIGIN, AUTHORIZATION, CONTENT_LENGTH])
    }

    /// Why this request is not even looked at.
    pub(super) fn check(&self, headers: &HeaderMap) -> Result<(), (StatusCode, &'static str)> {
        let Some(token) = self.token else {
            return Ok(());
        };
        if headers.contains_key(ORIGIN) {
            return Err((
                StatusCode::FORBIDDEN,
                "a request of a web page: browsers have no business here",
            ));
        }
        // A name that leads to this machine only for a moment would make a page's requests look like its own.
        let host = headers.get(HOST).and_then(|host| host.to_str().ok());
        if self.loopback && !host.is_some_and(is_loopback) {
            return Err((
                StatusCode::FORBIDDEN,
                "the Host header names no address of loopback",
            ));
        }
        let shown = headers
            .get(AUTHORIZATION)
            .and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
        match shown {
            // The comparison of two hashes does not end early.
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
    fn only_the_token_on_loopback_from_no_page() {
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
        // Where others may come from it has the names that they know.
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
    fn loopback_has_several_names() {
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
    fn the_file_is_its_owners() {
        let data = tempfile::tempdir().unwrap();
        for token in [new_token().unwrap(), new_token().unwrap()] {
            let door = Door {
                url: "http://127.0.0.1:1".into(),
                token: Some(token.clone()),
            };
            door.write(data.path()).unwrap();
            let mode = fs::metadata(Door::path(data.path())).unwrap().permissions();
            assert_eq!(mode.mode() & 0o777, 0o600);
            assert_eq!(Door::read(data.path()).unwrap().token, Some(token.clone()));
            assert_eq!(token.len(), 64);
        }
        assert_ne!(new_token().unwrap(), new_token().unwrap());
        Door::remove(data.path()).unwrap();
        assert!(Door::read(data.path()).is_err());
    }
}
