//! Parses durations such as `500ms`, `10s`, `2m`, `1h`, `7d`.

use std::time::Duration;

use tokio::time::Instant;

use crate::limits;

/// The text is not a duration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a duration: write a whole number and a unit, such as 500ms, 10s, 2m, 1h or 7d")]
pub struct DurationError;

/// Parses a whole number followed by one of the units `ms`, `s`, `m`, `h`, `d`.
///
/// ```
/// # use statehouse_client::parse_duration;
/// assert_eq!(parse_duration("1500ms").unwrap().as_millis(), 1500);
/// assert!(parse_duration("10").is_err());
/// ```
///
/// # Errors
/// If the number or the unit is missing, if there is other text, or if the milliseconds exceed 64
/// bits.
pub fn parse_duration(text: &str) -> Result<Duration, DurationError> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let unit_ms = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err(DurationError),
    };
    let number: u64 = number.parse().map_err(|_| DurationError)?;
    number
        .checked_mul(unit_ms)
        .map(Duration::from_millis)
        .ok_or(DurationError)
}

/// `start` plus `duration`, limited so that the sum cannot overflow.
pub(crate) fn later(start: Instant, duration: Duration) -> Instant {
    start + duration.min(limits::DURATION_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units() {
        for (text, ms) in [
            ("0s", 0),
            ("250ms", 250),
            ("10s", 10_000),
            ("2m", 120_000),
            ("1h", 3_600_000),
            ("7d", 604_800_000),
        ] {
            assert_eq!(
                parse_duration(text),
                Ok(Duration::from_millis(ms)),
                "{text}"
            );
        }
    }

    #[tokio::test]
    async fn endless_wait_does_not_overflow() {
        let now = Instant::now();
        assert!(later(now, Duration::MAX) > now + Duration::from_secs(1 << 30));
    }

    #[test]
    fn invalid_durations_are_rejected() {
        for text in [
            "",
            "s",
            "10",
            "-1s",
            "+1s",
            "1.5s",
            "1 s",
            " 1s",
            "1S",
            "1w",
            "1s2",
            "1h30m",
            "99999999999999999999s",
            "18446744073709551615h",
        ] {
            assert_eq!(parse_duration(text), Err(DurationError), "{text}");
        }
    }
}
