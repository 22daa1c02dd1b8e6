//! Base64 in settings and messages.

use data_encoding::{BASE64, BASE64_NOPAD};

/// Decodes Base64, with or without padding.
#[must_use]
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let bytes = text.as_bytes();
    BASE64
        .decode(bytes)
        .or_else(|_| BASE64_NOPAD.decode(bytes))
        .ok()
}
