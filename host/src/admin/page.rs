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

struct File {
    path: &'static str,
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

/// Whether the client has these files already (RFC 9110 section 13.1.2). A proxy that compresses
/// them makes the tag a weak one.
fn has_version(headers: &HeaderMap) -> bool {
    let fields = headers.get_all(IF_NONE_MATCH).iter();
    let mut tags = fields.flat_map(|it| it.as_bytes().split(|byte| *byte == b','));
    tags.any(|tag| {
        let tag = tag.trim_ascii();
        tag == b"*" || tag.strip_prefix(b"W/").unwrap_or(tag) == VERSION.as_bytes()
    })
}

/// The answer if the path is that of a file.
pub(super) fn answer(method: &Method, path: &str, headers: &HeaderMap) -> Option<Answer> {
    let file = FILES.iter().find(|file| file.path == path)?;
    if *method != Method::GET {
        return Some(Refusal::method(method, path, "GET, HEAD").answer());
    }
    let mut answer = match has_version(headers) {
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
            let version = version.to_str().unwrap().to_owned();
            let status = |known: &str| {
                let known = HeaderValue::from_str(known).unwrap();
                let known = HeaderMap::from_iter([(IF_NONE_MATCH, known)]);
                let again = super::answer(&Method::GET, file.path, &known).unwrap();
                again.status().as_u16()
            };
            assert_eq!(status(&version), 304);
            assert_eq!(status(&format!("W/{version}")), 304);
            assert_eq!(status(&format!("\"other\", {version}")), 304);
            assert_eq!(status("*"), 304);
            assert_eq!(status("\"other\""), 200);
            let posted = super::answer(&Method::POST, file.path, &HeaderMap::new()).unwrap();
            assert_eq!(posted.status(), 405);
        }
        assert!(answer(&Method::GET, "/page.js/", &HeaderMap::new()).is_none());
    }
}
