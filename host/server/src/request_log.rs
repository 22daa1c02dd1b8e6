//! One log line for each request (`--log-filter info,statehouse::request=debug`).
//!
//! A line names the client, the correlation data, the policy and the result. It never contains keys
//! or values, because logs are read by more people than the store.

use statehouse_config::limits;
use statehouse_core::request::{ReplyTo, Request};
use statehouse_core::store::{Effects, Rerun};
use statehouse_protocol::Shown;

const TARGET: &str = "statehouse::request";

/// Logs a request. While the target is disabled, this costs one load of an atomic.
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
        client = request.peer.shown(),
        // The correlation data of the client (MQTT 5, section 3.3.2.3.6).
        request = shortened_hex(reply_to.correlation_data()),
        bytes = request.payload.len(),
        policy = policy.map(|it| &*it.tag),
        command,
        fuel = effects.fuel,
        repeated = effects.repeated.map(|rerun| match rerun {
            Rerun::Same => "same",
            Rerun::Stored => "stored",
            Rerun::Different => "different",
        }),
        // The text may repeat what the client sent: as a string it cannot imitate another field.
        error = error_text(payload),
        failure = effects.failed.as_ref().map(tracing::field::display),
        answer_bytes = payload.len(),
        "answered"
    );
}

/// The text of an error response, without `-ERR` (the protocol, section 4).
fn error_text(payload: &[u8]) -> Option<String> {
    let text = payload.strip_prefix(b"-ERR ")?.trim_ascii_end();
    Some(Shown::cut(text, limits::REQUEST_LINE_ERROR_BYTES_MAX).to_string())
}

/// The first bytes in hexadecimal.
fn shortened_hex(bytes: &[u8]) -> String {
    let shown = &bytes[..bytes.len().min(limits::REQUEST_LINE_ID_BYTES_MAX)];
    let mut hex = data_encoding::HEXLOWER.encode(shown);
    if shown.len() < bytes.len() {
        hex.push_str("...");
    }
    hex
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: bytes that are not ASCII were escaped, and the log in JSON escaped them again.
    #[test]
    fn error_of_a_request_is_text() {
        let error = error_text("-ERR unknown command 'GRÜN'\r\n".as_bytes());
        assert_eq!(error.as_deref(), Some("unknown command 'GRÜN'"));
        let long = [b"-ERR ".as_slice(), &[b'x'; 1000], b"\r\n"].concat();
        let cut = "x".repeat(limits::REQUEST_LINE_ERROR_BYTES_MAX) + "…";
        assert_eq!(error_text(&long), Some(cut));
        assert_eq!(error_text(b"+OK\r\n"), None);
    }
}
