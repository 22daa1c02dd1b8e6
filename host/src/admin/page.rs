//! The files of the page for operators.
//!
//! They are served without a login, so they must reveal nothing that is stored. The page itself
//! gets everything through the admin API, with a [session](super::sessions).

use std::sync::LazyLock;

use bytes::Bytes;
use hyper::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, ETAG, HeaderMap, HeaderName, HeaderValue,
    IF_NONE_MATCH, REFERRER_POLICY,
};
use hyper::{Method, StatusCode};

use super::answer::{Answer, Refusal, with};

/// A file of the page.
struct File {
    /// The path of its URL.
    path: &'static str,
    /// The media type.
    kind: &'static str,
    bytes: &'static [u8],
}

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

const fn file(path: &'static str, kind: &'static str, bytes: &'static [u8]) -> File {
    File { path, kind, bytes }
}

const FILES: &[File] = &[
    file("/", HTML, include_bytes!("page/index.html")),
    file("/page.css", CSS, include_bytes!("page/page.css")),
    file("/views.css", CSS, include_bytes!("page/views.css")),
    file("/act.js", JAVASCRIPT, include_bytes!("page/act.js")),
    file("/api.js", JAVASCRIPT, include_bytes!("page/api.js")),
    file("/bytes.js", JAVASCRIPT, include_bytes!("page/bytes.js")),
    file("/clients.js", JAVASCRIPT, include_bytes!("page/clients.js")),
    file("/cluster.js", JAVASCRIPT, include_bytes!("page/cluster.js")),
    file("/dom.js", JAVASCRIPT, include_bytes!("page/dom.js")),
    file("/draw.js", JAVASCRIPT, include_bytes!("page/draw.js")),
    file("/events.js", JAVASCRIPT, include_bytes!("page/events.js")),
    file("/key.js", JAVASCRIPT, include_bytes!("page/key.js")),
    file("/keys.js", JAVASCRIPT, include_bytes!("page/keys.js")),
    file("/log.js", JAVASCRIPT, include_bytes!("page/log.js")),
    file(
        "/overview.js",
        JAVASCRIPT,
        include_bytes!("page/overview.js"),
    ),
    file("/page.js", JAVASCRIPT, include_bytes!("page/page.js")),
    file(
        "/policies.js",
        JAVASCRIPT,
        include_bytes!("page/policies.js"),
    ),
    file("/shadow.js", JAVASCRIPT, include_bytes!("page/shadow.js")),
    file("/tree.js", JAVASCRIPT, include_bytes!("page/tree.js")),
    file("/icon.svg", SVG, include_bytes!("page/icon.svg")),
];

/// One version for all files: a browser must not combine files of two versions of the program.
static VERSION: LazyLock<String> = LazyLock::new(|| {
    let mut hasher = blake3::Hasher::new();
    for file in FILES {
        hasher.update(&(file.bytes.len() as u64).to_le_bytes());
        hasher.update(file.bytes);
    }
    format!("\"{}\"", &hasher.finalize().to_hex()[..32])
});

/// The page may load its own files and call its own address, and no other page may embed it. So
/// even text that became markup could load no code and send nothing to another place.
const CONTENT_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'";

/// The headers of each file. `nosniff` is in every answer of the admin API.
const HEADERS: [(HeaderName, &str); 5] = [
    (CONTENT_SECURITY_POLICY, CONTENT_POLICY),
    (REFERRER_POLICY, "no-referrer"),
    (
        HeaderName::from_static("cross-origin-opener-policy"),
        "same-origin",
    ),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        "same-origin",
    ),
    (CACHE_CONTROL, "no-cache"),
];

/// The answer if the path is that of a file. The server leaves out the body for HEAD.
pub(super) fn answer(method: &Method, path: &str, headers: &HeaderMap) -> Option<Answer> {
    let file = FILES.iter().find(|file| file.path == path)?;
    if ![Method::GET, Method::HEAD].contains(method) {
        return Some(Refusal::method(method, path, "GET, HEAD").answer());
    }
    let asked = headers.get(IF_NONE_MATCH).map(HeaderValue::as_bytes);
    let mut answer = match asked == Some(VERSION.as_bytes()) {
        true => with(StatusCode::NOT_MODIFIED, file.kind, Bytes::new()),
        false => with(StatusCode::OK, file.kind, file.bytes),
    };
    let into = answer.headers_mut();
    for (name, value) in HEADERS {
        into.insert(name, HeaderValue::from_static(value));
    }
    if let Ok(version) = HeaderValue::from_str(&VERSION) {
        into.insert(ETAG, version);
    }
    Some(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_load_nothing_from_elsewhere_and_no_inline_code() {
        for file in FILES {
            let text = std::str::from_utf8(file.bytes).unwrap();
            let text = text.replace("http://www.w3.org/", "");
            for forbidden in ["http://", "https://", "<style", " style=", " onclick="] {
                assert!(!text.contains(forbidden), "{}: {forbidden}", file.path);
            }
            let scripts = text.matches("<script").count();
            let own = text.matches("<script type=\"module\" src=\"/").count();
            assert_eq!(
                scripts, own,
                "{}: an inline script would not run",
                file.path
            );
        }
    }

    #[test]
    fn every_file_has_the_security_headers_and_one_version() {
        for file in FILES {
            let answer = answer(&Method::GET, file.path, &HeaderMap::new()).unwrap();
            assert_eq!(answer.status(), 200);
            for (name, value) in HEADERS {
                assert_eq!(answer.headers()[&name], value, "{}", file.path);
            }
            let version = answer.headers()[ETAG].clone();
            assert_eq!(version, VERSION.as_str());
            let known = HeaderMap::from_iter([(IF_NONE_MATCH, version)]);
            let again = super::answer(&Method::GET, file.path, &known).unwrap();
            assert_eq!(again.status(), 304);
            let posted = super::answer(&Method::POST, file.path, &HeaderMap::new()).unwrap();
            assert_eq!(posted.status(), 405);
        }
        assert!(answer(&Method::GET, "/page.js/", &HeaderMap::new()).is_none());
    }
}
