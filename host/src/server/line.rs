//! A line of the log for each request, for who wants it (`--log-filter info,statehouse::request=debug`).
//!
//! What enters: a request, and what it led to. What leaves: who asked under which id, which policy answered, and how. Keys and
//! values are not said: a log is read by more people than a store.

use std::fmt;

use crate::limits;
use statehouse_core::request::{ReplyTo, Request};
use statehouse_core::store::{Effects, Rerun};

/// Where requests are found in the log.
const TARGET: &str = "statehouse::request";

/// Logs a request. It costs one look at an atomic where nobody wants that.
pub(super) fn log(request: &Request<'_>, reply_to: &ReplyTo<'_>, effects: &Effects) {
    if !tracing::enabled!(target: TARGET, tracing::Level::DEBUG) {
        return;
    }
    let answer = effects.answer.as_ref();
    let policy = effects.by.as_deref();
    let command = policy.zip(answer).and_then(|(policy, answer)| {
        let command = policy.commands.get(usize::from(answer.command?))?;
        Some(command.as_str())
    });
    let payload = answer.map_or(&[][..], |it| &it.payload);
    tracing::debug!(
        target: TARGET,
        client = %request.peer.client.escape_debug(),
        // What the client calls it: its correlation data (MQTT 5 section 3.3.2.3.6).
        request = %Hex(reply_to.correlation_data()),
        bytes = request.payload.len(),
        policy = policy.map(|it| &*it.tag),
        command,
        fuel = effects.fuel,
        repeated = effects.repeated.map(|rerun| match rerun {
            Rerun::Same => "same",
            Rerun::Stored => "stored",
            Rerun::Different => "different",
        }),
        error = refusal(payload).as_deref(),
        failure = effects.failed.as_ref().map(ToString::to_string),
        answer_bytes = payload.len(),
        "answered"
    );
}

/// The text of an answer that is an error, `-ERR` aside (the protocol, section 4).
fn refusal(payload: &[u8]) -> Option<String> {
    let text = payload.strip_prefix(b"-ERR ")?;
    let text = &text[..text.len().min(limits::REQUEST_LINE_ERROR_BYTES_MAX)];
    Some(text.trim_ascii_end().escape_ascii().to_string())
}

/// The first of some bytes, two digits each.
struct Hex<'a>(&'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (shown, left) = (self.0).split_at(self.0.len().min(limits::REQUEST_LINE_ID_BYTES_MAX));
        shown.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        if left.is_empty() {
            Ok(())
        } else {
            f.write_str("...")
        }
    }
}
