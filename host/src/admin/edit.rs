//! Changes of keys by operators.
//!
//! A change is a request to the active policy, as a client would send it, so the policy, the limits
//! and the fence of the key decide. History names the client `$operator` and the user.

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode, Uri};
use serde_json::{Value as Json, json};
use statehouse_client::Version;
use statehouse_protocol::{ConnectionId, SessionId, Shown};

use super::Sources;
use super::access::{Operator, new_token};
use super::answer::{Answer, Refusal, json};
use super::api::body;
use super::keys::{absent, durable};
use super::query::{bad, key, text};
use crate::past::json_bytes;
use statehouse_config::limits;
use statehouse_core::clock::Stamp;
use statehouse_core::policy::on_one_line;
use statehouse_core::store::Mode;
use statehouse_server::{OwnError, OwnRequest, OwnResponse, Read};

/// The response to a SET or VDEL whose condition did not hold, in each dialect.
const NOT_CHANGED: [&[u8]; 2] = [b":-1\r\n", b"-1\r\n"];

/// The response to a DEL or VDEL of a key that does not exist.
const NONE_REMOVED: &[u8] = b":0\r\n";

/// Sets or removes a key.
pub(super) async fn change(
    sources: &Sources,
    request: &mut Request<Incoming>,
    operator: &Operator,
) -> Result<Answer, Refusal> {
    let uri = request.uri().clone();
    let (key, fence) = (key(&uri)?, text(&uri, "fence")?);
    if !fence.as_deref().is_none_or(is_version) {
        let error =
            "`fence` must be the version of a lock, such as 001696374425000:00001:StateStore";
        return Err(bad(error));
    }
    let version = version(&uri)?;
    let set = match request.method() == Method::PUT {
        true => Some(set(&uri, &key, version.as_deref(), request).await?),
        false => None,
    };
    let server = &sources.server;
    let turn = server.own_turn().await?;
    let payload = match set {
        Some(payload) => payload,
        None => remove(sources, &key, version.as_deref()).await?,
    };
    let (session, connection) = own_session(sources, operator.user()).await?;
    let correlation = unique()?;
    let own = OwnRequest {
        payload,
        fence: fence.as_deref(),
        user: operator.user(),
        session,
        connection,
        correlation: correlation.as_bytes(),
    };
    let response = server.answer_own(turn, &own).await?;
    Ok(json(StatusCode::OK, &changed(&key, &response)?))
}

/// The version that the key must have, or `none` for a key that must not exist.
fn version(uri: &Uri) -> Result<Option<String>, Refusal> {
    let version = text(uri, "if_version")?;
    let is_good = |it: &str| it == "none" || is_version(it);
    if !version.as_deref().is_none_or(is_good) {
        let error = "`if_version` must be a version such as 001696374425000:00001:StateStore, or `none` for a key that does not exist";
        return Err(bad(error));
    }
    Ok(version)
}

/// The command that sets a key to the body of a request.
async fn set(
    uri: &Uri,
    key: &[u8],
    version: Option<&str>,
    request: &mut Request<Incoming>,
) -> Result<Bytes, Refusal> {
    let px = text(uri, "px")?;
    if px.as_deref().is_some_and(|px| !is_expiry(px)) {
        let error = "`px` must be the milliseconds until the key expires, at least 1";
        return Err(bad(error));
    }
    let value = body(request, limits::ADMIN_VALUE_BYTES_MAX as u64).await?;
    let mut words: Vec<&[u8]> = vec![b"SET", key, &value];
    match version {
        Some("none") => words.push(b"NX"),
        Some(version) => words.extend([&b"IFVERSION"[..], version.as_bytes()]),
        None => {}
    }
    if let Some(px) = &px {
        words.extend([&b"PX"[..], px.as_bytes()]);
    }
    Ok(command(&words))
}

/// The command that removes a key, if it has this version. The protocol has a removal by value and
/// none by version. If a client sets the same value between this read and the command, the key is
/// removed nevertheless.
async fn remove(sources: &Sources, key: &[u8], version: Option<&str>) -> Result<Bytes, Refusal> {
    let Some(version) = version else {
        return Ok(command(&[b"DEL", key]));
    };
    let expected: Version = (version.parse())
        .map_err(|_| bad("`if_version` must be the version of the key to remove"))?;
    sources.check_lease().await?;
    let Read { found, position } = sources.server.key(key);
    let entry = found.map(|it| it.entry);
    // All versions are of this store, so the node is not compared, as in IFVERSION.
    let has_version = |it: Stamp| (it.wall, it.counter) == (expected.wall_ms(), expected.counter());
    match entry {
        Some(entry) if has_version(entry.version()) => Ok(command(&[b"VDEL", key, entry.value()])),
        entry => {
            durable(&sources.server, position).await?;
            let node = sources.server.node();
            let entry = entry.ok_or_else(absent)?;
            let version = entry.version().display(&node).to_string();
            Err(not_changed(Some(&version)))
        }
    }
}

fn is_version(text: &str) -> bool {
    text.parse::<Version>().is_ok()
}

/// Whether a policy accepts this as an expiry: digits, from 1 to the largest signed number.
fn is_expiry(text: &str) -> bool {
    let has_digits = text.bytes().all(|byte| byte.is_ascii_digit());
    has_digits && text.parse::<i64>().is_ok_and(|ms| ms > 0)
}

/// A command as clients send it: an array of bulk strings (RESP3).
fn command(words: &[&[u8]]) -> Bytes {
    let mut payload = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        payload.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        payload.extend_from_slice(word);
        payload.extend_from_slice(b"\r\n");
    }
    payload.into()
}

/// Numbers that no client and no other request has. Behind a foreign broker, sessions are random
/// numbers, and users are not recorded.
async fn own_session(
    sources: &Sources,
    user: Option<&str>,
) -> Result<(SessionId, ConnectionId), Refusal> {
    if let Some(broker) = &sources.broker {
        return broker.begin_own_session(user).await.ok_or_else(|| {
            let error = "this host must not change anything now: it is stopping, it does not lead its cluster, or it cannot reach its log";
            Refusal::new(StatusCode::SERVICE_UNAVAILABLE, error)
        });
    }
    let digest = blake3::hash(unique()?.as_bytes());
    let number = digest.as_bytes().first_chunk();
    let number = number.map_or(0, |it| u64::from_be_bytes(*it));
    let session = Mode::foreign_session(number);
    Ok((session, session.only_connection()))
}

fn unique() -> Result<String, Refusal> {
    new_token().map_err(|error| Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()))
}

/// What became of a change.
fn changed(key: &[u8], response: &OwnResponse) -> Result<Json, Refusal> {
    let OwnResponse { payload, version } = response;
    let refused = |error: String| Err(Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, error));
    match &payload[..] {
        it if NOT_CHANGED.contains(&it) => Err(not_changed(version.as_deref())),
        NONE_REMOVED => Err(absent()),
        [b'-', error @ ..] => {
            let error = String::from_utf8_lossy(error);
            let error = error.strip_prefix("ERR ").unwrap_or(&error).trim_end();
            let error = on_one_line(error);
            refused(format!("the policy refused the change: {error}"))
        }
        [b'+' | b':', ..] => Ok(json!({ "key": json_bytes(key), "version": version })),
        other => {
            let shown = Shown::cut(other, statehouse_offline::limits::VALUE_SHOWN_BYTES_MAX);
            let shown = shown.on_one_line();
            refused(format!(
                "the policy gave another response than to SET, DEL and VDEL: {shown}"
            ))
        }
    }
}

/// The refusal of a change whose condition does not hold. `version` is that of the key, if it
/// exists.
fn not_changed(version: Option<&str>) -> Refusal {
    let error = match version {
        Some(version) => format!("the key was not changed: its version is {version}"),
        None => "the key was not changed: it does not exist, so it has no version".to_owned(),
    };
    Refusal::new(StatusCode::CONFLICT, error)
}

impl From<OwnError> for Refusal {
    fn from(error: OwnError) -> Self {
        let status = match error {
            OwnError::Busy | OwnError::Stopping => StatusCode::SERVICE_UNAVAILABLE,
            OwnError::Invalid(_) => StatusCode::BAD_REQUEST,
            OwnError::Refused(_) => StatusCode::UNPROCESSABLE_ENTITY,
            OwnError::Unknown => StatusCode::GATEWAY_TIMEOUT,
        };
        Self::new(status, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_response_of_a_policy_has_its_status() {
        let status = |payload: &'static [u8], version: Option<&str>| {
            let response = OwnResponse {
                payload: Bytes::from_static(payload),
                version: version.map(str::to_owned),
            };
            match changed(b"k", &response) {
                Ok(document) => (200, document["version"].to_string()),
                Err(refusal) => (refusal.status.as_u16(), refusal.error),
            }
        };
        let (code, version) = status(b"+OK\r\n", Some("1:2:n"));
        assert_eq!((code, &*version), (200, "\"1:2:n\""));
        assert_eq!(status(b":1\r\n", None).0, 200);
        assert_eq!(status(b":0\r\n", None).0, 404);
        for not_changed in NOT_CHANGED {
            let (code, why) = status(not_changed, Some("1:2:n"));
            assert!(code == 409 && why.contains("1:2:n"), "{why}");
        }
        let (code, why) = status(b"-ERR no\x1b[2J\r\n", None);
        assert_eq!(code, 422);
        assert_eq!(why, "the policy refused the change: no\\u{1b}[2J");
        // Regression: quotes were escaped.
        let (_, why) = status("-ERR 'Tür' \\xff\r\n".as_bytes(), None);
        assert_eq!(why, "the policy refused the change: 'Tür' \\xff");
        let (_, why) = status("$4\r\nTür\r\n".as_bytes(), None);
        assert!(why.ends_with(": $4\\r\\nTür\\r\\n"), "{why}");
        for strange in [&b""[..], b"$1\r\nx\r\n", b"\xff"] {
            assert_eq!(status(strange, None).0, 422, "{strange:?}");
        }
    }

    #[test]
    fn expiries_are_checked_before_the_policy_sees_them() {
        for (text, is_valid) in [
            ("1", true),
            ("9223372036854775807", true),
            ("9223372036854775808", false),
            ("0", false),
            ("+1", false),
            ("-1", false),
            ("", false),
        ] {
            assert_eq!(is_expiry(text), is_valid, "{text}");
        }
    }

    #[test]
    fn any_bytes_fit_into_a_command() {
        let payload = command(&[b"SET", b"\r\n$9\r\n", b"\xff\0"]);
        let words = statehouse_core::words::words(&payload).unwrap();
        assert_eq!(words, [&b"SET"[..], b"\r\n$9\r\n", b"\xff\0"]);
    }
}
