//! Numbers as the screen shows them, in few characters.

use std::time::Duration;

/// Microseconds with a unit.
pub(super) fn time(us: Option<u64>) -> String {
    match us {
        None => "-".to_owned(),
        Some(us @ ..1_000) => format!("{us} µs"),
        Some(us @ ..1_000_000) => format!("{:.1} ms", us as f64 / 1e3),
        Some(us) => format!("{:.1} s", us as f64 / 1e6),
    }
}

pub(super) fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ => format!("{value:.1} {}", UNITS[unit]),
    }
}

/// A number without digits that change all the time.
pub(super) fn rate(value: f64) -> String {
    match value {
        10.0.. => format!("{value:.0}"),
        _ => format!("{value:.1}"),
    }
}

/// A long time, such as `3d 4h`.
pub(super) fn age(time: Duration) -> String {
    let seconds = time.as_secs();
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    if days > 0 {
        format!("{days}d {}h", hours % 24)
    } else if hours > 0 {
        format!("{hours}h {}m", minutes % 60)
    } else if minutes > 0 {
        format!("{minutes}m {}s", seconds % 60)
    } else {
        format!("{seconds}s")
    }
}

/// Used and limit in percent; none without a limit.
pub(super) fn percent(used: u64, limit: Option<u64>) -> Option<u64> {
    let limit = limit.filter(|it| *it > 0)?;
    Some((used as f64 / limit as f64 * 100.0) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let times = [None, Some(999), Some(1_250), Some(2_500_000)].map(time);
        assert_eq!(times, ["-", "999 µs", "1.2 ms", "2.5 s"]);
        let sizes = [0, 1_023, 1_536, 5 << 30, u64::MAX].map(size);
        assert_eq!(
            sizes,
            ["0 B", "1023 B", "1.5 KiB", "5.0 GiB", "16777216.0 TiB"]
        );
        assert_eq!([0.0, 9.94, 1234.5].map(rate), ["0.0", "9.9", "1234"]);
        let ages = [59, 61, 3_700, 90_000].map(|it| age(Duration::from_secs(it)));
        assert_eq!(ages, ["59s", "1m 1s", "1h 1m", "1d 1h"]);
        assert_eq!(percent(1, Some(3)), Some(33));
        assert_eq!((percent(1, Some(0)), percent(1, None)), (None, None));
    }
}
