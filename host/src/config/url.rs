//! The URL of a broker, and the secret that may stand in it.
//!
//! What enters: text of an operator. What leaves: where a broker is and what it speaks, or a sentence that says what is wrong
//! and repeats no password.

use std::fmt;
use std::io::Read;
use std::path::Path;
use std::str::FromStr;

use super::ConfigError;
use crate::limits;

/// What is spoken at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheme {
    /// WebSocket (MQTT 5 section 6), or the bytes themselves.
    pub websocket: bool,
    /// TLS.
    pub tls: bool,
}

impl Scheme {
    /// As it stands in a URL.
    #[must_use]
    pub fn name(self) -> &'static str {
        match (self.websocket, self.tls) {
            (false, false) => "mqtt",
            (false, true) => "mqtts",
            (true, false) => "ws",
            (true, true) => "wss",
        }
    }

    pub(super) fn named(name: &str) -> Option<Self> {
        let all = [(false, false), (false, true), (true, false), (true, true)];
        let mut all = all
            .map(|(websocket, tls)| Self { websocket, tls })
            .into_iter();
        all.find(|it| it.name() == name)
    }

    /// The port where nobody names another.
    fn port(self) -> u16 {
        match (self.websocket, self.tls) {
            (false, false) => 1883,
            (false, true) => 8883,
            (true, false) => 80,
            (true, true) => 443,
        }
    }
}

/// What must not be seen.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(hidden)")
    }
}

/// Where a broker is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrokerUrl {
    /// What is spoken there.
    pub scheme: Scheme,
    /// A name or an address, without brackets.
    pub host: String,
    /// The TCP port.
    pub port: u16,
    /// The path of a WebSocket, with its slash; empty without one.
    pub path: String,
    /// The user that stands there.
    pub user: Option<String>,
    /// The password that stands there.
    pub password: Option<Secret>,
}

impl BrokerUrl {
    /// MQTT over plain TCP, without user and password.
    #[must_use]
    pub fn plain(host: &str, port: u16) -> Self {
        let bare = host.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
        Self {
            scheme: Scheme {
                websocket: false,
                tls: false,
            },
            host: bare.unwrap_or(host).to_owned(),
            port,
            path: String::new(),
            user: None,
            password: None,
        }
    }
}

impl fmt::Display for BrokerUrl {
    /// The URL without user and password, which belong in no log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (
            scheme,
            Self {
                host, port, path, ..
            },
        ) = (self.scheme.name(), self);
        match host.contains(':') {
            true => write!(f, "{scheme}://[{host}]:{port}{path}"),
            false => write!(f, "{scheme}://{host}:{port}{path}"),
        }
    }
}

impl FromStr for BrokerUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // The text may hold a password: no error repeats it.
        let invalid = |what: &str| {
            Err(format!(
                "{what}: the URL of a broker is mqtt://HOST:PORT or mqtts://HOST:PORT, or ws:// or wss:// with a path, and with USER:PASSWORD@ before HOST if need be"
            ))
        };
        let parts = text.split_once("://");
        let Some((scheme, rest)) =
            parts.and_then(|(name, rest)| Some((Scheme::named(name)?, rest)))
        else {
            return invalid("it begins with none of mqtt://, mqtts://, ws:// and wss://");
        };
        // A password may hold a slash: the path begins behind it.
        let login_end = rest.rfind('@').map_or(0, |at| at + 1);
        let slash = rest[login_end..].find('/').map(|at| login_end + at);
        let (rest, path) = rest.split_at(slash.unwrap_or(rest.len()));
        let path = match (scheme.websocket, path) {
            (true, "") => "/",
            (true, path) => path,
            (false, "" | "/") => "",
            (false, _) => return invalid("there is more than host and port"),
        };
        let (login, place) = match rest.rsplit_once('@') {
            Some((login, place)) => (Some(login), place),
            None => (None, rest),
        };
        if place.contains(['?', '#'])
            || path.contains(|c: char| c.is_whitespace() || c.is_control())
        {
            return invalid("there is more than host and port");
        }
        let (host, port) = match place.strip_prefix('[').and_then(|it| it.split_once(']')) {
            Some((host, "")) => (host, None),
            Some((host, port)) => match port.strip_prefix(':') {
                Some(port) => (host, Some(port)),
                None => return invalid("its port is not one"),
            },
            None => match place.split_once(':') {
                Some((_, port)) if port.contains(':') => {
                    return invalid("an IPv6 address needs brackets");
                }
                Some((host, port)) => (host, Some(port)),
                None => (place, None),
            },
        };
        if host.is_empty() || host.contains(char::is_whitespace) {
            return invalid("it names no host");
        }
        let port = match port.map(u16::from_str) {
            None => scheme.port(),
            Some(Ok(port @ 1..)) => port,
            Some(_) => return invalid("its port is not one"),
        };
        let (user, password) = match login.map(|it| it.split_once(':').unwrap_or((it, ""))) {
            None => (None, None),
            Some((user, password)) => match (decode(user), decode(password)) {
                (Some(user), Some(password)) => (
                    Some(user),
                    (!password.is_empty()).then_some(Secret(password)),
                ),
                _ => {
                    return invalid("its user or password has a % that begins no hexadecimal byte");
                }
            },
        };
        Ok(Self {
            scheme,
            host: host.to_owned(),
            port,
            path: path.to_owned(),
            user,
            password,
        })
    }
}

/// Percent-encoding (RFC 3986 section 2.1) undone.
fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, behind)) = rest.split_first() {
        rest = behind;
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let (digits, behind) = rest.split_first_chunk::<2>()?;
        let digit = |byte: u8| char::from(byte).to_digit(16);
        let (high, low) = (digit(digits[0])?, digit(digits[1])?);
        bytes.push(u8::try_from(high << 4 | low).ok()?);
        rest = behind;
    }
    String::from_utf8(bytes).ok()
}

/// The password of a file: its first line, since editors end it with a line break.
///
/// # Errors
/// [`ConfigError::Password`].
pub fn read_password(path: &Path) -> Result<Secret, ConfigError> {
    let failed = |error| ConfigError::Password(path.to_owned(), error);
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    file.take(limits::BROKER_PASSWORD_BYTES_MAX)
        .read_to_string(&mut text)
        .map_err(failed)?;
    Ok(Secret(text.lines().next().unwrap_or_default().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> BrokerUrl {
        text.parse().unwrap()
    }

    #[test]
    fn a_url_says_where_and_how() {
        for (text, shown) in [
            ("mqtt://broker", "mqtt://broker:1883"),
            ("mqtts://broker/", "mqtts://broker:8883"),
            ("mqtt://10.0.0.7:1884", "mqtt://10.0.0.7:1884"),
            ("mqtt://[::1]", "mqtt://[::1]:1883"),
            ("mqtts://[fe80::2]:99", "mqtts://[fe80::2]:99"),
            ("mqtt://me:secret@broker:1", "mqtt://broker:1"),
            ("ws://broker", "ws://broker:80/"),
            (
                "wss://me:sec/ret@broker/mqtt?a=b",
                "wss://broker:443/mqtt?a=b",
            ),
            ("ws://[::1]:8080/mqtt", "ws://[::1]:8080/mqtt"),
        ] {
            assert_eq!(parsed(text).to_string(), shown);
        }
        assert_eq!(parsed("mqtt://[::1]").host, "::1");
    }

    #[test]
    fn a_url_may_say_who() {
        let url = parsed("mqtt://m%40e:a%3Ab@c:d@broker");
        assert_eq!(url.user.as_deref(), Some("m@e"));
        assert_eq!(url.password, Some(Secret("a:b@c:d".into())));
        assert_eq!(url.host, "broker");
        let url = parsed("mqtt://me@broker");
        assert_eq!((url.user.as_deref(), url.password), (Some("me"), None));
    }

    #[test]
    fn what_is_no_url_is_refused_without_repeating_it() {
        for text in [
            "broker:1883",
            "http://broker",
            "mqtt://",
            "mqtt://me:secret@",
            "mqtt://broker:0",
            "mqtt://broker:secret",
            "mqtt://::1",
            "mqtt://[::1]secret",
            "mqtt://broker/secret",
            "mqtt://me:sec%ret@broker",
        ] {
            let error = text.parse::<BrokerUrl>().unwrap_err();
            assert!(error.contains("mqtt://HOST:PORT"), "{text}: {error}");
            assert!(!error.contains("secret"), "{text}: {error}");
        }
    }

    #[test]
    fn a_password_is_never_shown() {
        let url = parsed("mqtt://me:secret@broker");
        assert!(!format!("{url:?} {url}").contains("secret"));
    }
}
