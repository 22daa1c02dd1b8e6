//! The key prefix of a route, and its form in the document.

use serde::{Deserialize, Serialize};

/// A key prefix. Serialized as text if it is UTF-8, otherwise as a list of numbers, so that the
/// record of the log is JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "PrefixText", into = "PrefixText")]
pub struct Prefix(pub Vec<u8>);

#[derive(Clone, Serialize, Deserialize)]
#[serde(untagged)]
enum PrefixText {
    Text(String),
    Bytes { bytes: Vec<u8> },
}

impl From<PrefixText> for Prefix {
    fn from(text: PrefixText) -> Self {
        match text {
            PrefixText::Text(text) => Self(text.into_bytes()),
            PrefixText::Bytes { bytes } => Self(bytes),
        }
    }
}

impl From<Prefix> for PrefixText {
    fn from(Prefix(bytes): Prefix) -> Self {
        match String::from_utf8(bytes) {
            Ok(text) => Self::Text(text),
            Err(error) => Self::Bytes {
                bytes: error.into_bytes(),
            },
        }
    }
}
