//! Responses of the admin API: a status and JSON, text, or a [stream of events](super::stream).

use http_body_util::Full;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};
use serde::Serialize;
use serde_json::json;

use super::stream::Content;
use crate::policies::delivery::ShipError;
use crate::policies::manager::{ControlError, ControlErrorKind};

pub(super) type Answer = Response<Content>;

/// An error response.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    pub(super) error: String,
}

impl Refusal {
    pub(super) fn new(status: StatusCode, error: impl Into<String>) -> Self {
        Self {
            status,
            error: error.into(),
        }
    }

    pub(super) fn answer(self) -> Answer {
        json(self.status, &json!({ "error": self.error }))
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

/// A JSON response.
pub(super) fn json(status: StatusCode, document: &impl Serialize) -> Answer {
    match serde_json::to_vec(document) {
        Ok(body) => with(status, "application/json", body),
        // All keys in these documents are strings, so this cannot fail.
        Err(error) => with(
            StatusCode::INTERNAL_SERVER_ERROR,
            "text/plain",
            error.to_string().into_bytes(),
        ),
    }
}

/// A response with any body.
pub(super) fn with(status: StatusCode, kind: &'static str, body: Vec<u8>) -> Answer {
    let mut answer = Response::new(Content::Whole(Full::new(body.into())));
    *answer.status_mut() = status;
    let kind = HeaderValue::from_static(kind);
    answer.headers_mut().insert(CONTENT_TYPE, kind);
    answer
}
