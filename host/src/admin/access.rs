//! Authenticates requests to the admin API: over TCP by a token that only the owner of the data
//! directory can read, over TLS by that token or as a user.
//!
//! Being on the same machine must not suffice, because of other accounts and of web pages in a
//! local browser. A Unix socket admits only its owner and root, and no web page, so it needs no
//! token.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::{AUTHORIZATION, CONTENT_LENGTH, HOST, HeaderMap, ORIGIN};
use serde::{Deserialize, Serialize};

use crate::headers::only_once;
use crate::limits;
use statehouse_access::roles::Role;
use statehouse_access::{AccessControl, base64};
use statehouse_files::atomic::replace;
use statehouse_mqtt::ReasonCode;

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

/// Who sent a request, and what that operator may do.
#[derive(Clone)]
pub(super) struct Operator {
    /// The name of the user; none for an operator with the token or at the socket.
    pub(super) user: Option<String>,
    /// The role; none if the user has none.
    pub(super) role: Option<Role>,
}

impl Operator {
    /// An operator who can read the data directory, or act as its owner.
    const LOCAL: Self = Self {
        user: None,
        role: Some(Role::Ship),
    };
}

/// Why a request is not admitted.
#[derive(Debug)]
pub(super) struct Denial {
    pub(super) status: StatusCode,
    pub(super) why: &'static str,
    /// Whether the refusal is in the audit log already.
    pub(super) is_audited: bool,
}

/// Checks every request before it is processed.
pub(super) struct Access {
    /// Hash of the token, compared in constant time.
    token: Option<blake3::Hash>,
    /// Whether the ability to connect suffices.
    admits_anyone: bool,
    /// Whether the address is reachable from this machine only.
    loopback: bool,
    /// The users who may log in, over TLS only: elsewhere a password could be read on its way.
    users: Option<Arc<AccessControl>>,
}

impl Access {
    /// Every client that can connect is admitted.
    pub(super) fn of_anyone() -> Self {
        Self {
            token: None,
            admits_anyone: true,
            loopback: true,
            users: None,
        }
    }

    /// Clients need the token or, with `users`, a name and a password.
    pub(super) fn of_tcp(
        address: SocketAddr,
        token: Option<&str>,
        users: Option<Arc<AccessControl>>,
    ) -> Self {
        Self {
            token: token.map(|token| blake3::hash(token.as_bytes())),
            admits_anyone: false,
            loopback: address.ip().is_loopback(),
            users,
        }
    }

    /// Whether clients are on other machines or accounts, so that their addresses matter.
    pub(super) fn is_remote(&self) -> bool {
        self.users.is_some()
    }

    /// Refuses a request that repeats a header of which the code would read only the first. Probes
    /// are checked too.
    pub(super) fn check_form(headers: &HeaderMap) -> Result<(), String> {
        only_once(headers, &[HOST, ORIGIN, AUTHORIZATION, CONTENT_LENGTH])
    }

    /// Whether an operator who was admitted has a role at present, so that a stream may go on.
    pub(super) fn still_has(&self, operator: &Operator, needed: Role) -> bool {
        let role = match (&operator.user, &self.users) {
            (Some(user), Some(users)) => users.role(user),
            _ => operator.role,
        };
        role.is_some_and(|role| role >= needed)
    }

    /// The operator who sent this request from `peer`.
    pub(super) async fn check(
        &self,
        headers: &HeaderMap,
        peer: SocketAddr,
    ) -> Result<Operator, Denial> {
        if self.admits_anyone {
            return Ok(Operator::LOCAL);
        }
        if headers.contains_key(ORIGIN) {
            return Err(denial(
                StatusCode::FORBIDDEN,
                "requests of web pages are refused: the Origin header is not allowed",
            ));
        }
        // DNS rebinding: a page's own name may resolve to this machine, so its requests would look
        // same-origin.
        let host = headers.get(HOST).and_then(|host| host.to_str().ok());
        if self.loopback && !host.is_some_and(is_loopback) {
            return Err(denial(
                StatusCode::FORBIDDEN,
                "the Host header must name a loopback address",
            ));
        }
        let shown = headers.get(AUTHORIZATION).map(|value| value.as_bytes());
        if let (Some(users), Some(shown)) = (&self.users, shown.and_then(after(b"Basic "))) {
            return login(users, shown, peer).await;
        }
        match (shown.and_then(after(b"Bearer ")), &self.users) {
            // Hashes compare in constant time.
            (Some(shown), _) if self.token == Some(blake3::hash(shown)) => Ok(Operator::LOCAL),
            (Some(_), _) => Err(denial(
                StatusCode::UNAUTHORIZED,
                "the token is not the one of this store: it is in the file `admin` of its data directory, and another one after each start",
            )),
            (None, Some(_)) => Err(denial(
                StatusCode::UNAUTHORIZED,
                "a login is missing: send a user name and a password (HTTP Basic), or the store's token (Bearer)",
            )),
            (None, None) => Err(denial(
                StatusCode::UNAUTHORIZED,
                "a token is missing: send `Authorization: Bearer TOKEN` with the one in the file `admin` of the data directory",
            )),
        }
    }
}

fn denial(status: StatusCode, why: &'static str) -> Denial {
    Denial {
        status,
        why,
        is_audited: false,
    }
}

/// The credentials after a scheme. The name of a scheme has no case (RFC 9110 section 11.1).
fn after(scheme: &[u8]) -> impl Fn(&[u8]) -> Option<&[u8]> {
    move |value| {
        let (name, rest) = value.split_at_checked(scheme.len())?;
        name.eq_ignore_ascii_case(scheme).then_some(rest)
    }
}

/// Checks a name and a password (RFC 7617).
async fn login(users: &AccessControl, shown: &[u8], peer: SocketAddr) -> Result<Operator, Denial> {
    let decoded = str::from_utf8(shown).ok().and_then(base64::decode);
    let decoded = decoded.and_then(|it| String::from_utf8(it).ok());
    let Some((user, password)) = decoded.as_deref().and_then(|it| it.split_once(':')) else {
        let why = "the Authorization header is not Basic with NAME:PASSWORD in Base64";
        return Err(denial(StatusCode::BAD_REQUEST, why));
    };
    let password = Bytes::copy_from_slice(password.as_bytes());
    let checking = users.operator(user, password, peer);
    let Ok(checked) = tokio::time::timeout(limits::ADMIN_LOGIN_TIMEOUT, checking).await else {
        let why = "the password was not checked in time: try again later";
        return Err(denial(StatusCode::SERVICE_UNAVAILABLE, why));
    };
    let role = checked.map_err(|(reason, why)| {
        let (status, why) = match reason {
            ReasonCode::BAD_USER_NAME_OR_PASSWORD => {
                (StatusCode::UNAUTHORIZED, "wrong user name or password")
            }
            ReasonCode::CONNECTION_RATE_EXCEEDED => (StatusCode::TOO_MANY_REQUESTS, why),
            _ => (StatusCode::SERVICE_UNAVAILABLE, why),
        };
        Denial {
            status,
            why,
            is_audited: true,
        }
    })?;
    Ok(Operator {
        user: Some(user.to_owned()),
        role,
    })
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

    const PEER: SocketAddr = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 7);

    async fn status(access: &Access, all: &[(hyper::header::HeaderName, &str)]) -> u16 {
        let checked = access.check(&headers(all), PEER).await;
        checked.map_or_else(|denial| denial.status.as_u16(), |_| 200)
    }

    #[tokio::test]
    async fn only_the_token_is_accepted_and_web_pages_are_refused() {
        let access = Access::of_tcp(([127, 0, 0, 1], 8080).into(), Some("secret"), None);
        let host = || (HOST, "127.0.0.1:8080");
        for right in ["Bearer secret", "bearer secret"] {
            let answer = status(&access, &[host(), (AUTHORIZATION, right)]).await;
            assert_eq!(answer, 200, "{right}");
        }
        for wrong in [
            "Bearer secre",
            "Bearer secrets",
            "Bearer ",
            "secret",
            "Basic secret",
            "Basic YW5uYTpyaWdodA==",
        ] {
            let answer = status(&access, &[host(), (AUTHORIZATION, wrong)]).await;
            assert_eq!(answer, 401, "{wrong}");
        }
        assert_eq!(status(&access, &[host()]).await, 401);
        let right = (AUTHORIZATION, "Bearer secret");
        for other in ["store.example", "192.0.2.1:80", "localhost.example:80", ""] {
            let answer = status(&access, &[(HOST, other), right.clone()]).await;
            assert_eq!(answer, 403, "{other}");
        }
        assert_eq!(status(&access, std::slice::from_ref(&right)).await, 403);
        let page = (ORIGIN, "http://127.0.0.1:8080");
        assert_eq!(
            status(&access, &[host(), right.clone(), page.clone()]).await,
            403
        );
        // Beyond loopback any Host header is accepted.
        let access = Access::of_tcp(([0, 0, 0, 0], 8080).into(), Some("secret"), None);
        let elsewhere = (HOST, "store.example");
        assert_eq!(
            status(&access, &[elsewhere.clone(), right.clone()]).await,
            200
        );
        assert_eq!(status(&access, std::slice::from_ref(&elsewhere)).await, 401);
        assert_eq!(status(&access, &[elsewhere, right, page]).await, 403);
    }

    #[tokio::test]
    async fn without_a_token_no_token_is_right() {
        let access = Access::of_tcp(([0, 0, 0, 0], 8080).into(), None, None);
        for shown in ["Bearer ", "Bearer x"] {
            assert_eq!(status(&access, &[(AUTHORIZATION, shown)]).await, 401);
        }
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
