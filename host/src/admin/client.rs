//! Asking a running store's administration.
//!
//! What enters: the way in, and a request. What leaves: a status and JSON. It is for commands: one connection for each request.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{AUTHORIZATION, HOST};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value as Json;
use tokio::net::{TcpStream, UnixStream};

use super::access::Door;
use super::listener::Stream;
use crate::limits;

/// How long it may take to connect: the store is on this machine or behind a tunnel.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Asks, and waits for the answer.
pub(crate) async fn ask(
    door: &Door,
    method: Method,
    path: &str,
    body: Vec<u8>,
) -> io::Result<(StatusCode, Json)> {
    let (socket, host) = tokio::time::timeout(CONNECT_TIMEOUT, connect(&door.url)).await??;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(socket))
        .await
        .map_err(io::Error::other)?;
    // It ends with the sender; what goes wrong on it is told to whoever waits for the answer.
    tokio::spawn(connection);
    let mut request = Request::builder()
        .method(method)
        .uri(path)
        .header(HOST, host);
    if let Some(token) = &door.token {
        request = request.header(AUTHORIZATION, format!("Bearer {token}"));
    }
    let request = request
        .body(Full::new(Bytes::from(body)))
        .map_err(io::Error::other)?;
    let answer = sender
        .send_request(request)
        .await
        .map_err(io::Error::other)?;
    let status = answer.status();
    let body = Limited::new(answer.into_body(), limits::ADMIN_ANSWER_BYTES_MAX)
        .collect()
        .await
        .map_err(io::Error::other)?
        .to_bytes();
    let document = serde_json::from_slice(&body).map_err(|_| {
        io::Error::other("what answers there is no administration of a state store")
    })?;
    Ok((status, document))
}

/// A connection, and the name of what it leads to.
async fn connect(url: &str) -> io::Result<(Box<dyn Stream>, &str)> {
    if let Some(path) = url.strip_prefix("unix:") {
        return Ok((Box::new(UnixStream::connect(path).await?), "localhost"));
    }
    let address = url.strip_prefix("http://").unwrap_or(url);
    let address = address.trim_end_matches('/');
    Ok((Box::new(TcpStream::connect(address).await?), address))
}
