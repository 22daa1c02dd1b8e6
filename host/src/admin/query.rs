//! Values of the query of a request.

use std::ops::RangeInclusive;

use hyper::{StatusCode, Uri};

use super::answer::Refusal;
use statehouse_config::percent;

/// The refusal of a malformed request.
pub(super) fn bad(error: impl Into<String>) -> Refusal {
    Refusal::new(StatusCode::BAD_REQUEST, error)
}

/// Refuses parameters with other names, without a value, and given twice.
pub(super) fn check(uri: &Uri, names: &[&str]) -> Result<(), Refusal> {
    let query = uri.query().unwrap_or_default();
    let mut seen = Vec::new();
    for pair in query.split('&').filter(|it| !it.is_empty()) {
        let name = pair.split_once('=').map_or(pair, |it| it.0);
        if !names.contains(&name) {
            let known = match names {
                [] => "this request has no parameters".to_owned(),
                names => format!("this request has {}", names.join(", ")),
            };
            return Err(bad(format!("`{name}` is not a parameter: {known}")));
        }
        if !pair.contains('=') {
            return Err(bad(format!("`{name}` has no value: `{name}=VALUE`")));
        }
        if seen.contains(&name) {
            return Err(bad(format!("`{name}` is given twice")));
        }
        seen.push(name);
    }
    Ok(())
}

/// The bytes of a value, if it is there.
pub(super) fn value(uri: &Uri, name: &str) -> Result<Option<Vec<u8>>, Refusal> {
    let mut pairs = uri.query().unwrap_or_default().split('&');
    let is_there = pairs.any(|pair| pair.split_once('=').is_some_and(|it| it.0 == name));
    match percent::value(uri.query(), name) {
        None if is_there => Err(bad(format!("`{name}` is not percent-encoded"))),
        found => Ok(found),
    }
}

/// Any bytes; empty if they are not there.
pub(super) fn bytes(uri: &Uri, name: &str) -> Result<Vec<u8>, Refusal> {
    Ok(value(uri, name)?.unwrap_or_default())
}

/// The value of `key`, which must not be empty.
pub(super) fn key(uri: &Uri) -> Result<Vec<u8>, Refusal> {
    value(uri, "key")?
        .filter(|key| !key.is_empty())
        .ok_or_else(|| bad("name the key, percent-encoded: ?key=KEY"))
}

/// A text, if it is there.
pub(super) fn text(uri: &Uri, name: &str) -> Result<Option<String>, Refusal> {
    let value = value(uri, name)?.map(String::from_utf8);
    value
        .transpose()
        .map_err(|_| bad(format!("`{name}` is not UTF-8")))
}

/// A number within `range`.
pub(super) fn number(
    uri: &Uri,
    name: &str,
    default: usize,
    range: RangeInclusive<usize>,
) -> Result<usize, Refusal> {
    let Some(text) = text(uri, name)? else {
        return Ok(default);
    };
    let number = text.parse::<usize>().ok().filter(|it| range.contains(it));
    let (min, max) = range.into_inner();
    number.ok_or_else(|| bad(format!("`{name}` must be a number from {min} to {max}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise a handover to `%zz` would go to any host.
    #[test]
    fn malformed_values_are_refused_instead_of_ignored() {
        for query in ["to=%zz", "to=%ff", "a=1&to=%"] {
            let uri = format!("/v1/cluster/handover?{query}").parse().unwrap();
            assert!(text(&uri, "to").is_err(), "{query}");
        }
        let uri = "/v1/keys?key=%zz&limit=%zz".parse().unwrap();
        assert!(key(&uri).is_err());
        assert!(number(&uri, "limit", 1, 0..=9).is_err());
        let uri = "/v1/keys?key=a%20b".parse().unwrap();
        assert_eq!(key(&uri).ok().unwrap(), b"a b");
        assert_eq!(text(&uri, "to").ok().unwrap(), None);
    }
}
