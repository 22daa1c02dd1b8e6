//! The name of a store: its MQTT client id at a foreign broker, and the target of the signed orders
//! that its embedded broker takes. The store makes the name once and keeps it in its data directory.
//!
//! What enters: a data directory that this process has locked. What leaves: the client id in it. After
//! a restart, or in a standby, the next process with this directory finds the same name, and with it the
//! session at the broker. A backup never holds the name: the serial of a restored store may be older, so
//! under the same name old orders could be replayed.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::config::ClientId;
use crate::limits;

/// The file's name.
pub(super) const FILE: &str = "mqtt-client-id";

/// What it is called while it is written.
const UNFINISHED: &str = "mqtt-client-id.new";

/// Why there is no client id. Its text goes behind the path of the file.
#[derive(Debug, thiserror::Error)]
pub enum ClientIdError {
    /// The system said no.
    #[error("cannot be read or written: {0}")]
    Io(#[from] io::Error),
    /// Somebody else wrote it.
    #[error(
        "holds no MQTT client id: {0}. Write the one into it whose session at the broker is to go on, or remove it, and a new one is made"
    )]
    Nonsense(String),
}

/// The client id of a data directory; where there is none yet a new one, durable when this returns.
pub(super) fn of(directory: &Path) -> Result<String, ClientIdError> {
    match File::open(directory.join(FILE)) {
        Ok(file) => read(file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let id = new()?;
            keep(directory, &id)?;
            Ok(id)
        }
        Err(error) => Err(error.into()),
    }
}

/// A client id that nobody else has.
pub fn new() -> io::Result<String> {
    let mut bytes = [0; size_of::<u128>()];
    getrandom::fill(&mut bytes).map_err(|error| {
        io::Error::other(format!(
            "the system has no randomness for a client id: {error}"
        ))
    })?;
    Ok(format!("statehouse-{:032x}", u128::from_be_bytes(bytes)))
}

fn read(file: File) -> Result<String, ClientIdError> {
    let mut text = Vec::new();
    // With a line's end, and one byte that would be too many.
    let bytes_max = limits::BROKER_CLIENT_ID_BYTES_MAX as u64 + 2;
    file.take(bytes_max).read_to_end(&mut text)?;
    let text = String::from_utf8(text)
        .map_err(|_| ClientIdError::Nonsense("it is not UTF-8".to_owned()))?;
    let line = text.strip_suffix('\n').unwrap_or(&text);
    let id: ClientId = line.parse().map_err(ClientIdError::Nonsense)?;
    Ok(id.0)
}

fn keep(directory: &Path, id: &str) -> io::Result<()> {
    let new = directory.join(UNFINISHED);
    // One that is there was left by a crash.
    let mut file = fs::OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(&new)?;
    writeln!(file, "{id}")?;
    file.sync_all()?;
    fs::rename(&new, directory.join(FILE))?;
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_made_once_and_is_another_in_each_directory() {
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        // A crash came between.
        fs::write(here.path().join(UNFINISHED), "statehouse-ha").unwrap();
        let first = of(here.path()).unwrap();
        assert_eq!(of(here.path()).unwrap(), first);
        let digits = first.strip_prefix("statehouse-").unwrap();
        assert!(digits.len() == 32 && digits.bytes().all(|it| it.is_ascii_hexdigit()));
        assert_ne!(of(there.path()).unwrap(), first);
        assert!(!here.path().join(UNFINISHED).exists());
    }

    #[test]
    fn an_operator_s_own_is_taken_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        for (written, id) in [("plant 7/store\n", "plant 7/store"), ("a", "a")] {
            fs::write(directory.path().join(FILE), written).unwrap();
            assert_eq!(of(directory.path()).unwrap(), id);
        }
    }

    #[test]
    fn nonsense_is_refused_and_left_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(FILE);
        let long = "a".repeat(limits::BROKER_CLIENT_ID_BYTES_MAX + 1);
        for nonsense in [&b""[..], b"\n", b"a\nb\n", b"\xff", b"a\0", long.as_bytes()] {
            fs::write(&path, nonsense).unwrap();
            let error = of(directory.path()).unwrap_err();
            assert!(matches!(error, ClientIdError::Nonsense(_)), "{error}");
            assert!(error.to_string().contains("remove it"), "{error}");
            assert_eq!(fs::read(&path).unwrap(), nonsense);
        }
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(matches!(of(directory.path()), Err(ClientIdError::Io(_))));
    }
}
