//! Parses and prints points in time. The input is text such as `2026-11-21T03:00:00Z` or `10m`
//! (ago); times without an offset are UTC. The local time zone is never used.

use std::time::Duration;

use statehouse_client::parse_duration;

const DAY_MS: i64 = 86_400_000;

/// The last year that is supported; RFC 3339 has four digits.
const YEAR_MAX: i64 = 9999;

/// Milliseconds since 1970 as `2026-11-21T03:00:00.000Z`.
pub(crate) fn utc(ms: u64) -> String {
    let ms = i64::try_from(ms).unwrap_or(i64::MAX);
    let (day, rest) = (ms / DAY_MS, ms % DAY_MS);
    let (year, month, day) = civil(day);
    if year > YEAR_MAX {
        return format!("{ms} ms after 1970");
    }
    let (hour, minute) = (rest / 3_600_000, rest / 60_000 % 60);
    let (second, milli) = (rest / 1000 % 60, rest % 1000);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{milli:03}Z")
}

/// Parses a date, a date and time, or how long ago; `now_ms` is the current time.
pub(crate) fn parse(text: &str, now_ms: u64) -> Option<u64> {
    if let Ok(ago) = parse_duration(text) {
        let ago_ms = u64::try_from(Duration::as_millis(&ago)).unwrap_or(u64::MAX);
        return Some(now_ms.saturating_sub(ago_ms));
    }
    let mut at = Cursor(text.as_bytes());
    let year = at.digits(4)?;
    at.literal(b'-')?;
    let month = at.digits(2)?;
    at.literal(b'-')?;
    let day = at.digits(2)?;
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let month_days = match month {
        2 => 28 + i64::from(leap),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    };
    if !(1..=12).contains(&month) || !(1..=month_days).contains(&day) {
        return None;
    }
    let mut ms = days(year, month, day) * DAY_MS;
    if !at.0.is_empty() {
        if !matches!(at.take()?, b'T' | b't' | b' ') {
            return None;
        }
        ms += at.clock()?;
    }
    (at.0.is_empty()).then_some(())?;
    u64::try_from(ms).ok()
}

struct Cursor<'a>(&'a [u8]);

impl Cursor<'_> {
    fn take(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn literal(&mut self, byte: u8) -> Option<()> {
        (self.take()? == byte).then_some(())
    }

    fn digits(&mut self, count: usize) -> Option<i64> {
        let mut value = 0;
        for _ in 0..count {
            let digit = self.take().filter(u8::is_ascii_digit)?;
            value = value * 10 + i64::from(digit - b'0');
        }
        Some(value)
    }

    fn below(&mut self, end: i64) -> Option<i64> {
        self.digits(2).filter(|value| *value < end)
    }

    /// `HH:MM[:SS[.fraction]]`, then nothing, `Z` or an offset. Returns milliseconds of the day in
    /// UTC.
    fn clock(&mut self) -> Option<i64> {
        let hour = self.below(24)?;
        self.literal(b':')?;
        let minute = self.below(60)?;
        let mut ms = hour * 3_600_000 + minute * 60_000;
        if self.0.first() == Some(&b':') {
            self.take();
            // A leap second becomes the first moment of the next minute, since system clocks do not
            // count it.
            ms += self.below(61)? * 1000;
            if self.0.first() == Some(&b'.') {
                self.take();
                ms += self.fraction()?;
            }
        }
        match self.take() {
            None | Some(b'Z' | b'z') => Some(ms),
            Some(sign @ (b'+' | b'-')) => {
                let hours = self.below(24)?;
                self.literal(b':')?;
                let offset_ms = hours * 3_600_000 + self.below(60)? * 60_000;
                Some(if sign == b'+' {
                    ms - offset_ms
                } else {
                    ms + offset_ms
                })
            }
            Some(_) => None,
        }
    }

    /// The fraction of a second; digits after the third are dropped.
    fn fraction(&mut self) -> Option<i64> {
        let count = self.0.iter().take_while(|it| it.is_ascii_digit()).count();
        let (digits, rest) = self.0.split_at(count);
        self.0 = rest;
        let mut scale = 100;
        let mut ms = 0;
        for digit in digits.iter().take(3) {
            ms += i64::from(digit - b'0') * scale;
            scale /= 10;
        }
        (count > 0).then_some(ms)
    }
}

// Both directions follow Howard Hinnant's `chrono-Compatible Low-Level Date Algorithms`. Years
// begin in March, so that the leap day is the last day of a year.

/// Days since 1970 of a date of the Gregorian calendar.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let of_era = year - era * 400;
    let of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
}

/// The date of a day since 1970.
fn civil(day: i64) -> (i64, i64, i64) {
    let day = day + 719_468;
    let era = day.div_euclid(146_097);
    let of_era = day - era * 146_097;
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + i64::from(month <= 2);
    (year, month, day)
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
            assert_eq!(parse(text, 0), Some(ms), "{text}");
        }
        assert_eq!(utc(u64::MAX), format!("{} ms after 1970", i64::MAX));
    }

    #[test]
    fn every_day_of_four_centuries_round_trips() {
        let mut last = days(1999, 12, 31);
        for year in 2000..2400 {
            for month in 1..=12 {
                for day in 1..=31 {
                    let text = format!("{year:04}-{month:02}-{day:02}");
                    let Some(ms) = parse(&text, 0) else {
                        assert!(day > 28, "{text}");
                        continue;
                    };
                    last += 1;
                    assert_eq!(ms, u64::try_from(last * DAY_MS).unwrap(), "{text}");
                    assert_eq!(civil(last), (year, month, day));
                }
            }
        }
        assert_eq!(last - days(1999, 12, 31), 146_097);
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
            assert_eq!(parse(text, 0), Some(moment), "{text}");
        }
        assert_eq!(parse("2026-11-21", 0), Some(moment - 3 * 3_600_000));
        assert_eq!(parse("2026-11-21T03:00:00.5Z", 0), Some(moment + 500));
        assert_eq!(parse("10m", moment), Some(moment - 600_000));
        assert_eq!(parse("1ms", 0), Some(0), "times before 1970 are clamped");
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
            "-5m",
        ] {
            assert_eq!(parse(text, 0), None, "{text}");
        }
    }
}
