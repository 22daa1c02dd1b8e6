//! A TLS connection to one address of a name. rumqttc 0.25 takes the address and the name for TLS
//! from the same text, and it cannot use a connection that exists. So it connects to a socket of
//! this process, and a task copies the bytes.

use std::net::SocketAddr;
use std::sync::Arc;

use rumqttc::TlsError;
use rumqttc::tokio_rustls::TlsConnector;
use rumqttc::v5::ConnectionError;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, copy, split};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};

use crate::limits::CLOSE_WAIT;
use crate::random::random;

/// Connects to this address of the host. Returns the path of the socket for rumqttc, and a sender
/// whose drop ends the relay after [`CLOSE_WAIT`], if it has not ended with its connections.
pub(crate) async fn open(
    host: &str,
    tls: &Arc<ClientConfig>,
    address: SocketAddr,
) -> Result<(String, oneshot::Sender<()>), ConnectionError> {
    let name = ServerName::try_from(host.to_owned()).map_err(TlsError::DNSName)?;
    let socket = TcpStream::connect(address).await?;
    socket.set_nodelay(true)?;
    let connecting = TlsConnector::from(Arc::clone(tls)).connect(name, socket);
    let broker = connecting.await.map_err(TlsError::Io)?;
    // An abstract name, so that no file remains.
    let path = format!("\0statehouse-{:x}-{:016x}", std::process::id(), random());
    let listener = UnixListener::bind(&path)?;
    let (owner, dropped) = oneshot::channel();
    tokio::spawn(async move {
        let is_over = async {
            let _ = dropped.await;
            sleep(CLOSE_WAIT).await;
        };
        tokio::select! {
            () = pass(listener, broker) => {}
            () = is_over => {}
        }
    });
    Ok((path, owner))
}

/// Passes the bytes of one connection until either side closes it.
async fn pass(listener: UnixListener, broker: impl AsyncRead + AsyncWrite) {
    let Some(client) = accept(&listener).await else {
        return;
    };
    drop(listener);
    let (mut from_client, mut to_client) = split(client);
    let (mut from_broker, mut to_broker) = split(broker);
    tokio::select! {
        _ = copy(&mut from_client, &mut to_broker) => {
            let _ = timeout(CLOSE_WAIT, to_broker.shutdown()).await;
        }
        _ = copy(&mut from_broker, &mut to_client) => {}
    }
}

/// The connection of this process. Any process of the machine can connect to an abstract name.
async fn accept(listener: &UnixListener) -> Option<UnixStream> {
    let own = i32::try_from(std::process::id()).ok()?;
    loop {
        let (client, _) = listener.accept().await.ok()?;
        let peer = client.peer_cred().ok().and_then(|it| it.pid());
        if peer == Some(own) {
            return Some(client);
        }
    }
}
