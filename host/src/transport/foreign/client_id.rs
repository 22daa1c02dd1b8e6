//! The store's MQTT client id at a foreign broker: made once, and kept in the data directory, since it names the session
//! that holds the requests of clients while the store is away. Whoever takes over the directory takes over the session.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use crate::limits;

/// The name of the file in the data directory.
pub const FILE: &str = "mqtt-client-id";

/// Why the client id is not known. Its text is a sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum ClientIdError {
    /// The file cannot be read or written.
    #[error("the client id cannot be kept in {0}: {1}")]
    File(PathBuf, io::Error),
    /// The file holds something else.
    #[error(
        "{0} holds no MQTT client id (1 to {max} printable characters in one line): write the one that this store had, name one with --broker-client-id, or remove the file, and what clients have asked meanwhile is lost",
        max = limits::BROKER_CLIENT_ID_BYTES_MAX
    )]
    Nonsense(PathBuf),
}

/// One that no other store has: 128 random bits.
pub fn random() -> String {
    let (high, low) = (statehouse_link::random(), statehouse_link::random());
    format!("statehouse-{high:016x}{low:016x}")
}

/// The client id of the store in this directory, which is locked by now.
///
/// # Errors
/// Where the file cannot be read or written, or holds no client id.
pub fn of(directory: &Path) -> Result<String, ClientIdError> {
    let path = directory.join(FILE);
    let failed = |error| ClientIdError::File(path.clone(), error);
    let mut text = String::new();
    match File::open(&path) {
        Ok(file) => {
            // One more than there may be, with a line break.
            let bytes_max = limits::BROKER_CLIENT_ID_BYTES_MAX as u64 + 2;
            match file.take(bytes_max).read_to_string(&mut text) {
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    return Err(ClientIdError::Nonsense(path));
                }
                read => _ = read.map_err(failed)?,
            }
            let id = text.strip_suffix('\n').unwrap_or(&text);
            match is_valid(id) {
                true => Ok(id.to_owned()),
                false => Err(ClientIdError::Nonsense(path)),
            }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let id = random();
            keep(directory, &path, &id).map_err(failed)?;
            Ok(id)
        }
        Err(error) => Err(failed(error)),
    }
}

fn is_valid(id: &str) -> bool {
    (1..=limits::BROKER_CLIENT_ID_BYTES_MAX).contains(&id.len()) && !id.contains(char::is_control)
}

/// Whole or not at all, also where the power fails: a session of half an id would be lost.
fn keep(directory: &Path, path: &Path, id: &str) -> io::Result<()> {
    let new = path.with_extension("new");
    let mut file = File::create(&new)?;
    writeln!(file, "{id}")?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_made_once() {
        let directory = tempfile::tempdir().unwrap();
        let id = of(directory.path()).unwrap();
        assert!(id.starts_with("statehouse-") && id.len() == 43, "{id}");
        assert_eq!(of(directory.path()).unwrap(), id);
        let elsewhere = tempfile::tempdir().unwrap();
        assert_ne!(of(elsewhere.path()).unwrap(), id);
    }

    #[test]
    fn what_an_operator_wrote_counts() {
        let directory = tempfile::tempdir().unwrap();
        for (text, id) in [("gateway 7\n", "gateway 7"), ("gateway-8", "gateway-8")] {
            fs::write(directory.path().join(FILE), text).unwrap();
            assert_eq!(of(directory.path()).unwrap(), id);
        }
    }

    #[test]
    fn nonsense_is_not_replaced_in_silence() {
        let directory = tempfile::tempdir().unwrap();
        let long = "x".repeat(limits::BROKER_CLIENT_ID_BYTES_MAX + 1);
        for text in [
            &b""[..],
            b"\n",
            b"two\nlines\n",
            b"\xff\xfe",
            long.as_bytes(),
        ] {
            fs::write(directory.path().join(FILE), text).unwrap();
            let error = of(directory.path()).unwrap_err();
            assert!(matches!(error, ClientIdError::Nonsense(_)), "{error}");
        }
    }
}
