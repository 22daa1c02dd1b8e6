//! A pending request: its PUBLISH, which may be sent several times, and the channel for its result.

use std::time::Duration;

use bytes::Bytes;
use rumqttc::v5::mqttbytes::v5::Publish;
use statehouse_link::Message;
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::error::Error;
use crate::version::Version;

/// The response to a request.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) payload: Bytes,
    pub(crate) version: Option<Version>,
}

/// The response to a request that registers a watch.
#[derive(Debug)]
pub(crate) enum Registered {
    /// The watch reports all changes after this version, if the store says so.
    Begun(Option<Version>),
    /// All changes up to this version were sent, and the watch is not registered.
    More(Version),
}

/// A request without a response.
#[derive(Debug)]
pub(crate) struct Request {
    /// The same bytes each time, including `__ts`, which is part of the identity of a duplicate
    /// (section 9).
    pub(crate) publish: Publish,
    pub(crate) deadline: Instant,
    pub(crate) done: oneshot::Sender<Result<Answer, Error>>,
}

impl Request {
    /// Passes the result to the caller, which may have stopped waiting.
    pub(crate) fn finish(self, result: Result<Answer, Error>) {
        let _ = self.done.send(result);
    }
}

impl Message for Request {
    fn publish(&self) -> Option<Publish> {
        let mut publish = self.publish.clone();
        let left = self.deadline.saturating_duration_since(Instant::now());
        if let Some(properties) = &mut publish.properties {
            properties.message_expiry_interval = Some(expiry_s(left));
        }
        // After the deadline the caller removes the request, so there is always something to
        // publish.
        Some(publish)
    }

    fn too_large(self, bytes: usize, bytes_max: usize) -> Option<Self> {
        self.finish(Err(Error::Invalid(format!(
            "the request is too large: {bytes} bytes, and the broker takes at most {bytes_max}"
        ))));
        None
    }
}

/// Whole seconds, rounded up. A message that expires in 0 s would never arrive.
pub(crate) fn expiry_s(left: Duration) -> u32 {
    let seconds = left.as_millis().div_ceil(1000).max(1);
    u32::try_from(seconds).unwrap_or(u32::MAX)
}
