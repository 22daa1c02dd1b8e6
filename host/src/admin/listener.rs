//! Who comes to the administration: over TCP, or through a socket in the file system.
//!
//! What enters: the place. What leaves: connections. A socket's file is its owner's alone before anybody can connect; one that a
//! killed store left is replaced, and one at which somebody listens is not.

use std::fs;
use std::future::Future;
use std::io;
use std::net::{self, IpAddr, Ipv4Addr};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener, UnixSocket};

use crate::config::AdminPlace;
use crate::limits;

/// A connection of either kind.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

/// A place that is taken. Who connects waits until it is accepted.
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix {
        /// Goes before the socket is closed: until then no other file has its number.
        file: SocketFile,
        listener: UnixListener,
    },
}

/// The file of a socket: its path and its number.
pub(super) struct SocketFile {
    path: PathBuf,
    number: Number,
}

/// Device and inode.
type Number = (u64, u64);

impl Listener {
    /// Takes the place. Within a runtime.
    pub(super) fn bind(place: &AdminPlace) -> io::Result<Self> {
        match place {
            AdminPlace::Tcp(address) => {
                let listener = net::TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                TcpListener::from_std(listener).map(Self::Tcp)
            }
            AdminPlace::Unix(path) => {
                clear(path)?;
                let socket = UnixSocket::new_stream()?;
                socket.bind(path)?;
                let file = SocketFile {
                    path: path.clone(),
                    number: number(path)?,
                };
                // Nobody can connect before it is listened at, which is at once: others take a socket without a listener for
                // what a killed store left.
                fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
                let listener = socket.listen(limits::ADMIN_BACKLOG)?;
                Ok(Self::Unix { file, listener })
            }
        }
    }

    /// Where it is, with the port that the system chose.
    pub(super) fn place(&self) -> io::Result<AdminPlace> {
        match self {
            Self::Tcp(listener) => listener.local_addr().map(AdminPlace::Tcp),
            Self::Unix { file, .. } => Ok(AdminPlace::Unix(file.path.clone())),
        }
    }

    /// The next connection, and the address of its client; all that come through a socket of the file system have the same.
    pub(super) async fn accept(&self) -> io::Result<(Box<dyn Stream>, IpAddr)> {
        match self {
            Self::Tcp(listener) => {
                let (socket, client) = listener.accept().await?;
                Ok((Box::new(socket), client.ip()))
            }
            Self::Unix { listener, .. } => {
                let (socket, _) = listener.accept().await?;
                Ok((Box::new(socket), Ipv4Addr::LOCALHOST.into()))
            }
        }
    }
}

fn number(path: &Path) -> io::Result<Number> {
    let about = fs::symlink_metadata(path)?;
    Ok((about.dev(), about.ino()))
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
    match is_listened_at(path)? {
        true => taken("another process listens there"),
        false => fs::remove_file(path),
    }
}

/// Whether a process listens at this socket. It may have stopped and accept nobody, so this does not wait for it.
fn is_listened_at(path: &Path) -> io::Result<bool> {
    let connecting = pin!(UnixSocket::new_stream()?.connect(path));
    match connecting.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Ok(_)) | Poll::Pending => Ok(true),
        Poll::Ready(Err(error)) => match error.kind() {
            io::ErrorKind::ConnectionRefused => Ok(false),
            // As many wait there as may (unix(7): EAGAIN).
            io::ErrorKind::WouldBlock => Ok(true),
            _ => Err(error),
        },
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Somebody may have removed it, and another store have taken the place.
        if number(&self.path).is_ok_and(|it| it == self.number)
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(%error, "the socket {} cannot be removed", self.path.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    fn place(directory: &tempfile::TempDir) -> (PathBuf, AdminPlace) {
        let path = directory.path().join("admin");
        (path.clone(), AdminPlace::Unix(path))
    }

    fn refused(place: &AdminPlace) -> String {
        let error = Listener::bind(place).err();
        error.expect("the place is taken").to_string()
    }

    #[tokio::test]
    async fn a_socket_is_its_owners_and_goes_with_the_listener() {
        let directory = tempfile::tempdir().unwrap();
        let (path, place) = place(&directory);
        let listener = Listener::bind(&place).unwrap();
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        let _client = UnixStream::connect(&path).unwrap();
        assert!(listener.accept().await.is_ok());
        drop(listener);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn what_a_killed_store_left_is_replaced_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let (path, place) = place(&directory);
        fs::write(&path, "mine").unwrap();
        assert!(refused(&place).contains("no socket"));
        assert_eq!(fs::read(&path).unwrap(), b"mine");
        fs::remove_file(&path).unwrap();

        // Taken from the first moment, although nobody accepts yet.
        let first = Listener::bind(&place).unwrap();
        assert!(refused(&place).contains("another process"));
        // As if it had been killed: the file stays, and nobody listens.
        let Listener::Unix { listener, file } = first else {
            panic!("it is a socket");
        };
        drop(listener);
        std::mem::forget(file);
        let second = Listener::bind(&place).unwrap();
        drop(second);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn the_file_of_another_store_that_took_the_place_stays() {
        let directory = tempfile::tempdir().unwrap();
        let (path, place) = place(&directory);
        let first = Listener::bind(&place).unwrap();
        fs::remove_file(&path).unwrap();
        let _second = Listener::bind(&place).unwrap();
        drop(first);
        assert!(path.exists());
    }

    #[tokio::test]
    async fn a_process_that_has_stopped_and_accepts_nobody_is_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let (path, place) = place(&directory);
        let socket = UnixSocket::new_stream().unwrap();
        socket.bind(&path).unwrap();
        let _stopped = socket.listen(0).unwrap();
        // Each look takes a place in its backlog.
        for _ in 0..4 {
            assert!(refused(&place).contains("another process"));
        }
    }
}
