//! The settings of traces: the collector, how to log in there, and which requests are traced.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use hyper::Uri;
use hyper::header::{HeaderName, HeaderValue};

use super::ConfigError;
use super::layer::settings;
use crate::limits;
use statehouse_files::watch::read_file;

settings! {
    /// The settings of `serve` for traces.
    #[command(next_help_heading = "Traces")]
    pub struct TraceFlags {
        /// Send traces of requests to this collector, over OTLP (HTTP with protobuf):
        /// http://HOST:PORT or https://HOST:PORT [default path: /v1/traces]
        #[arg(long, value_name = "URL", env = "STATEHOUSE_TRACES")]
        pub traces: Option<CollectorUrl>,

        /// The share of requests to trace, from 0 to 1. A request with the user property
        /// `traceparent` is traced if that says so [default: 0.01]
        #[arg(long, value_name = "RATIO", env = "STATEHOUSE_TRACES_SAMPLE")]
        pub traces_sample: Option<Ratio>,

        /// A file with HTTP headers for the collector, such as `authorization: Bearer TOKEN`, one
        /// per line. OTEL_EXPORTER_OTLP_HEADERS adds headers
        #[arg(long, value_name = "FILE", env = "STATEHOUSE_TRACES_HEADERS")]
        pub traces_headers: Option<PathBuf>,

        /// CA certificates (PEM) that the collector's certificate is verified against [default: the
        /// system's]
        #[arg(long, value_name = "FILE", env = "STATEHOUSE_TRACES_CA")]
        pub traces_ca: Option<PathBuf>,
    }
}

/// Where traces go, and which.
#[derive(Clone, Debug, PartialEq)]
pub struct TracesConfig {
    /// The address of the collector.
    pub url: CollectorUrl,
    /// The share of requests without a trace context that are traced.
    pub sample: f64,
    /// CA certificates for the collector's certificate; without it the system's.
    pub ca: Option<PathBuf>,
    /// The file with headers.
    pub headers_file: Option<PathBuf>,
}

impl TraceFlags {
    /// Checks that the settings are consistent.
    pub(super) fn load(self) -> Result<Option<TracesConfig>, ConfigError> {
        let Some(url) = self.traces else {
            return match self.first_set() {
                Some(name) => Err(ConfigError::WithoutCollector(name)),
                None => Ok(None),
            };
        };
        if self.traces_ca.is_some() && !url.is_tls() {
            return Err(ConfigError::CollectorWithoutTls(url));
        }
        Ok(Some(TracesConfig {
            url,
            sample: (self.traces_sample).map_or(limits::TRACE_SAMPLE_DEFAULT, |it| it.0),
            ca: self.traces_ca,
            headers_file: self.traces_headers,
        }))
    }
}

impl TracesConfig {
    /// Reads the headers. They are secrets, so no error may repeat them. Fails if the file cannot
    /// be read, or is not of the form.
    pub fn headers(&self) -> Result<Vec<(String, String)>, ConfigError> {
        let Some(path) = &self.headers_file else {
            return Ok(Vec::new());
        };
        let bytes = read_file(path, limits::TRACE_HEADERS_BYTES_MAX)?;
        let lines = String::from_utf8_lossy(&bytes).into_owned();
        let lines = lines.lines().map(str::trim).enumerate();
        let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        let parsed = lines.map(|(at, line)| {
            header(line).ok_or_else(|| ConfigError::CollectorHeader(path.clone(), at + 1))
        });
        parsed.collect()
    }
}

fn header(line: &str) -> Option<(String, String)> {
    let (name, value) = line.split_once(':')?;
    let (name, value) = (name.trim(), value.trim());
    HeaderName::from_str(name).ok()?;
    HeaderValue::from_str(value).ok()?;
    Some((name.to_ascii_lowercase(), value.to_owned()))
}

/// A share, from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio(f64);

impl FromStr for Ratio {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok(Self(ratio)),
            _ => Err(format!(
                "`{text}` is not a share of requests: write a number from 0 to 1, such as 0.01"
            )),
        }
    }
}

/// The URL of a collector. It has no credentials, so it may be logged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectorUrl(Uri);

/// The path of traces below an address without a path (OTLP 1.9, "OTLP/HTTP Request").
const DEFAULT_PATH: &str = "/v1/traces";

impl FromStr for CollectorUrl {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // The text may hold a password, so no error may repeat it.
        let wrong = |what: &str| {
            format!(
                "{what}: the URL of a trace collector is http://HOST:PORT or https://HOST:PORT, with or without a path"
            )
        };
        let uri = Uri::from_str(text).map_err(|_| wrong("this is not a URL"))?;
        match uri.scheme_str() {
            Some("http" | "https") => {}
            _ => return Err(wrong("it begins with neither http:// nor https://")),
        }
        let authority = uri.authority().map_or("", |it| it.as_str());
        if authority.contains('@') {
            return Err(wrong(
                "a URL must not have a user or a password: put them into the file of --traces-headers",
            ));
        }
        let host = uri.host().unwrap_or_default();
        // A port that is no port is none at all to the parser.
        let is_port = authority.len() == host.len() || uri.port_u16().is_some_and(|it| it > 0);
        if host.is_empty() || !is_port {
            return Err(wrong("the host or the port is missing or invalid"));
        }
        Ok(Self(uri))
    }
}

impl CollectorUrl {
    /// Whether the connection is encrypted.
    #[must_use]
    pub fn is_tls(&self) -> bool {
        self.0.scheme_str() == Some("https")
    }

    /// A host name or an IP address, without brackets.
    #[must_use]
    pub fn host(&self) -> &str {
        let host = self.0.host().unwrap_or_default();
        let bare = host.strip_prefix('[').and_then(|it| it.strip_suffix(']'));
        bare.unwrap_or(host)
    }

    /// The TCP port.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.0
            .port_u16()
            .unwrap_or(if self.is_tls() { 443 } else { 80 })
    }

    /// The URL that receives traces.
    #[must_use]
    pub fn endpoint(&self) -> String {
        let text = self.to_string();
        match self.0.path() {
            "" | "/" => format!("{}{DEFAULT_PATH}", text.trim_end_matches('/')),
            _ => text,
        }
    }
}

impl fmt::Display for CollectorUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> CollectorUrl {
        text.parse().unwrap()
    }

    #[test]
    fn a_collector_url_yields_address_and_path() {
        for (text, host, port, endpoint) in [
            ("http://c:4318", "c", 4318, "http://c:4318/v1/traces"),
            ("http://c:4318/", "c", 4318, "http://c:4318/v1/traces"),
            ("https://c", "c", 443, "https://c/v1/traces"),
            ("http://[::1]:1", "::1", 1, "http://[::1]:1/v1/traces"),
            ("https://c/otlp?a=b", "c", 443, "https://c/otlp?a=b"),
        ] {
            let url = url(text);
            assert_eq!((url.host(), url.port()), (host, port), "{text}");
            assert_eq!(url.endpoint(), endpoint);
        }
        for wrong in [
            "c:4318",
            "grpc://c:4317",
            "http://",
            "http://:4318",
            "http://c:",
            "http://c:0",
            "http://c:99999",
            "http://me:secret@c",
            "http://c d",
        ] {
            let error = wrong.parse::<CollectorUrl>().unwrap_err();
            assert!(error.contains("http://HOST:PORT"), "{wrong}: {error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn a_ratio_is_between_0_and_1() {
        assert_eq!("0.25".parse(), Ok(Ratio(0.25)));
        assert_eq!(("0".parse(), "1".parse()), (Ok(Ratio(0.0)), Ok(Ratio(1.0))));
        for wrong in ["", "-0.1", "1.01", "NaN", "inf", "10%"] {
            assert!(wrong.parse::<Ratio>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn settings_of_traces_need_a_collector() {
        assert_eq!(TraceFlags::default().load().unwrap(), None);
        let sample = TraceFlags {
            traces_sample: Some(Ratio(0.5)),
            ..TraceFlags::default()
        };
        let error = sample.clone().load().unwrap_err().to_string();
        assert!(error.contains("traces_sample") && error.contains("--traces URL"));
        let whole = TraceFlags {
            traces: Some(url("http://c")),
            ..sample
        };
        assert_eq!(whole.clone().load().unwrap().unwrap().sample, 0.5);
        let unencrypted = TraceFlags {
            traces_ca: Some("ca.pem".into()),
            ..whole
        };
        assert!(unencrypted.load().is_err());
    }

    #[test]
    fn headers_are_read_from_a_file_and_never_shown() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("headers");
        let config = TracesConfig {
            url: url("http://c"),
            sample: 1.0,
            ca: None,
            headers_file: Some(path.clone()),
        };
        assert!(config.headers().is_err(), "no such file");
        std::fs::write(&path, "# token\nAuthorization:  Bearer a:b \n\n").unwrap();
        let pair = ("authorization".to_owned(), "Bearer a:b".to_owned());
        assert_eq!(config.headers().unwrap(), [pair]);
        for wrong in ["secret", "sec ret: x", "x: sec\u{1}ret"] {
            std::fs::write(&path, format!("a: b\n{wrong}\n")).unwrap();
            let error = config.headers().unwrap_err().to_string();
            assert!(error.contains("line 2"), "{error}");
            assert!(!error.contains("sec"), "{error}");
        }
    }
}
