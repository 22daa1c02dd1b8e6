//! Formats policies from the JSON of the admin API. A policy chooses its own name, so every text
//! must be escaped.

use serde_json::Value as Json;

use crate::cli::output::{Failure, one_line, printable};
use statehouse_config::percent;
use statehouse_core::policy::{Selector, SelectorError};

/// A text of a response, escaped on one line.
pub(super) fn text(value: &Json) -> String {
    printable(value.as_str().unwrap_or("?").as_bytes())
}

/// A selector of a policy as a part of a URL. A long one would make the URL too long for the admin
/// API, so it is refused here as there.
pub(super) fn selector(which: &str) -> Result<String, Failure> {
    let parsed: Result<Selector, SelectorError> = which.parse();
    parsed.map_err(|error| Failure::usage(error.to_string()))?;
    Ok(percent::encode(which.as_bytes()))
}

/// A message of a response on one line, which may quote bytes that are escaped already.
pub(super) fn message(value: &Json) -> String {
    one_line(value.as_str().unwrap_or("?"))
}

/// NAME VERSION blake3:DIGEST.
pub(super) fn policy(view: &Json) -> String {
    let (name, version) = (text(&view["name"]), text(&view["version"]));
    format!("{name} {version} blake3:{}", text(&view["digest"]))
}

/// The beginning of a digest, long enough to identify a policy.
pub(super) fn short(digest: &Json) -> String {
    text(digest).chars().take(16).collect()
}

/// NAME@VERSION and the beginning of the digest, for a digest in a listing.
pub(super) fn named(listing: &Json, digest: &Json) -> String {
    let policies = listing["policies"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    match policies.iter().find(|it| it["digest"] == *digest) {
        Some(it) => format!(
            "{}@{} ({})",
            text(&it["name"]),
            text(&it["version"]),
            short(digest)
        ),
        None => short(digest),
    }
}

pub(super) fn number(value: &Json) -> String {
    value.as_u64().unwrap_or_default().to_string()
}
