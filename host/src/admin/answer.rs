//! Responses of the admin API: a status and JSON, text, or a [stream of events](super::stream).
//!
//! A large one must get room in memory, and keeps it until it is sent. So clients that read nothing
//! hold a bounded number of bytes.

use std::sync::LazyLock;

use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::{Method, Response, StatusCode};
use serde::Serialize;
use serde_json::json;
use tokio::sync::Semaphore;

use super::stream::Content;
use crate::policies::delivery::ShipError;
use crate::policies::manager::{ControlError, ControlErrorKind};
use statehouse_config::{limits, part_of_memory};
use statehouse_files::blocking::BlockingError;

pub(super) type Answer = Response<Content>;

/// An error response.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    pub(super) error: String,
    /// The methods that the resource has, if the request had another one.
    allowed: Option<String>,
}

impl Refusal {
    pub(super) fn new(status: StatusCode, error: impl Into<String>) -> Self {
        Self {
            status,
            error: error.into(),
            allowed: None,
        }
    }

    /// A resource has these methods, and not the one of the request (RFC 9110 section 15.5.6).
    pub(super) fn method(method: &Method, path: &str, allowed: impl Into<String>) -> Self {
        let error = format!("the method {method} is not allowed for {path}");
        Self {
            allowed: Some(allowed.into()),
            ..Self::new(StatusCode::METHOD_NOT_ALLOWED, error)
        }
    }

    pub(super) fn answer(self) -> Answer {
        let mut answer = json(self.status, &json!({ "error": self.error }));
        let allowed = self.allowed.and_then(|it| HeaderValue::try_from(it).ok());
        if let Some(allowed) = allowed {
            answer.headers_mut().insert(ALLOW, allowed);
        }
        answer
    }
}

impl From<BlockingError> for Refusal {
    fn from(error: BlockingError) -> Self {
        match error {
            BlockingError::Thread(_) => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
            }
            BlockingError::Panicked => {
                let error = "the request failed because of a bug in the admin API: see the log";
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, error)
            }
        }
    }
}

impl From<ControlError> for Refusal {
    fn from(error: ControlError) -> Self {
        let status = match error.kind() {
            ControlErrorKind::NotFound => StatusCode::NOT_FOUND,
            ControlErrorKind::Conflict => StatusCode::CONFLICT,
            ControlErrorKind::Refused => StatusCode::UNPROCESSABLE_ENTITY,
            ControlErrorKind::Failed => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, error.to_string())
    }
}

impl From<ShipError> for Refusal {
    fn from(error: ShipError) -> Self {
        match error {
            ShipError::Control(error) => error.into(),
            ShipError::Trust(error) => {
                Self::new(StatusCode::UNPROCESSABLE_ENTITY, error.to_string())
            }
        }
    }
}

/// The room for large answers, in KiB.
static ROOM_KIB: LazyLock<u32> = LazyLock::new(|| {
    let bytes = part_of_memory(8, limits::ADMIN_UNSENT_BYTES_MAX);
    u32::try_from(bytes / 1024).unwrap_or(u32::MAX)
});

/// The part of it that is left.
static ROOM: LazyLock<Semaphore> = LazyLock::new(|| Semaphore::new(*ROOM_KIB as usize));

/// The bytes of an answer with their permit, dropped when they are sent.
pub(super) struct Unsent<P> {
    pub(super) bytes: Vec<u8>,
    pub(super) _permit: P,
}

impl<P> AsRef<[u8]> for Unsent<P> {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Bytes to send, or `None` if they are many and there is no room for them.
fn with_room(bytes: Vec<u8>) -> Option<Bytes> {
    if bytes.len() <= limits::ADMIN_SMALL_ANSWER_BYTES_MAX {
        return Some(bytes.into());
    }
    // One answer always fits.
    let kib = u32::try_from(bytes.len() / 1024).unwrap_or(u32::MAX);
    let _permit = ROOM.try_acquire_many(kib.min(*ROOM_KIB)).ok()?;
    Some(Bytes::from_owner(Unsent { bytes, _permit }))
}

/// A JSON response: 503 if it is large and other clients have not read theirs.
pub(super) fn json(status: StatusCode, document: &impl Serialize) -> Answer {
    match serde_json::to_vec(document).map(with_room) {
        Ok(Some(body)) => with(status, "application/json", body),
        Ok(None) => {
            let error = "other clients have not read their large answers yet: try again later";
            Refusal::new(StatusCode::SERVICE_UNAVAILABLE, error).answer()
        }
        // All keys in these documents are strings, so this cannot fail.
        Err(error) => with(
            StatusCode::INTERNAL_SERVER_ERROR,
            "text/plain",
            error.to_string().into_bytes(),
        ),
    }
}

/// A response with any body.
pub(super) fn with(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Content::Whole(Full::new(body.into())));
    *answer.status_mut() = status;
    let kind = HeaderValue::from_static(kind);
    answer.headers_mut().insert(CONTENT_TYPE, kind);
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise clients that read nothing would hold any number of large answers.
    #[test]
    fn large_answers_hold_their_room_until_they_are_sent() {
        let large = "x".repeat(8 << 20);
        let mut unsent = Vec::new();
        loop {
            let answer = json(StatusCode::OK, &large);
            if answer.status() == StatusCode::SERVICE_UNAVAILABLE {
                break;
            }
            unsent.push(answer);
            assert!(unsent.len() <= 8, "the room has no limit");
        }
        assert_eq!(json(StatusCode::OK, &"small").status(), StatusCode::OK);
        unsent.pop();
        assert_eq!(json(StatusCode::OK, &large).status(), StatusCode::OK);
    }
}
