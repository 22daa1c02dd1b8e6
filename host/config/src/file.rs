//! Parses the configuration file into the same settings as the flags. An error names the line.

use std::any::TypeId;
use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use serde::de::{
    DeserializeOwned, DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde::{Deserialize, Deserializer};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{
    AccessFlags, ClusterFlags, ConfigError, Flags, ForeignFlags, LimitFlags, ListenFlags,
    PolicyFlags, StorageFlags, TraceFlags,
};
use crate::limits;
use statehouse_files::watch::read_file;

static KEYS: LazyLock<Vec<&str>> = LazyLock::new(|| {
    // These fields are the file itself, and groups of settings.
    let others = [
        "config",
        "policies",
        "storage",
        "limits",
        "listeners",
        "access",
        "foreign",
        "cluster",
        "traces",
    ];
    let own = Flags::NAMES.iter().filter(|name| !others.contains(name));
    let groups = [
        PolicyFlags::NAMES,
        StorageFlags::NAMES,
        LimitFlags::NAMES,
        ListenFlags::NAMES,
        AccessFlags::NAMES,
        ForeignFlags::NAMES,
        ClusterFlags::NAMES,
        TraceFlags::NAMES,
    ];
    own.chain(groups.into_iter().flatten()).copied().collect()
});

/// The keys whose values are paths. Those of lists have a path in each element.
static PATHS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let flags = <Flags as clap::Args>::augment_args(clap::Command::new(""));
    let paths = flags
        .get_arguments()
        .filter(|it| it.get_value_parser().type_id() == TypeId::of::<PathBuf>());
    paths.map(|it| it.get_id().to_string()).collect()
});

/// A file without unknown keys, which are errors: a misspelled setting would have no effect. It has
/// no empty paths either, which flags and variables cannot have.
struct KnownKeys;

/// One key of the file. Yields whether its value is a path.
struct KnownKey;

/// A path that is not empty, or a list of them.
struct NonemptyPath;

impl<'de> Deserialize<'de> for KnownKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Self)
    }
}

impl<'de> Visitor<'de> for KnownKeys {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("settings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self, A::Error> {
        while let Some(is_path) = map.next_key_seed(KnownKey)? {
            if is_path {
                map.next_value::<NonemptyPath>()?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(self)
    }
}

impl<'de> Deserialize<'de> for NonemptyPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for NonemptyPath {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a path")
    }

    fn visit_str<E: Error>(self, path: &str) -> Result<Self, E> {
        match path {
            "" => Err(E::custom("the path is empty: name one, or remove the line")),
            _ => Ok(self),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut paths: A) -> Result<Self, A::Error> {
        while paths.next_element::<Self>()?.is_some() {}
        Ok(self)
    }
}

impl<'de> DeserializeSeed<'de> for KnownKey {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_identifier(self)
    }
}

impl Visitor<'_> for KnownKey {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the name of a setting")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<bool, E> {
        match KEYS.contains(&key) {
            true => Ok(PATHS.iter().any(|it| it == key)),
            false => {
                let absent = ClusterFlags::absent(key);
                Err(E::custom(absent.unwrap_or_else(|| unknown(key))))
            }
        }
    }
}

/// How similar two names must be that one is suggested for the other (Jaro-Winkler, 0 to 1). A
/// typing error leaves 0.94 or more; a name with the same beginning and another meaning can have
/// 0.87.
const SIMILARITY_MIN: f64 = 0.9;

/// The known name that is probably meant by another one, if there is one.
pub fn similar<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let similar = known.map(|known| (strsim::jaro_winkler(name, known), known));
    let best = similar.max_by(|a, b| a.0.total_cmp(&b.0));
    let best = best.filter(|(similarity, _)| *similarity >= SIMILARITY_MIN);
    best.map(|(_, known)| known)
}

fn unknown(key: &str) -> String {
    match similar(key, KEYS.iter().copied()) {
        Some(known) => format!("unknown setting `{key}`: did you mean `{known}`?"),
        None => format!(
            "unknown setting `{key}`: settings have the names of the flags of `statehouse serve --help`, with underscores"
        ),
    }
}

pub(super) fn settings(path: &Path, text: &str) -> Result<Flags, ConfigError> {
    let KnownKeys = parse(path, text)?;
    // Each group is parsed by itself: flattened groups would lose the lines of their errors.
    Ok(Flags {
        policies: parse(path, text)?,
        storage: parse(path, text)?,
        limits: parse(path, text)?,
        listeners: parse(path, text)?,
        access: parse(path, text)?,
        foreign: parse(path, text)?,
        cluster: parse(path, text)?,
        traces: parse(path, text)?,
        ..parse(path, text)?
    })
}

/// The settings in this text without the wrong ones, and what is wrong.
pub(super) fn gather(path: &Path, text: &str) -> (Flags, Vec<ConfigError>) {
    let mut text = text.to_owned();
    let mut wrong = Vec::new();
    loop {
        let error = match settings(path, &text) {
            Ok(flags) => return (flags, wrong),
            Err(error) => error,
        };
        // Lines of later errors must stay as they are.
        let entry = match &error {
            ConfigError::File(_, error) => entry_at(&text, error.span()),
            _ => None,
        };
        wrong.push(error);
        match entry {
            Some(entry) => blank(&mut text, entry),
            // Without its entry, the error would be the same again.
            None => return (Flags::default(), wrong),
        }
    }
}

/// The bytes of the setting that contains a place, if the text is TOML.
fn entry_at(text: &str, place: Option<Range<usize>>) -> Option<Range<usize>> {
    let entries = DeTable::parse(text).ok()?;
    let place = place?;
    let entries = entries.get_ref().iter();
    let entries = entries.map(|(key, value)| extent(key.span(), value));
    let around = entries.filter(|it| it.start <= place.start && place.end <= it.end);
    // The parts of a table may be on both sides of another setting.
    around.min_by_key(|it| it.len())
}

/// The bytes of a setting. Those of a table include its headers and everything in it: without one
/// of them, the rest would be another setting or no TOML.
fn extent(key: Range<usize>, value: &Spanned<DeValue<'_>>) -> Range<usize> {
    let whole = both(key, value.span());
    match value.get_ref() {
        DeValue::Table(table) => table.iter().fold(whole, |whole, (key, value)| {
            both(whole, extent(key.span(), value))
        }),
        DeValue::Array(values) => values.iter().fold(whole, |whole, value| {
            both(whole, extent(value.span(), value))
        }),
        _ => whole,
    }
}

fn both(one: Range<usize>, other: Range<usize>) -> Range<usize> {
    one.start.min(other.start)..one.end.max(other.end)
}

/// Replaces a range with spaces, except for line ends.
fn blank(text: &mut String, range: Range<usize>) {
    let blanks: String = text[range.clone()]
        .bytes()
        .map(|byte| if byte == b'\n' { '\n' } else { ' ' })
        .collect();
    text.replace_range(range, &blanks);
}

/// The text of a file, which may be a pipe: it is read to its end.
pub(super) fn text(path: &Path) -> Result<String, ConfigError> {
    let failed = |error| ConfigError::Read(path.to_owned(), error);
    let mut text = String::new();
    let file = fs::File::open(path).map_err(failed)?;
    file.take(limits::CONFIG_FILE_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .map_err(failed)?;
    if text.len() as u64 > limits::CONFIG_FILE_BYTES_MAX {
        return Err(ConfigError::Size(path.to_owned()));
    }
    Ok(text)
}

/// The text of a regular file that is read again. Another pipe read would block the thread that
/// reloads files.
pub(super) fn text_again(path: &Path) -> Result<String, ConfigError> {
    let bytes = read_file(path, limits::CONFIG_FILE_BYTES_MAX)?;
    String::from_utf8(bytes)
        .map_err(|error| ConfigError::Read(path.to_owned(), io::Error::other(error)))
}

pub(super) fn parse<T: DeserializeOwned>(path: &Path, text: &str) -> Result<T, ConfigError> {
    toml::from_str(text).map_err(|error| ConfigError::File(path.to_owned(), Box::new(error)))
}
