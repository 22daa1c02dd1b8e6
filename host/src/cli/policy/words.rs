//! Policies in words, from the JSON that the administration answers with. What a policy calls itself is its own
//! choice, so nothing of it is printed as it came.

use serde_json::Value as Json;

use crate::cli::output::printable;

/// A text of an answer, on one line.
pub(super) fn text(value: &Json) -> String {
    printable(value.as_str().unwrap_or("?").as_bytes())
}

/// NAME VERSION blake3:DIGEST.
pub(super) fn policy(view: &Json) -> String {
    let (name, version) = (text(&view["name"]), text(&view["version"]));
    format!("{name} {version} blake3:{}", text(&view["digest"]))
}

/// The beginning of a digest: enough to name it by.
pub(super) fn short(digest: &Json) -> String {
    text(digest).chars().take(16).collect()
}

/// NAME@VERSION and the beginning of the digest, for a policy of a listing that is known by its digest.
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

/// A number of an answer.
pub(super) fn number(value: &Json) -> String {
    value.as_u64().unwrap_or_default().to_string()
}
