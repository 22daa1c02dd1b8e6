//! The settings file, read again while the store runs.
//!
//! What enters: the flags of the start, and the file each time that it changes. What leaves: the bounds that are in force by
//! both, flags and environment over the file as at the start. A file that no store would start with changes nothing. What
//! else changed in it waits for the next start, and a warning names it.

use std::sync::{Arc, OnceLock};

use super::bounds::Bounds;
use super::{Config, ConfigError, Flags, file};
use crate::reload::Watched;

/// Keys of the file that count as soon as they change.
const LIVE: [&str; 17] = [
    "max_keys",
    "max_bytes",
    "max_key_bytes",
    "max_value_bytes",
    "max_watches",
    "max_client_watches",
    "max_packet_bytes",
    "max_queue_bytes",
    "max_total_queue_bytes",
    "max_connections",
    "max_sessions",
    "max_client_subscriptions",
    "max_client_rate",
    "max_rate",
    "guard_failures",
    "guard_fuel",
    "purity_sample",
];

/// The bounds of the file that the flags name; none where they name no file.
///
/// # Errors
/// Those of [`Config::load`].
pub fn follow(flags: &Flags) -> Result<Option<Arc<Watched<Bounds>>>, ConfigError> {
    let Some(path) = flags.config.clone() else {
        return Ok(None);
    };
    let read = {
        let (flags, path) = (flags.clone(), path.clone());
        let started = OnceLock::new();
        move || {
            let text = file::text(&path)?;
            let mut bounds = Config::of(flags.clone(), file::parse(&path, &text)?)?.bounds;
            let keys: toml::Table = file::parse(&path, &text)?;
            let (first, in_flight) =
                started.get_or_init(|| (keys.clone(), bounds.broker.receive_max));
            // What is remembered of requests follows it.
            bounds.broker.receive_max = *in_flight;
            let waiting = waiting(first, &keys);
            if !waiting.is_empty() {
                tracing::warn!(
                    "{}: what it says by now of {} counts from the next start on",
                    path.display(),
                    waiting.join(", ")
                );
            }
            Ok(bounds)
        }
    };
    Watched::open("settings", vec![path], read).map(Some)
}

/// Keys that changed and do not count yet.
fn waiting<'a>(started: &'a toml::Table, now: &'a toml::Table) -> Vec<&'a str> {
    let gone = started.keys().filter(|key| !now.contains_key(*key));
    let others = now
        .iter()
        .filter(|(key, value)| started.get(*key) != Some(value));
    let mut waiting: Vec<&str> = (others.map(|(key, _)| key).chain(gone))
        .map(String::as_str)
        .filter(|key| !LIVE.contains(key))
        .collect();
    waiting.sort_unstable();
    waiting
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_changed_and_waits_for_a_start_is_named() {
        let table = |text: &str| text.parse::<toml::Table>().unwrap();
        let started = table("node = \"a\"\nlog = \"text\"\nmax_keys = 1\nmax_bytes = 1\n");
        let now = table("node = \"b\"\ndata = \"elsewhere\"\nmax_keys = 2\nmax_watches = 3\n");
        assert_eq!(waiting(&started, &now), ["data", "log", "node"]);
        assert_eq!(waiting(&started, &started), [""; 0]);
    }

    #[test]
    fn every_key_that_counts_at_once_is_one_of_the_file() {
        for key in LIVE {
            let text = format!("{key} = 2000\n");
            let read = file::parse::<file::File>("statehouse.toml".as_ref(), &text);
            assert!(read.is_ok(), "{key}: {read:?}");
        }
    }
}
