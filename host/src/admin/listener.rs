//! Who comes to the administration: over TCP, or through a socket in the file system.
//!
//! What enters: the place. What leaves: connections. A socket's file is its owner's alone before anybody can connect; one that a
//! killed store left is replaced, and one at which somebody listens is not.

use std::fs;
use std::io;
use std::net;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener, UnixSocket};

use crate::config::AdminPlace;
use crate::limits;

/// A connection of either kind.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

/// A place that is taken. Who connects over TCP waits until it is listened at.
pub(super) enum Bound {
    Tcp(net::TcpListener),
    Unix(UnixSocket, SocketFile),
}

/// Takes connections.
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix {
        listener: UnixListener,
        _file: SocketFile,
    },
}

/// The file of a socket, by its path. It goes with the socket, and is dropped behind it.
pub(super) struct SocketFile(PathBuf);

impl Bound {
    /// Takes the place.
    pub(super) fn at(place: &AdminPlace) -> io::Result<Self> {
        match place {
            AdminPlace::Tcp(address) => {
                let listener = net::TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                Ok(Self::Tcp(listener))
            }
            AdminPlace::Unix(path) => {
                clear(path)?;
                let socket = UnixSocket::new_stream()?;
                socket.bind(path)?;
                let file = SocketFile(path.clone());
                // Nobody can connect before it is listened at.
                fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
                Ok(Self::Unix(socket, file))
            }
        }
    }

    /// Where it is, with the port that the system chose.
    pub(super) fn place(&self) -> io::Result<AdminPlace> {
        match self {
            Self::Tcp(listener) => listener.local_addr().map(AdminPlace::Tcp),
            Self::Unix(_, file) => Ok(AdminPlace::Unix(file.0.clone())),
        }
    }

    /// Within a runtime.
    pub(super) fn listen(self) -> io::Result<Listener> {
        match self {
            Self::Tcp(listener) => TcpListener::from_std(listener).map(Listener::Tcp),
            Self::Unix(socket, file) => {
                let listener = socket.listen(limits::ADMIN_BACKLOG)?;
                Ok(Listener::Unix {
                    listener,
                    _file: file,
                })
            }
        }
    }
}

impl Listener {
    /// The next connection.
    pub(super) async fn accept(&self) -> io::Result<Box<dyn Stream>> {
        Ok(match self {
            Self::Tcp(listener) => Box::new(listener.accept().await?.0),
            Self::Unix { listener, .. } => Box::new(listener.accept().await?.0),
        })
    }
}

/// Removes what a killed store left at this path.
fn clear(path: &Path) -> io::Result<()> {
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let taken = |why: &str| Err(io::Error::new(io::ErrorKind::AddrInUse, why));
    if !found.file_type().is_socket() {
        return taken("what is there is no socket, and is left alone");
    }
    match UnixStream::connect(path) {
        Ok(_) => taken("another process listens there"),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) => Err(error),
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Nobody listens there any more, but for another store that has replaced it.
        match clear(&self.0) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            Err(error) => {
                tracing::warn!(%error, "the socket {} cannot be removed", self.0.display());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(directory: &tempfile::TempDir) -> (PathBuf, AdminPlace) {
        let path = directory.path().join("admin");
        (path.clone(), AdminPlace::Unix(path))
    }

    #[tokio::test]
    async fn a_socket_is_its_owners_and_goes_with_the_listener() {
        let directory = tempfile::tempdir().unwrap();
        let (path, place) = place(&directory);
        let bound = Bound::at(&place).unwrap();
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        assert!(UnixStream::connect(&path).is_err(), "nobody listens yet");
        let listener = bound.listen().unwrap();
        let _client = UnixStream::connect(&path).unwrap();
        assert!(listener.accept().await.is_ok());
        drop(listener);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn what_a_killed_store_left_is_replaced_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let (path, place) = place(&directory);
        let taken = |place: &AdminPlace| Bound::at(place).err().map(|error| error.to_string());
        fs::write(&path, "mine").unwrap();
        assert!(taken(&place).unwrap().contains("no socket"));
        assert_eq!(fs::read(&path).unwrap(), b"mine");
        fs::remove_file(&path).unwrap();

        let first = Bound::at(&place).unwrap().listen().unwrap();
        assert!(taken(&place).unwrap().contains("another process"));
        // As if it had been killed: the file stays, and nobody listens.
        let Listener::Unix {
            listener,
            _file: file,
        } = first
        else {
            panic!("it is a socket");
        };
        drop(listener);
        let second = Bound::at(&place).unwrap().listen().unwrap();
        drop(file);
        assert!(path.exists(), "it is the second's by now");
        drop(second);
        assert!(!path.exists());
    }
}
