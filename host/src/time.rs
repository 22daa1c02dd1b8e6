//! Parses and prints points in time. The input is text such as `2026-11-21T03:00:00Z`; times
//! without an offset are UTC. The local time zone is never used.

use std::time::Duration;

use jiff::tz::TimeZone;
use jiff::{Timestamp, civil};

/// Milliseconds since 1970 as `2026-11-21T03:00:00.000Z`.
pub(crate) fn utc(ms: u64) -> String {
    let time = i64::try_from(ms).map(Timestamp::from_millisecond);
    match time {
        Ok(Ok(time)) => format!("{time:.3}"),
        _ => format!("{ms} ms after 1970"),
    }
}

/// Whole milliseconds.
pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Parses a date, or a date and time. Returns milliseconds since 1970; `None` if the text is
/// neither.
pub(crate) fn parse(text: &str) -> Option<u64> {
    // jiff accepts the name of a time zone, but without the data of zones it would ignore it.
    if text.contains('[') {
        return None;
    }
    let time: Timestamp = text.parse().ok().or_else(|| {
        let local: civil::DateTime = text.parse().ok()?;
        local.to_zoned(TimeZone::UTC).ok().map(|it| it.timestamp())
    })?;
    u64::try_from(time.as_millisecond()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_moments() {
        for (ms, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (1_696_374_425_000, "2023-10-03T23:07:05.000Z"),
            (1_795_230_000_123, "2026-11-21T03:00:00.123Z"),
            (4_107_542_399_999, "2100-02-28T23:59:59.999Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(utc(ms), text);
            assert_eq!(parse(text), Some(ms), "{text}");
        }
        for ms in [i64::MAX as u64, i64::MAX as u64 + 1, u64::MAX] {
            assert_eq!(utc(ms), format!("{ms} ms after 1970"));
        }
    }

    #[test]
    fn all_forms_of_a_time_parse_alike() {
        let moment = 1_795_230_000_000;
        for text in [
            "2026-11-21T03:00:00Z",
            "2026-11-21t03:00:00z",
            "2026-11-21 03:00",
            "2026-11-21 03:00:00",
            "2026-11-21T03:00:00.0009Z",
            "2026-11-21T05:30:00+02:30",
            "2026-11-20T22:00:00-05:00",
        ] {
            assert_eq!(parse(text), Some(moment), "{text}");
        }
        assert_eq!(parse("2026-11-21"), Some(moment - 3 * 3_600_000));
        assert_eq!(parse("2026-11-21T03:00:00.5Z"), Some(moment + 500));
    }

    #[test]
    fn invalid_times_are_refused() {
        for text in [
            "",
            "now",
            "03:00",
            "2026",
            "2026-11",
            "2026-13-01",
            "2026-00-10",
            "2026-02-29",
            "1900-02-29",
            "2026-11-31",
            "2026-11-21T",
            "2026-11-21T24:00",
            "2026-11-21T03:60",
            "2026-11-21T03:00:00.",
            "2026-11-21T03:00:00X",
            "2026-11-21T03:00:00Z ",
            "2026-11-21T03:00:00+2",
            "+026-11-21",
            "2026-11-21T-1:00",
            "1969-12-31",
            "5m",
            "2026-11-21T05:30:00[Europe/Berlin]",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
