//! Authenticates requests to the admin API: over TCP by a token that only the owner of the data
//! directory can read, over TLS by that token or as a user, and at both by a
//! [session](super::sessions) that began with one of these.
//!
//! Being on the same machine must not suffice, because of other accounts and of web pages in a
//! local browser. A Unix socket admits only its owner and root, so it needs no token. It must still
//! refuse web pages, because `ssh -L` can put a socket at an address of a browser.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::{AUTHORIZATION, CONTENT_LENGTH, HOST, HeaderMap, HeaderName, ORIGIN};
use serde::{Deserialize, Serialize};

use super::sessions::{self, About, Begun, Sessions};
use statehouse_access::roles::Role;
use statehouse_access::{AccessControl, base64};
use statehouse_config::limits;
use statehouse_files::atomic::replace;
use statehouse_listener::headers::only_once;
use statehouse_mqtt::{Identity, ReasonCode};

/// Says which page caused a request: `same-origin`, `same-site`, `cross-site`, or `none` for the
/// user (Fetch Metadata). No script can change it.
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Bytes of a generated token.
const TOKEN_BYTES: usize = 32;

/// A random number of the running kernel (random(4)).
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Where commands find a running store, as the file `admin` in its data directory says.
#[derive(Clone, Serialize, Deserialize)]
pub struct Endpoint {
    /// Where the admin API listens.
    pub url: String,
    /// The bearer token; absent for a Unix socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
}

/// The content of the file `admin`.
#[derive(Serialize, Deserialize)]
struct AdminFile {
    #[serde(flatten)]
    endpoint: Endpoint,
    /// The directory that the file was written to. Absent in a file of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    directory: Option<DirectoryId>,
}

/// Identifies a directory. A copy of a data directory has the same file `admin`, but a command must
/// never change the store that runs in the original.
#[derive(Serialize, Deserialize)]
struct DirectoryId {
    /// The kernel that numbered the device; empty if unknown, as in some sandboxes.
    boot: String,
    device: u64,
    inode: u64,
}

impl DirectoryId {
    fn of(directory: &Path) -> io::Result<Self> {
        let about = fs::metadata(directory)?;
        let boot = fs::read_to_string(BOOT_ID).unwrap_or_default();
        Ok(Self {
            boot: boot.trim_end().to_owned(),
            device: about.dev(),
            inode: about.ino(),
        })
    }

    /// Whether both are of one directory. A bind mount, as of a container, has the device and the
    /// inode of its source. Another machine with the same network file system has other numbers for
    /// devices, so the inode alone decides there.
    fn is_same(&self, other: &Self) -> bool {
        let is_comparable = !self.boot.is_empty() && self.boot == other.boot;
        self.inode == other.inode && (self.device == other.device || !is_comparable)
    }
}

impl Endpoint {
    /// The path of the file.
    pub fn path(data: &Path) -> PathBuf {
        data.join("admin")
    }

    /// Reads the file. Fails with [`io::ErrorKind::NotFound`] if there is none, and, with a text
    /// for the operator, if it was written to another directory.
    pub fn read(data: &Path) -> io::Result<Self> {
        let path = Self::path(data);
        if fs::metadata(&path)?.len() > limits::ADMIN_FILE_BYTES_MAX {
            return Err(io::Error::other(
                "the file is larger than an admin file can be",
            ));
        }
        let file: AdminFile = serde_json::from_slice(&fs::read(path)?)?;
        let here = DirectoryId::of(data)?;
        match &file.directory {
            Some(written) if !written.is_same(&here) => {
                let why = "its file `admin` is copied or left over";
                Err(io::Error::new(io::ErrorKind::NotFound, why))
            }
            _ => Ok(file.endpoint),
        }
    }

    /// Writes the file, readable by its owner only.
    pub fn write(&self, data: &Path) -> io::Result<()> {
        let file = AdminFile {
            endpoint: self.clone(),
            directory: Some(DirectoryId::of(data)?),
        };
        replace(&Self::path(data), &serde_json::to_vec(&file)?, 0o600)
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

/// Whether a client can send this token in a header.
pub(crate) fn is_bearer_token(token: &str) -> bool {
    let is_allowed = |byte: u8| byte == b' ' || byte.is_ascii_graphic();
    token.bytes().all(is_allowed) && token.trim() == token
}

/// Who sent a request, and what that operator may do.
pub(super) struct Operator {
    access: Arc<Access>,
    /// The identity of a user; none for an operator with the token or at the socket.
    login: Option<Identity>,
    /// The role; none if the user has none.
    pub(super) role: Option<Role>,
    session: Option<Session>,
}

/// The session of an operator.
struct Session {
    key: blake3::Hash,
    expires_s: u64,
}

impl Operator {
    /// The name of the user; none for an operator with the token or at the socket.
    pub(super) fn user(&self) -> Option<&str> {
        self.login.as_ref()?.user.as_deref()
    }

    /// Whether the login still counts and the role is the same, for answers that take long.
    pub(super) fn is_good(&self) -> bool {
        let role = |user: &str| self.access.role(user);
        match (&self.session, &self.login) {
            (Some(it), _) => self.access.sessions.lasts(it.key, Instant::now(), role),
            (None, Some(login)) => login.is_proven() && self.user().and_then(role) == self.role,
            (None, None) => true,
        }
    }

    /// The operator, as the page shows it.
    pub(super) fn about(&self) -> About {
        About {
            user: self.user().map(str::to_owned),
            role: self.role.map_or("", Role::name),
            expires_s: self.session.as_ref().map(|it| it.expires_s),
        }
    }

    /// Begins a session for this operator. None if the request was sent in a session: a session
    /// must not prolong itself.
    pub(super) fn begin_session(&self) -> io::Result<Option<Begun>> {
        let (None, Some(role)) = (&self.session, self.role) else {
            return Ok(None);
        };
        let sessions = &self.access.sessions;
        Ok(Some(Begun {
            session: sessions.begin(self.login.clone(), role, Instant::now())?,
            about: About {
                expires_s: Some(limits::ADMIN_SESSION_IDLE_MAX.as_secs()),
                ..self.about()
            },
        }))
    }

    /// Ends the session of the request. Returns whether it was sent in one.
    pub(super) fn end_session(&self) -> bool {
        if let Some(session) = &self.session {
            self.access.sessions.end(session.key);
        }
        self.session.is_some()
    }
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
#[derive(Default)]
pub(super) struct Access {
    /// Hash of the token, compared in constant time.
    token: Option<blake3::Hash>,
    /// Whether the ability to connect suffices.
    admits_anyone: bool,
    /// Whether only metrics and probes are served, which no page needs to be kept from.
    is_for_metrics: bool,
    /// Whether the address is reachable from this machine only.
    loopback: bool,
    /// The users who may log in, over TLS only: elsewhere a password could be read on its way.
    users: Option<Arc<AccessControl>>,
    sessions: Sessions,
}

impl Access {
    /// Every client that can connect is admitted, to metrics and probes.
    pub(super) fn for_metrics() -> Self {
        Self {
            admits_anyone: true,
            is_for_metrics: true,
            ..Self::default()
        }
    }

    /// Every client that can connect to a Unix socket is admitted.
    pub(super) fn of_socket() -> Self {
        Self {
            admits_anyone: true,
            loopback: true,
            ..Self::default()
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
            loopback: address.ip().is_loopback(),
            users,
            ..Self::default()
        }
    }

    /// Whether clients are on other machines or accounts, so that their addresses matter.
    pub(super) fn is_remote(&self) -> bool {
        self.users.is_some() || !self.loopback
    }

    /// The present role of a user.
    fn role(&self, user: &str) -> Option<Role> {
        self.users.as_ref()?.role(user)
    }

    /// Refuses a request that repeats a header of which the code would read only the first. Probes
    /// are checked too.
    pub(super) fn check_form(headers: &HeaderMap) -> Result<(), String> {
        let names = [HOST, ORIGIN, AUTHORIZATION, CONTENT_LENGTH, SEC_FETCH_SITE];
        only_once(headers, &names)
    }

    /// Refuses a request under another name than one of this machine. DNS rebinding: the name of a
    /// page may resolve to this machine, so the requests of that page would look same-origin.
    pub(super) fn check_host(&self, headers: &HeaderMap) -> Result<(), Denial> {
        let host = headers.get(HOST).and_then(|host| host.to_str().ok());
        if self.loopback && !host.is_some_and(is_loopback) {
            let why = "the Host header must name a loopback address";
            return Err(denial(StatusCode::FORBIDDEN, why));
        }
        Ok(())
    }

    /// Refuses a request that another page than the one of this address caused.
    fn check_page(&self, headers: &HeaderMap) -> Result<(), Denial> {
        let site = headers.get(SEC_FETCH_SITE).map(|it| it.as_bytes());
        let is_own_site = matches!(site, None | Some(b"same-origin" | b"none"));
        let scheme = match &self.users {
            Some(_) => &b"https://"[..],
            None => b"http://",
        };
        let host = headers.get(HOST).map(|it| it.as_bytes());
        let is_own_origin = headers.get(ORIGIN).is_none_or(|origin| {
            let shown = origin.as_bytes().strip_prefix(scheme);
            shown.is_some() && shown == host
        });
        if !is_own_site || !is_own_origin {
            let why = "requests of web pages of other origins are refused: the Origin header must be the scheme and the Host of this address";
            return Err(denial(StatusCode::FORBIDDEN, why));
        }
        Ok(())
    }

    fn operator(self: &Arc<Self>, login: Option<Identity>, role: Option<Role>) -> Operator {
        Operator {
            access: self.clone(),
            login,
            role,
            session: None,
        }
    }

    /// The operator who sent this request from `peer`.
    pub(super) async fn check(
        self: &Arc<Self>,
        headers: &HeaderMap,
        peer: SocketAddr,
    ) -> Result<Operator, Denial> {
        // An operator who can read the data directory, or act as its owner, may do everything.
        let local = || self.operator(None, Some(Role::Ship));
        if self.is_for_metrics {
            return Ok(local());
        }
        self.check_host(headers)?;
        self.check_page(headers)?;
        let shown = headers.get(AUTHORIZATION).map(|value| value.as_bytes());
        let bearer = shown.and_then(after(b"Bearer "));
        if let Some(secret) = bearer.filter(|it| it.starts_with(sessions::PREFIX.as_bytes())) {
            return self.of_session(secret);
        }
        if self.admits_anyone {
            return Ok(local());
        }
        if let (Some(users), Some(shown)) = (&self.users, shown.and_then(after(b"Basic "))) {
            let login = login(users, shown, peer).await?;
            let role = login.user.as_deref().and_then(|user| users.role(user));
            return Ok(self.operator(Some(login), role));
        }
        let why = match (bearer, &self.users) {
            // Hashes compare in constant time.
            (Some(shown), _) if self.token == Some(blake3::hash(shown)) => return Ok(local()),
            (Some(_), _) => {
                "the token is not the one of this store: it is in the file `admin` of its data directory, and another one after each start"
            }
            (None, Some(_)) => {
                "a login is missing: send a user name and a password (HTTP Basic), or the store's token (Bearer)"
            }
            (None, None) => {
                "a token is missing: send `Authorization: Bearer TOKEN` with the one in the file `admin` of the data directory"
            }
        };
        Err(denial(StatusCode::UNAUTHORIZED, why))
    }

    fn of_session(self: &Arc<Self>, secret: &[u8]) -> Result<Operator, Denial> {
        let found = (self.sessions).find(secret, Instant::now(), |user| self.role(user));
        let why = "the session has ended: log in again";
        let found = found.ok_or(denial(StatusCode::UNAUTHORIZED, why))?;
        Ok(Operator {
            session: Some(Session {
                key: found.key,
                expires_s: found.expires.as_secs(),
            }),
            ..self.operator(found.login, Some(found.role))
        })
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
async fn login(users: &AccessControl, shown: &[u8], peer: SocketAddr) -> Result<Identity, Denial> {
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
    checked.map_err(|(reason, why)| {
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
    })
}

/// Whether a Host header names this machine. Anything that is not in the form of a host with an
/// optional port (RFC 3986 section 3.2) does not.
fn is_loopback(host: &str) -> bool {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !port.ends_with(']') => (name, port),
        _ => (host, ""),
    };
    let has_digits = port.bytes().all(|byte| byte.is_ascii_digit());
    if !has_digits || !(port.is_empty() || port.parse::<u16>().is_ok()) {
        return false;
    }
    let bracketed = name.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
    match bracketed {
        Some(address) => (address.parse::<Ipv6Addr>()).is_ok_and(|ip| ip.is_loopback()),
        None => {
            name.eq_ignore_ascii_case("localhost")
                || (name.parse::<Ipv4Addr>()).is_ok_and(|ip| ip.is_loopback())
        }
    }
}

#[cfg(test)]
mod tests;
