//! The settings file, read at the start and again while the store runs.
//!
//! What enters: the flags of the start, and the file each time that it changes. What leaves: the settings at the start, and
//! from then on the bounds that are in force by both, flags and environment over the file as at the start. A file that no
//! store would start with changes nothing. What else changed in it waits for the next start, and a warning names it. What is no
//! regular file, such as a pipe, is read once and never again.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

use super::bounds::Bounds;
use super::{Config, ConfigError, Flags, PacketBytes, TransportChoice, file};
use statehouse_files::watch::{Files, Watched};

/// Keys of the file that count as soon as they change.
const LIVE: [&str; 21] = [
    "max_keys",
    "max_bytes",
    "max_client_keys",
    "max_client_bytes",
    "max_key_bytes",
    "max_value_bytes",
    "max_watches",
    "max_client_watches",
    "max_fuel",
    "max_packet_bytes",
    "max_queue_bytes",
    "max_total_queue_bytes",
    "max_connections",
    "max_sessions",
    "max_client_subscriptions",
    "max_client_in_flight",
    "max_client_rate",
    "max_rate",
    "guard_failures",
    "guard_fuel",
    "purity_sample",
];

/// The bounds of a settings file that is followed; none where there is no file, or no regular one.
pub type Followed = Option<Arc<Watched<Bounds>>>;

/// The settings, and the bounds among them that follow the file; none where the flags name no file that can be read again.
///
/// # Errors
/// Those of [`Config::load`].
pub fn load(flags: Flags) -> Result<(Config, Followed), ConfigError> {
    let Some(path) = flags.config.clone().filter(|path| {
        // One that is not there is an error of the first reading.
        fs::metadata(path).is_ok_and(|about| about.is_file())
    }) else {
        return Ok((Config::load(flags)?, None));
    };
    let files = Files::look(vec![path.clone()]);
    // Once for both: what is read a second time may be something else.
    let text = file::text_again(&path)?;
    let config = Config::of(flags.clone(), file::parse(&path, &text)?)?.with_secrets()?;
    let again = Again::new(path.clone(), flags, file::parse(&path, &text)?, &config);
    let bounds = config.bounds.clone();
    let followed = Watched::following("settings", files, bounds, move || again.read());
    Ok((config, Some(followed)))
}

/// How the file is read again.
struct Again {
    path: PathBuf,
    /// Those of the start, with what stays as it was then.
    flags: Flags,
    /// What the file said at the start.
    started: toml::Table,
    /// Whether the store is a client of a foreign broker.
    attached: bool,
}

impl Again {
    fn new(path: PathBuf, mut flags: Flags, started: toml::Table, config: &Config) -> Self {
        let attached = matches!(config.transport, TransportChoice::Foreign(_));
        if attached {
            // The link told it to the broker, and keys and values have to fit.
            let told = config.bounds.broker.packet_bytes_max;
            flags.limits.max_packet_bytes = Some(PacketBytes(told));
        }
        Self {
            path,
            flags,
            started,
            attached,
        }
    }

    fn read(&self) -> Result<Bounds, ConfigError> {
        let text = file::text_again(&self.path)?;
        let keys = file::parse(&self.path, &text)?;
        let file = file::parse(&self.path, &text)?;
        let waiting = waiting(&self.started, &keys, self.attached);
        if !waiting.is_empty() {
            tracing::warn!(
                "{}: what it says by now of {} counts from the next start on",
                self.path.display(),
                waiting.join(", ")
            );
        }
        Ok(Config::of(self.flags.clone(), file)?.bounds)
    }
}

/// Keys that changed and do not count yet. The packets of a link to a foreign broker keep their size.
fn waiting<'a>(started: &'a toml::Table, now: &'a toml::Table, attached: bool) -> Vec<&'a str> {
    let live = |key: &&str| LIVE.contains(key) && !(attached && *key == "max_packet_bytes");
    let gone = started.keys().filter(|key| !now.contains_key(*key));
    let others = now
        .iter()
        .filter(|(key, value)| started.get(*key) != Some(value));
    let mut waiting: Vec<&str> = (others.map(|(key, _)| key).chain(gone))
        .map(String::as_str)
        .filter(|key| !live(key))
        .collect();
    waiting.sort_unstable();
    waiting
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::path::Path;

    use super::*;

    fn table(text: &str) -> toml::Table {
        text.parse().unwrap()
    }

    #[test]
    fn what_changed_and_waits_for_a_start_is_named() {
        let started = table("node = \"a\"\nlog = \"text\"\nmax_keys = 1\nmax_bytes = 1\n");
        let now = table("node = \"b\"\ndata = \"elsewhere\"\nmax_keys = 2\nmax_watches = 3\n");
        assert_eq!(waiting(&started, &now, false), ["data", "log", "node"]);
        assert_eq!(waiting(&started, &started, false), [""; 0]);
        let now = table("node = \"a\"\nlog = \"text\"\nmax_packet_bytes = 5000\n");
        assert_eq!(waiting(&started, &now, false), [""; 0]);
        assert_eq!(waiting(&started, &now, true), ["max_packet_bytes"]);
    }

    fn flags(path: &Path) -> Flags {
        Flags {
            config: Some(path.to_owned()),
            ..Flags::default()
        }
    }

    #[test]
    fn a_pipe_is_read_once_and_not_followed() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        writer.write_all(b"node = \"piped\"\n").unwrap();
        drop(writer);
        let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
        let (config, followed) = load(flags(path.as_ref())).unwrap();
        assert_eq!(config.node, "piped");
        assert!(followed.is_none());
    }

    /// How a file is read again that says this at the start.
    fn again(path: &Path, text: &str) -> Again {
        fs::write(path, text).unwrap();
        let config = Config::load(flags(path)).unwrap();
        Again::new(path.to_owned(), flags(path), table(text), &config)
    }

    #[test]
    fn what_takes_the_place_of_the_file_and_is_none_is_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("statehouse.toml");
        let again = again(&path, "max_keys = 5\n");
        fs::remove_file(&path).unwrap();
        let (reader, _writer) = std::io::pipe().unwrap();
        let pipe = format!("/proc/self/fd/{}", reader.as_raw_fd());
        std::os::unix::fs::symlink(pipe, &path).unwrap();
        let error = again.read().unwrap_err().to_string();
        assert!(error.contains("not a regular file"), "{error}");
    }

    #[test]
    fn a_password_that_has_gone_keeps_no_bound_from_changing() {
        let directory = tempfile::tempdir().unwrap();
        let (path, password) = (
            directory.path().join("statehouse.toml"),
            directory.path().join("password"),
        );
        fs::write(&password, "secret\n").unwrap();
        let broker = format!(
            "broker = \"mqtt://gateway\"\nbroker_password_file = \"{}\"\n",
            password.display()
        );
        let again = again(&path, &broker);
        fs::remove_file(&password).unwrap();
        fs::write(&path, format!("{broker}max_keys = 7\n")).unwrap();
        assert_eq!(again.read().unwrap().quota.keys_max, 7);
    }

    #[test]
    fn behind_a_foreign_broker_values_keep_to_the_packets_of_the_start() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("statehouse.toml");
        let read = |broker: &str| {
            let again = again(&path, &format!("{broker}max_packet_bytes = 100000\n"));
            let before = again.read().unwrap();
            fs::write(&path, format!("{broker}max_packet_bytes = 1000000\n")).unwrap();
            let after = again.read().unwrap();
            [before, after].map(|it| (it.broker.packet_bytes_max, it.quota.value_bytes_max))
        };
        let [before, after] = read("broker = \"mqtt://gateway\"\n");
        assert_eq!(before, after);
        let [before, after] = read("");
        assert_eq!((before.0, after.0), (100_000, 1_000_000));
        assert!(before.1 < after.1);
    }

    #[test]
    fn every_key_that_counts_at_once_is_one_of_the_file() {
        for key in LIVE {
            let text = format!("{key} = 60000\n");
            let read = file::parse::<file::File>("statehouse.toml".as_ref(), &text);
            assert!(read.is_ok(), "{key}: {read:?}");
        }
    }
}
