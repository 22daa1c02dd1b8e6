//! The URL of a broker and its password. Errors and logs must never contain the password.

use std::fmt;
use std::io::Read;
use std::path::Path;
use std::str::FromStr;

use super::ConfigError;
use crate::{limits, percent};

/// The protocol at an address. The default is MQTT over plain TCP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scheme {
    /// WebSocket (MQTT 5 section 6) instead of plain TCP.
    pub websocket: bool,
    /// TLS.
    pub tls: bool,
}

impl Scheme {
    /// The scheme in a URL.
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

    fn port(self) -> u16 {
        match (self.websocket, self.tls) {
            (false, false) => 1883,
            (false, true) => 8883,
            (true, false) => 80,
            (true, true) => 443,
        }
    }
}

/// A secret that is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(hidden)")
    }
}

/// The address of a broker, with optional credentials.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BrokerUrl {
    /// The protocol.
    pub scheme: Scheme,
    /// A host name or an IP address, without brackets.
    pub host: String,
    /// The TCP port.
    pub port: u16,
    /// The path of a WebSocket URL, with its slash; empty without one.
    pub path: String,
    /// The user in the URL.
    pub user: Option<String>,
    /// The password in the URL.
    pub password: Option<Secret>,
}

impl BrokerUrl {
    /// MQTT over plain TCP, without credentials.
    #[must_use]
    pub fn plain(host: &str, port: u16) -> Self {
        let bare = host.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
        Self {
            scheme: Scheme::default(),
            host: bare.unwrap_or(host).to_owned(),
            port,
            path: String::new(),
            user: None,
            password: None,
        }
    }
}

impl fmt::Display for BrokerUrl {
    /// The URL without credentials, so that it may be logged.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            host, port, path, ..
        } = self;
        let scheme = self.scheme.name();
        match host.contains(':') {
            true => write!(f, "{scheme}://[{host}]:{port}{path}"),
            false => write!(f, "{scheme}://{host}:{port}{path}"),
        }
    }
}

const UNEXPECTED: &str = "unexpected text after the host and port";
const INVALID_PORT: &str = "the port is invalid";

impl FromStr for BrokerUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // The text may hold a password, so no error may repeat it.
        parse(text).map_err(|what| {
            format!(
                "{what}: the URL of a broker is mqtt://HOST:PORT or mqtts://HOST:PORT, or ws:// or wss:// with a path, optionally with USER:PASSWORD@ before HOST"
            )
        })
    }
}

fn parse(text: &str) -> Result<BrokerUrl, &'static str> {
    let parts = text.split_once("://");
    let (scheme, rest) = parts
        .and_then(|(name, rest)| Some((Scheme::named(name)?, rest)))
        .ok_or("it begins with none of mqtt://, mqtts://, ws:// or wss://")?;
    // A password may contain a slash, so the path is searched behind it.
    let login_end = rest.rfind('@').map_or(0, |at| at + 1);
    let slash = rest[login_end..].find('/').map(|at| login_end + at);
    let (rest, path) = rest.split_at(slash.unwrap_or(rest.len()));
    let path = match (scheme.websocket, path) {
        (true, "") => "/",
        (true, path) => path,
        (false, "" | "/") => "",
        (false, _) => return Err(UNEXPECTED),
    };
    let (login, place) = match rest.rsplit_once('@') {
        Some((login, place)) => (Some(login), place),
        None => (None, rest),
    };
    if place.contains(['?', '#']) || path.contains(|c: char| c.is_whitespace() || c.is_control()) {
        return Err(UNEXPECTED);
    }
    let (host, port) = host_and_port(place)?;
    let port = match port.map(u16::from_str) {
        None => scheme.port(),
        Some(Ok(port @ 1..)) => port,
        Some(_) => return Err(INVALID_PORT),
    };
    let (user, password) = match login {
        None => (None, None),
        Some(login) => {
            let (user, password) = login.split_once(':').unwrap_or((login, ""));
            let wrong = "the user or password has a % without two hexadecimal digits";
            let decode = |it| percent::decode(it).and_then(|it| String::from_utf8(it).ok());
            (
                Some(decode(user).ok_or(wrong)?),
                Some(decode(password).ok_or(wrong)?),
            )
        }
    };
    Ok(BrokerUrl {
        scheme,
        host: host.to_owned(),
        port,
        path: path.to_owned(),
        user,
        password: password.filter(|it| !it.is_empty()).map(Secret),
    })
}

fn host_and_port(place: &str) -> Result<(&str, Option<&str>), &'static str> {
    let (host, port) = match place.strip_prefix('[').and_then(|it| it.split_once(']')) {
        Some((host, "")) => (host, None),
        Some((host, port)) => (host, Some(port.strip_prefix(':').ok_or(INVALID_PORT)?)),
        None => match place.split_once(':') {
            Some((_, port)) if port.contains(':') => return Err("an IPv6 address needs brackets"),
            Some((host, port)) => (host, Some(port)),
            None => (place, None),
        },
    };
    if host.is_empty() || host.contains(char::is_whitespace) {
        return Err("the host is missing");
    }
    Ok((host, port))
}

/// The password in the text of a file or a pipe: its first line, since editors add a line break,
/// without the byte order mark with which some of them begin.
#[must_use]
pub fn password_in(text: &str) -> &str {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    text.lines().next().unwrap_or_default()
}

/// The [password in](password_in) a file.
///
/// # Errors
/// If the file cannot be read, or is not UTF-8.
pub fn read_password(path: &Path) -> Result<Secret, ConfigError> {
    let failed = |error| ConfigError::Password(path.to_owned(), error);
    let mut text = String::new();
    let file = std::fs::File::open(path).map_err(failed)?;
    file.take(limits::BROKER_PASSWORD_BYTES_MAX)
        .read_to_string(&mut text)
        .map_err(failed)?;
    Ok(Secret(password_in(&text).to_owned()))
}

/// The password of an environment variable; an empty one counts as unset.
pub(super) fn password_variable(name: &str) -> Option<Secret> {
    let given = std::env::var(name).ok();
    given.filter(|it| !it.is_empty()).map(Secret)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> BrokerUrl {
        text.parse().unwrap()
    }

    #[test]
    fn a_url_yields_address_and_protocol() {
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
    fn a_url_may_contain_credentials() {
        let url = parsed("mqtt://m%40e:a%3Ab@c:d@broker");
        assert_eq!(url.user.as_deref(), Some("m@e"));
        assert_eq!(url.password, Some(Secret("a:b@c:d".into())));
        assert_eq!(url.host, "broker");
        let url = parsed("mqtt://me@broker");
        assert_eq!((url.user.as_deref(), url.password), (Some("me"), None));
    }

    #[test]
    fn an_invalid_url_is_refused_without_printing_it() {
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

    /// Regression: the mark was a part of the password.
    #[test]
    fn a_byte_order_mark_is_no_part_of_a_password() {
        for (text, password) in [
            ("\u{feff}se cret\r\nnote\n", "se cret"),
            ("\u{feff}", ""),
            ("a\u{feff}\n", "a\u{feff}"),
            ("", ""),
        ] {
            assert_eq!(password_in(text), password);
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), text).unwrap();
            let read = read_password(file.path()).unwrap();
            assert_eq!(read, Secret(password.to_owned()));
        }
    }

    #[test]
    fn a_password_is_never_shown() {
        let url = parsed("mqtt://me:secret@broker");
        assert!(!format!("{url:?} {url}").contains("secret"));
    }
}
