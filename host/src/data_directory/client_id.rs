//! The name of a store: its MQTT client id at a foreign broker, and the target of the signed orders
//! that its embedded broker accepts.
//!
//! The store creates the name once and saves it in its data directory, which the process must have
//! locked. After a restart, or in a standby, the next process with this directory finds the same
//! name, and so resumes the session at the broker. A backup must never contain the name: a restored
//! store may have an older serial, so under the same name old orders could be replayed.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use statehouse_config::{ClientId, limits};

/// The name of the file, which a restore removes.
pub(super) const FILE: &str = statehouse_offline::NAME_FILE;

/// The name of the file while it is written.
const INCOMPLETE: &str = "mqtt-client-id.new";

/// Why the client id cannot be read or created. The text follows the path of the file.
#[derive(Debug, thiserror::Error)]
pub enum ClientIdError {
    /// The file cannot be read or written.
    #[error("cannot be read or written: {0}")]
    Io(#[from] io::Error),
    /// The file does not contain a client id.
    #[error(
        "contains no MQTT client id: {0}. Write the client id of the store's session at the broker into it, or remove it so that the store creates a new client id"
    )]
    Invalid(String),
}

/// Reads the client id of a data directory. If there is none, creates one that is durable when this
/// returns.
pub(super) fn of(directory: &Path) -> Result<String, ClientIdError> {
    if let Some(id) = existing(directory)? {
        return Ok(id);
    }
    let id = new()?;
    save(directory, &id)?;
    Ok(id)
}

/// Reads the client id of a data directory, if there is one.
pub(super) fn existing(directory: &Path) -> Result<Option<String>, ClientIdError> {
    let path = directory.join(FILE);
    // The open of a pipe would wait for its writer. A read of a directory reports what it is.
    let opened = fs::metadata(&path).and_then(|about| match about.is_file() || about.is_dir() {
        true => File::open(&path),
        false => Err(io::Error::other("it is not a regular file")),
    });
    match opened {
        Ok(file) => read(file).map(Some),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Generates a unique client id.
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
    // Room for the line end, and for one byte that makes the id too long.
    let bytes_max = limits::BROKER_CLIENT_ID_BYTES_MAX as u64 + 2;
    file.take(bytes_max).read_to_end(&mut text)?;
    let text = String::from_utf8(text)
        .map_err(|_| ClientIdError::Invalid("it is not UTF-8".to_owned()))?;
    let line = text.strip_suffix('\n').unwrap_or(&text);
    let id: ClientId = line.parse().map_err(ClientIdError::Invalid)?;
    Ok(id.0)
}

fn save(directory: &Path, id: &str) -> io::Result<()> {
    let new = directory.join(INCOMPLETE);
    // A crash may have left an incomplete file.
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
    fn a_client_id_is_created_once_and_differs_by_directory() {
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        // A crash left an incomplete file.
        fs::write(here.path().join(INCOMPLETE), "statehouse-ha").unwrap();
        let first = of(here.path()).unwrap();
        assert_eq!(of(here.path()).unwrap(), first);
        let digits = first.strip_prefix("statehouse-").unwrap();
        assert!(digits.len() == 32 && digits.bytes().all(|it| it.is_ascii_hexdigit()));
        assert_ne!(of(there.path()).unwrap(), first);
        assert!(!here.path().join(INCOMPLETE).exists());
    }

    #[test]
    fn a_client_id_of_the_operator_is_used_unchanged() {
        let directory = tempfile::tempdir().unwrap();
        for (written, id) in [("plant 7/store\n", "plant 7/store"), ("a", "a")] {
            fs::write(directory.path().join(FILE), written).unwrap();
            assert_eq!(of(directory.path()).unwrap(), id);
        }
    }

    #[test]
    fn an_invalid_file_is_refused_and_left_unchanged() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(FILE);
        let long = "a".repeat(limits::BROKER_CLIENT_ID_BYTES_MAX + 1);
        for invalid in [&b""[..], b"\n", b"a\nb\n", b"\xff", b"a\0", long.as_bytes()] {
            fs::write(&path, invalid).unwrap();
            let error = of(directory.path()).unwrap_err();
            assert!(matches!(error, ClientIdError::Invalid(_)), "{error}");
            assert!(error.to_string().contains("remove it"), "{error}");
            assert_eq!(fs::read(&path).unwrap(), invalid);
        }
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(matches!(of(directory.path()), Err(ClientIdError::Io(_))));
    }
}
