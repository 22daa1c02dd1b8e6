//! Accepts connections to the admin API, over TCP, TLS or a Unix socket.
//!
//! The socket file must have mode 600 before a client can connect. A stale file of a killed store
//! is replaced; a socket with a listener must never be replaced.

use std::fs;
use std::future::Future;
use std::io;
use std::net::{self, Ipv4Addr, SocketAddr};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixSocket};

use statehouse_config::{AdminPlace, limits};
use statehouse_files::watch::Watched;
use statehouse_listener::{Certificates, accept_tls};
use statehouse_mqtt::Proof;

/// A connection of either kind.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

/// A bound listener. Clients that connect wait until they are accepted.
pub(super) enum Listener {
    /// With TLS if there are certificates: those that are in force at the handshake.
    Tcp(TcpListener, Option<Arc<Watched<Certificates>>>),
    Unix {
        /// Dropped before the socket closes: until then no other file can have its inode.
        file: SocketFile,
        listener: UnixListener,
    },
}

/// The file of a socket: path, device and inode.
pub(super) struct SocketFile {
    path: PathBuf,
    number: Number,
}

/// Device and inode.
type Number = (u64, u64);

impl Listener {
    /// Binds the address, within a runtime.
    pub(super) fn bind(place: &AdminPlace) -> io::Result<Self> {
        match place {
            AdminPlace::Tcp(address) => bind(*address).map(|it| Self::Tcp(it, None)),
            AdminPlace::Unix(path) => {
                if has_stale_socket(path)? {
                    fs::remove_file(path)?;
                }
                let socket = UnixSocket::new_stream()?;
                socket.bind(path)?;
                let file = SocketFile {
                    path: path.clone(),
                    number: number(path)?,
                };
                // No client can connect before `listen`. It follows at once, since other processes
                // take a socket without a listener for a stale one.
                fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
                let listener = socket.listen(limits::ADMIN_BACKLOG)?;
                Ok(Self::Unix { file, listener })
            }
        }
    }

    /// Binds an address for TLS, within a runtime.
    pub(super) fn bind_tls(
        address: SocketAddr,
        certificates: Arc<Watched<Certificates>>,
    ) -> io::Result<Self> {
        bind(address).map(|it| Self::Tcp(it, Some(certificates)))
    }

    /// The URL of the bound address, with the port that the system chose.
    pub(super) fn url(&self) -> io::Result<String> {
        Ok(match self {
            Self::Tcp(listener, None) => format!("http://{}", listener.local_addr()?),
            Self::Tcp(listener, Some(_)) => format!("https://{}", listener.local_addr()?),
            Self::Unix { file, .. } => format!("unix:{}", file.path.display()),
        })
    }

    /// The next connection and its client address; connections over a Unix socket share one
    /// address.
    pub(super) async fn accept(&self) -> io::Result<(Socket, SocketAddr)> {
        match self {
            Self::Tcp(listener, certificates) => {
                let (socket, client) = listener.accept().await?;
                let socket = match certificates.clone() {
                    None => Socket::Open(Box::new(socket)),
                    Some(certificates) => Socket::Tls(socket, certificates),
                };
                Ok((socket, client))
            }
            Self::Unix { listener, .. } => {
                let socket = Socket::Open(Box::new(listener.accept().await?.0));
                Ok((socket, (Ipv4Addr::LOCALHOST, 0).into()))
            }
        }
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = net::TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// An accepted connection.
pub(super) enum Socket {
    /// The client may send requests.
    Open(Box<dyn Stream>),
    /// The client must complete a TLS handshake first.
    Tls(TcpStream, Arc<Watched<Certificates>>),
}

impl Socket {
    /// The stream of requests, and whether the certificate of its client is still accepted; none
    /// if the client has no certificate.
    pub(super) async fn open(self) -> io::Result<(Box<dyn Stream>, Option<Arc<dyn Proof>>)> {
        match self {
            Self::Open(stream) => Ok((stream, None)),
            Self::Tls(socket, certificates) => {
                let accepted = accept_tls(&certificates, socket).await?;
                Ok((Box::new(accepted.stream), accepted.proof))
            }
        }
    }
}

fn number(path: &Path) -> io::Result<Number> {
    let about = fs::symlink_metadata(path)?;
    Ok((about.dev(), about.ino()))
}

/// Whether there is a socket without a listener at this path. Fails if the path is taken.
pub(crate) fn has_stale_socket(path: &Path) -> io::Result<bool> {
    let found = match fs::symlink_metadata(path) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    if !found.file_type().is_socket() {
        let error = "the existing file is no socket, so it is not replaced";
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, error));
    }
    if is_listened_at(path)? {
        let error = "another process listens there";
        return Err(io::Error::new(io::ErrorKind::AddrInUse, error));
    }
    Ok(true)
}

/// Whether a process listens at this socket. The process may be stopped and never accept, so this
/// does not wait.
fn is_listened_at(path: &Path) -> io::Result<bool> {
    let connecting = pin!(UnixSocket::new_stream()?.connect(path));
    match connecting.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Ok(_)) | Poll::Pending => Ok(true),
        Poll::Ready(Err(error)) => match error.kind() {
            io::ErrorKind::ConnectionRefused => Ok(false),
            // The backlog of the listener is full (unix(7): EAGAIN).
            io::ErrorKind::WouldBlock => Ok(true),
            _ => Err(error),
        },
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Another process may have removed the file, and another store may have bound the same
        // path.
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
    async fn a_socket_is_private_and_removed_with_its_listener() {
        let directory = tempfile::tempdir().unwrap();
        let (path, place) = place(&directory);
        let listener = Listener::bind(&place).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let _client = UnixStream::connect(&path).unwrap();
        assert!(listener.accept().await.is_ok());
        drop(listener);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn only_the_socket_of_a_killed_store_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let (path, place) = place(&directory);
        fs::write(&path, "mine").unwrap();
        assert!(refused(&place).contains("no socket"));
        assert_eq!(fs::read(&path).unwrap(), b"mine");
        fs::remove_file(&path).unwrap();

        // The path is taken from the start, although nothing accepts connections yet.
        let first = Listener::bind(&place).unwrap();
        assert!(refused(&place).contains("another process"));
        // Like after a kill: the file stays without a listener.
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
    async fn the_socket_file_of_another_store_stays() {
        let directory = tempfile::tempdir().unwrap();
        let (path, place) = place(&directory);
        let first = Listener::bind(&place).unwrap();
        fs::remove_file(&path).unwrap();
        let _second = Listener::bind(&place).unwrap();
        drop(first);
        assert!(path.exists());
    }

    #[tokio::test]
    async fn a_stopped_process_is_detected_without_waiting() {
        let directory = tempfile::tempdir().unwrap();
        let (path, place) = place(&directory);
        let socket = UnixSocket::new_stream().unwrap();
        socket.bind(&path).unwrap();
        let _stopped = socket.listen(0).unwrap();
        // Each attempt takes a slot in its backlog.
        for _ in 0..4 {
            assert!(refused(&place).contains("another process"));
        }
    }
}
