//! The settings file: loaded at the start, and reloaded when it changes.
//!
//! Flags and environment variables take precedence over the file on each reload. Only limits change
//! in a running store; a warning names other changed keys, which take effect at the next start. A
//! file that a start would refuse must never change anything. A file that is not regular, such as a
//! pipe, is read only once.

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use super::bounds::Bounds;
use super::layer::Layer;
use super::{Config, ConfigError, Flags, LimitFlags, PacketBytes, TransportChoice, file};
use statehouse_files::watch::{Files, Watched};

/// Keys of the file that take effect as soon as they change, besides all limits.
const LIVE: [&str; 3] = ["guard_failures", "guard_fuel", "purity_sample"];

/// The limits of a settings file that is watched; none without a file, or if it is not regular.
pub type Followed = Option<Arc<Watched<Bounds>>>;

/// The settings, and their limits as a watched value if the flags name a regular file.
pub fn load(flags: Flags) -> Result<(Config, Followed), ConfigError> {
    let Some(path) = flags.config.clone().filter(|path| {
        // A missing file is an error of the first read.
        fs::metadata(path).is_ok_and(|about| about.is_file())
    }) else {
        return Ok((Config::load(flags)?, None));
    };
    let files = Files::look(vec![path.clone()]);
    // Both parse the same text, since a second read may return other content.
    let text = file::text_again(&path)?;
    let config = Config::of(flags.clone().over(file::settings(&path, &text)?))?.with_secrets()?;
    let rereader = Rereader::new(path.clone(), flags, file::parse(&path, &text)?, &config);
    let bounds = config.bounds.clone();
    let followed = Watched::following("settings", files, bounds, move || rereader.read());
    Ok((config, Some(followed)))
}

/// The settings, with defaults instead of wrong ones, and everything that is wrong. [`load`]
/// returns the first of these errors.
pub fn check(flags: Flags) -> (Config, Vec<ConfigError>) {
    let (file, mut wrong) = match &flags.config {
        None => (Flags::default(), Vec::new()),
        Some(path) => match file::text(path) {
            Ok(text) => file::gather(path, &text),
            Err(error) => (Flags::default(), vec![error]),
        },
    };
    let (mut config, errors) = Config::gather(flags.over(file));
    wrong.extend(errors);
    if let TransportChoice::Foreign(foreign) = &mut config.transport {
        wrong.extend(foreign.read_password().err());
    }
    (config, wrong)
}

struct Rereader {
    path: PathBuf,
    /// The flags of the start, with the settings that must not change.
    flags: Flags,
    /// The keys of the file at the start.
    started: toml::Table,
    /// The keys of the file that was accepted last.
    last: Mutex<toml::Table>,
    /// Whether the store is a client of a foreign broker.
    attached: bool,
}

impl Rereader {
    fn new(path: PathBuf, mut flags: Flags, started: toml::Table, config: &Config) -> Self {
        let attached = matches!(config.transport, TransportChoice::Foreign(_));
        if attached {
            // The link announced this limit to the broker, and keys and values must fit into it.
            let announced = config.bounds.broker.packet_bytes_max;
            flags.limits.max_packet_bytes = Some(PacketBytes(announced));
        }
        Self {
            path,
            flags,
            last: Mutex::new(started.clone()),
            started,
            attached,
        }
    }

    fn read(&self) -> Result<Bounds, ConfigError> {
        let text = file::text_again(&self.path)?;
        let keys = file::parse(&self.path, &text)?;
        let file = file::settings(&self.path, &text)?;
        let bounds = Config::of(self.flags.clone().over(file))?.bounds;
        let pending = self.newly_pending(keys);
        // A refused file is read every second, so nothing is logged before.
        if !pending.is_empty() {
            tracing::warn!(
                "{}: the new value of {} counts from the next start on",
                self.path.display(),
                pending.join(", ")
            );
        }
        Ok(bounds)
    }

    /// Keys of an accepted file that take effect at the next start, and that differ from the file
    /// before, so that each change is named once.
    fn newly_pending(&self, keys: toml::Table) -> Vec<String> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let mut pending = pending(&self.started, &keys, self.attached);
        pending.retain(|key| last.get(*key) != keys.get(*key));
        let names = pending.into_iter().map(str::to_owned).collect();
        *last = keys;
        names
    }
}

/// Keys that changed and take effect at the next start. The packet limit of a link to a foreign
/// broker stays as announced.
fn pending<'a>(started: &'a toml::Table, now: &'a toml::Table, attached: bool) -> Vec<&'a str> {
    let live = |key: &&str| {
        let changes = LIVE.contains(key) || LimitFlags::NAMES.contains(key);
        changes && !(attached && *key == "max_packet_bytes")
    };
    let removed = started.keys().filter(|key| !now.contains_key(*key));
    let others = now
        .iter()
        .filter(|(key, value)| started.get(*key) != Some(value));
    let mut pending: Vec<&str> = (others.map(|(key, _)| key).chain(removed))
        .map(String::as_str)
        .filter(|key| !live(key))
        .collect();
    pending.sort_unstable();
    pending
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
    fn changed_keys_that_need_a_restart_are_named() {
        let started = table("node = \"a\"\nlog = \"text\"\nmax_keys = 1\nmax_bytes = 1\n");
        let now = table("node = \"b\"\ndata = \"elsewhere\"\nmax_keys = 2\nmax_watches = 3\n");
        assert_eq!(pending(&started, &now, false), ["data", "log", "node"]);
        assert_eq!(pending(&started, &started, false), [""; 0]);
        let now = table("node = \"a\"\nlog = \"text\"\nmax_packet_bytes = 5000\n");
        assert_eq!(pending(&started, &now, false), [""; 0]);
        assert_eq!(pending(&started, &now, true), ["max_packet_bytes"]);
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

    /// A reader of a file whose content was `text` at the start.
    fn again(path: &Path, text: &str) -> Rereader {
        fs::write(path, text).unwrap();
        let config = Config::load(flags(path)).unwrap();
        Rereader::new(path.to_owned(), flags(path), table(text), &config)
    }

    /// Regression: each reload named them again.
    #[test]
    fn changed_keys_that_need_a_restart_are_named_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("statehouse.toml");
        let again = again(&path, "log_filter = \"info\"\n");
        let pending = |text: &str| again.newly_pending(table(text));
        assert_eq!(pending("max_keys = 7\n"), ["log_filter"]);
        assert_eq!(pending("max_keys = 8\n"), [""; 0]);
        let changed = pending("log_filter = \"debug\"\nlog = \"json\"\n");
        assert_eq!(changed, ["log", "log_filter"]);
        let back = pending("log_filter = \"info\"\nlog = \"json\"\n");
        assert_eq!(back, [""; 0], "the value of the start");
        let changed = pending("log_filter = \"debug\"\nlog = \"json\"\n");
        assert_eq!(changed, ["log_filter"]);
    }

    #[test]
    fn a_file_replaced_by_a_non_regular_one_is_not_read() {
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
    fn limits_are_reloaded_if_the_password_file_is_missing() {
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
    fn the_packet_limit_behind_a_foreign_broker_is_fixed() {
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
    fn every_live_key_is_a_key_of_the_file() {
        for key in LIVE.iter().chain(LimitFlags::NAMES) {
            let text = format!("{key} = 60000\n");
            let read = file::settings("statehouse.toml".as_ref(), &text);
            assert!(read.is_ok(), "{key}: {read:?}");
        }
    }
}
