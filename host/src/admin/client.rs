//! The HTTP client with which commands call the admin API of a running store, with one connection
//! per request.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::{AUTHORIZATION, HOST};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value as Json;
use tokio::net::{TcpStream, UnixStream};

use super::access::Endpoint;
use super::listener::Stream;
use crate::limits;

/// Limit for connecting; the store is on this machine or behind a tunnel.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Sends a request and waits for the response.
pub(crate) async fn ask(
    endpoint: &Endpoint,
    method: Method,
    path: &str,
    body: Vec<u8>,
) -> io::Result<(StatusCode, Json)> {
    let (socket, host) = tokio::time::timeout(CONNECT_TIMEOUT, connect(&endpoint.url)).await??;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(socket))
        .await
        .map_err(io::Error::other)?;
    // This task ends when the sender is dropped; the sender reports its errors.
    tokio::spawn(connection);
    let mut request = Request::builder()
        .method(method)
        .uri(path)
        .header(HOST, host);
    if let Some(token) = &endpoint.token {
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
        io::Error::other("the response is not JSON, so this is not the admin API of a state store")
    })?;
    Ok((status, document))
}

/// Connects, and returns the value of the Host header.
async fn connect(url: &str) -> io::Result<(Box<dyn Stream>, &str)> {
    if let Some(path) = url.strip_prefix("unix:") {
        return Ok((Box::new(UnixStream::connect(path).await?), "localhost"));
    }
    let address = url.strip_prefix("http://").unwrap_or(url);
    let address = address.trim_end_matches('/');
    Ok((Box::new(TcpStream::connect(address).await?), address))
}
