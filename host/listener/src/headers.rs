//! Header checks that the HTTP listeners share.
//!
//! A proxy may act on another copy of a repeated header than this process does. So a request must
//! not repeat a header that has one value.

use hyper::header::{self, HeaderMap, HeaderName};
use hyper::{Request, Version};

/// Refuses a request in which one of these headers occurs more than once (for Host: RFC 9112
/// section 3.2).
pub fn only_once(headers: &HeaderMap, names: &[HeaderName]) -> Result<(), String> {
    let mut names = names.iter();
    match names.find(|name| headers.get_all(*name).iter().nth(1).is_some()) {
        Some(name) => Err(format!("the request has more than one `{name}` header")),
        None => Ok(()),
    }
}

/// Refuses a request of HTTP/1.1 that does not say which host it is for (RFC 9112 section 3.2).
pub fn has_host<B>(request: &Request<B>) -> Result<(), String> {
    let host = request.headers().get(header::HOST);
    match host.is_none_or(|host| host.is_empty()) && request.version() >= Version::HTTP_11 {
        true => Err("the request must have a `host` header with a value".to_owned()),
        false => Ok(()),
    }
}
