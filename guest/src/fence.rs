//! Timestamps and fencing tokens: form, skew, and the requirements of a fenced key (the protocol,
//! sections 4 to 6).

use statehouse_policy::hlc::{self, Reading};
use statehouse_policy::limits::SKEW_MS_MAX;
use statehouse_policy::{Hlc, Request, Stamp};

use crate::reply::Refusal;

/// The `__ts` of a SET.
///
/// # Errors
///
/// A [`Refusal`] if it is missing, malformed, or too far ahead of the store's time.
pub fn timestamp(request: &Request) -> Result<Stamp, Refusal> {
    let text = request
        .timestamp
        .as_deref()
        .ok_or(Refusal::MissingTimestamp)?;
    let reading = hlc::parse(text).map_err(|_| Refusal::MalformedTimestamp)?;
    if is_ahead(&reading, request.now) {
        return Err(Refusal::TimestampAhead);
    }
    Ok(reading.stamp())
}

/// The `__ft` of a request, if it has one.
///
/// # Errors
///
/// A [`Refusal`] if it is malformed or too far ahead of the store's time.
pub fn token(request: &Request) -> Result<Option<Reading<'_>>, Refusal> {
    let Some(text) = request.fencing_token.as_deref() else {
        return Ok(None);
    };
    let reading = hlc::parse(text).map_err(|_| Refusal::MalformedTimestamp)?;
    if is_ahead(&reading, request.now) {
        return Err(Refusal::FenceAhead);
    }
    Ok(Some(reading))
}

/// Checks whether a request with `token` may access a key with `fence`. An equal token belongs to
/// the current holder.
///
/// # Errors
///
/// A [`Refusal`] if the token is missing or lower.
pub fn admit(fence: Option<&Hlc>, token: Option<&Reading<'_>>) -> Result<(), Refusal> {
    match (fence.map(Reading::from), token) {
        (None, _) => Ok(()),
        (Some(_), None) => Err(Refusal::FenceMissing),
        (Some(fence), Some(token)) if *token < fence => Err(Refusal::FenceLower),
        (Some(_), Some(_)) => Ok(()),
    }
}

fn is_ahead(reading: &Reading<'_>, now_ms: u64) -> bool {
    reading.wall > now_ms.saturating_add(SKEW_MS_MAX)
}
