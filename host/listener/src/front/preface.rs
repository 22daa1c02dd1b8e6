//! The first bytes of a connection between two hosts, before any byte of a client.
//!
//! ```text
//! leader → host   "SHCL" version(1) nonce(16)
//! host → leader   nonce(16) purpose(1) scheme(1) family(1) address(16) port(2) name length(1)
//!                 name(63) MAC(32)
//! leader → host   answer(1) MAC(32)
//! ```
//!
//! Both sides prove that they know the secret of the cluster: each MAC covers the nonce of the
//! other side, so that a recorded message proves nothing later. Every part has a fixed length, so
//! that no byte of the other side decides how much is read. The callers limit the time.
//!
//! The host must send no byte of the client before it has the answer [`Answer::Accepted`]. So it
//! can offer the stream to another leader after any other answer, and no byte is lost.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use statehouse_config::{Scheme, limits};

const MAGIC: [u8; 4] = *b"SHCL";

/// The version of all messages. A host of another version is refused by name.
const VERSION: u8 = 1;

const NONCE_BYTES: usize = 16;
const MAC_BYTES: usize = blake3::OUT_LEN;
const HELLO_BYTES: usize = MAGIC.len() + 1 + NONCE_BYTES;
/// Purpose, scheme, family, address, port and name.
const BODY_BYTES: usize = 1 + CLIENT_BYTES + 1 + limits::CLUSTER_HOST_NAME_BYTES_MAX;
/// Scheme, family, address and port of a client.
const CLIENT_BYTES: usize = 2 + 16 + 2;
const REQUEST_BYTES: usize = NONCE_BYTES + BODY_BYTES;

type Nonce = [u8; NONCE_BYTES];

/// Why a connection between two hosts failed at its start. The text is for the log.
#[derive(Debug, thiserror::Error)]
pub(super) enum PrefaceError {
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    /// Such as a probe.
    #[error("the other side closed the connection before it sent a byte")]
    Left,
    #[error("the other side is no Statehouse host: is this the address of its cluster port?")]
    NotAHost,
    #[error(
        "the leader uses version {0} of the protocol between hosts, and this host version {VERSION}: run the same release on both"
    )]
    Version(u8),
    #[error(
        "the other side does not know the secret of this cluster: check that both hosts use the same cluster"
    )]
    Secret,
    #[error("the message of the other host is invalid: {0}")]
    Invalid(&'static str),
}

/// The name of a host in the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostName(Box<str>);

impl FromStr for HostName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let max = limits::CLUSTER_HOST_NAME_BYTES_MAX;
        if text.is_empty() || text.len() > max || text.chars().any(char::is_control) {
            let shown = text.escape_debug();
            return Err(format!(
                "`{shown}` is no name of a host: use 1 to {max} bytes without control characters"
            ));
        }
        Ok(Self(text.into()))
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[derive(Clone)]
pub(super) struct Key([u8; 32]);

impl Key {
    pub(super) fn new(secret: &[u8; 32]) -> Self {
        // The secret may have other uses, so this one has a key of its own.
        let context = "Statehouse 2026 MAC between the hosts of a cluster";
        Self(blake3::derive_key(context, secret))
    }

    /// The MAC of parts that all have a fixed length. Comparisons of hashes take constant time.
    fn mac(&self, label: &[u8; 8], parts: &[&[u8]]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(label);
        for part in parts {
            hasher.update(part);
        }
        hasher.finalize()
    }
}

/// What a host connects for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The leader sends bytes at regular intervals, which prove that it runs.
    Link,
    /// The stream of a client of this address, accepted by a listener of this scheme. Programs
    /// before [`Self::Streams`] know only this.
    Stream { scheme: Scheme, client: SocketAddr },
    /// The streams of many clients.
    Streams,
    /// A link on which the host sends bytes too. The leader sends its own only while these arrive,
    /// so they prove both directions. Earlier programs refuse it.
    TwoWayLink,
}

/// The message of a host to the leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) host: HostName,
    pub(super) purpose: Purpose,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The bytes of the client follow, or those of the link.
    Accepted = 1,
    /// The host does not lead. Another host may lead, or this one soon.
    NotLeading = 2,
    /// The leader has no listener of this scheme.
    NoListener = 3,
    /// The message was invalid, or a limit is reached.
    Refused = 4,
}

impl Answer {
    const ALL: [Self; 4] = [
        Self::Accepted,
        Self::NotLeading,
        Self::NoListener,
        Self::Refused,
    ];

    pub(super) fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|it| *it as u8 == byte)
    }
}

/// A request that was received and has no answer yet.
pub(super) struct Received {
    pub(super) request: Request,
    nonces: [Nonce; 2],
}

impl Received {
    pub(super) async fn answer<S: AsyncWrite + Unpin>(
        &self,
        stream: &mut S,
        key: &Key,
        answer: Answer,
    ) -> io::Result<()> {
        send_answer(stream, key, &self.nonces, answer).await
    }
}

/// Receives the request of another host. A peer that does not know the secret is refused.
pub(super) async fn receive<S>(stream: &mut S, key: &Key) -> Result<Received, PrefaceError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let own = nonce()?;
    let mut hello = [0; HELLO_BYTES];
    hello[..4].copy_from_slice(&MAGIC);
    hello[4] = VERSION;
    hello[5..].copy_from_slice(&own);
    stream.write_all(&hello).await?;

    let mut request = [0; REQUEST_BYTES];
    let mut mac = [0; MAC_BYTES];
    let read = stream.read(&mut request).await?;
    if read == 0 {
        return Err(PrefaceError::Left);
    }
    stream.read_exact(&mut request[read..]).await?;
    stream.read_exact(&mut mac).await?;
    let (theirs, body) = request.split_first_chunk().ok_or(PrefaceError::NotAHost)?;
    let nonces = [own, *theirs];
    let decoded = match key.mac(b"request ", &[&hello, &request]) == mac {
        true => Request::decode(body).map_err(PrefaceError::Invalid),
        false => Err(PrefaceError::Secret),
    };
    match decoded {
        Ok(request) => Ok(Received { request, nonces }),
        Err(error) => {
            send_answer(stream, key, &nonces, Answer::Refused).await?;
            Err(error)
        }
    }
}

/// Reads the first bytes of a leader.
pub(super) async fn read_hello<S>(stream: &mut S) -> Result<[u8; HELLO_BYTES], PrefaceError>
where
    S: AsyncRead + Unpin,
{
    let mut hello = [0; HELLO_BYTES];
    stream.read_exact(&mut hello).await?;
    if hello[..4] != MAGIC {
        return Err(PrefaceError::NotAHost);
    }
    if hello[4] != VERSION {
        return Err(PrefaceError::Version(hello[4]));
    }
    Ok(hello)
}

/// Sends a request to the leader and returns its answer.
pub(super) async fn send<S>(
    stream: &mut S,
    key: &Key,
    request: &Request,
) -> Result<Answer, PrefaceError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let hello = read_hello(stream).await?;
    let mut theirs = Nonce::default();
    theirs.copy_from_slice(&hello[5..]);
    let own = nonce()?;
    let mut message = Vec::with_capacity(REQUEST_BYTES + MAC_BYTES);
    message.extend_from_slice(&own);
    request.encode(&mut message);
    let mac = key.mac(b"request ", &[&hello, &message]);
    message.extend_from_slice(mac.as_bytes());
    stream.write_all(&message).await?;

    let mut answer = [0; 1 + MAC_BYTES];
    stream.read_exact(&mut answer).await?;
    let (code, mac) = answer.split_at(1);
    // A leader with another secret refuses, and its MAC is wrong.
    if key.mac(b"answer  ", &[&theirs, &own, code]) != *mac {
        return Err(PrefaceError::Secret);
    }
    Answer::from_byte(code[0]).ok_or(PrefaceError::Invalid("its answer is unknown"))
}

async fn send_answer<S: AsyncWrite + Unpin>(
    stream: &mut S,
    key: &Key,
    [leaders, hosts]: &[Nonce; 2],
    answer: Answer,
) -> io::Result<()> {
    let code = [answer as u8];
    let mac = key.mac(b"answer  ", &[leaders, hosts, &code]);
    let mut message = [0; 1 + MAC_BYTES];
    message[..1].copy_from_slice(&code);
    message[1..].copy_from_slice(mac.as_bytes());
    stream.write_all(&message).await
}

fn nonce() -> io::Result<Nonce> {
    let mut nonce = Nonce::default();
    getrandom::fill(&mut nonce).map_err(io::Error::other)?;
    Ok(nonce)
}

impl Request {
    /// Appends [`BODY_BYTES`]. Unused bytes are zero.
    fn encode(&self, out: &mut Vec<u8>) {
        let (purpose, client) = match self.purpose {
            Purpose::Link => (0, [0; CLIENT_BYTES]),
            Purpose::Stream { scheme, client } => (1, encode_client(scheme, client)),
            Purpose::Streams => (2, [0; CLIENT_BYTES]),
            Purpose::TwoWayLink => (3, [0; CLIENT_BYTES]),
        };
        out.push(purpose);
        out.extend_from_slice(&client);
        let mut name = [0; 1 + limits::CLUSTER_HOST_NAME_BYTES_MAX];
        let bytes = self.host.0.as_bytes();
        // At most `CLUSTER_HOST_NAME_BYTES_MAX`, which is less than 256.
        name[0] = bytes.len() as u8;
        name[1..=bytes.len()].copy_from_slice(bytes);
        out.extend_from_slice(&name);
    }

    fn decode(body: &[u8]) -> Result<Self, &'static str> {
        let (&[purpose], body) = split(body)?;
        let (client, body) = split::<CLIENT_BYTES>(body)?;
        let (&[length], name) = split(body)?;
        let name = name.get(..length.into()).ok_or("its name is too long")?;
        let name = str::from_utf8(name).map_err(|_| "its name is not UTF-8")?;
        let host = name.parse().map_err(|_| "its name is no name of a host")?;
        let purpose = match purpose {
            1 => {
                let (scheme, client) = decode_client(client)?;
                Purpose::Stream { scheme, client }
            }
            0 if *client == [0; CLIENT_BYTES] => Purpose::Link,
            2 if *client == [0; CLIENT_BYTES] => Purpose::Streams,
            3 if *client == [0; CLIENT_BYTES] => Purpose::TwoWayLink,
            _ => return Err("its purpose is unknown"),
        };
        Ok(Self { host, purpose })
    }
}

/// The scheme of a listener, and the address of its client.
pub(super) fn encode_client(scheme: Scheme, client: SocketAddr) -> [u8; CLIENT_BYTES] {
    let (family, address) = match client.ip() {
        IpAddr::V4(address) => (4, address.to_ipv6_mapped().octets()),
        IpAddr::V6(address) => (6, address.octets()),
    };
    let mut out = [0; CLIENT_BYTES];
    out[0] = u8::from(scheme.tls) | u8::from(scheme.websocket) << 1;
    out[1] = family;
    out[2..18].copy_from_slice(&address);
    out[18..].copy_from_slice(&client.port().to_be_bytes());
    out
}

pub(super) fn decode_client(
    bytes: &[u8; CLIENT_BYTES],
) -> Result<(Scheme, SocketAddr), &'static str> {
    let (&[scheme, family], rest) = split(bytes)?;
    let (address, port) = split::<16>(rest)?;
    let (&port, _) = split(port)?;
    let address = Ipv6Addr::from(*address);
    let ip = match (family, address.to_ipv4_mapped()) {
        (4, Some(address)) => IpAddr::V4(address),
        (6, _) => IpAddr::V6(address),
        _ => return Err("the address of the client is unknown"),
    };
    if scheme > 3 {
        return Err("the protocol of the client is unknown");
    }
    let scheme = Scheme {
        tls: scheme & 1 != 0,
        websocket: scheme & 2 != 0,
    };
    Ok((scheme, SocketAddr::new(ip, u16::from_be_bytes(port))))
}

/// The first bytes and the rest.
fn split<const N: usize>(bytes: &[u8]) -> Result<(&[u8; N], &[u8]), &'static str> {
    bytes.split_first_chunk().ok_or("it is too short")
}

#[cfg(test)]
mod tests;
