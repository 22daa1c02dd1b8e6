//! Limits of the sockets of clients: handshakes, certificates, WebSocket.

use std::time::Duration;

/// TLS and WebSocket handshakes in progress at once. Each costs some ten kilobytes. Beyond this
/// limit the address with most of them loses its oldest. An honest handshake takes a fraction of a
/// second. There are less if the process may open less than 4096 files.
pub const HANDSHAKES_MAX: usize = 512;

/// The time limit for such a handshake: some round trips, even over a slow link. The time limit for
/// the CONNECT starts after it.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a peer may take to close after a failed handshake, so that the reason reaches it.
pub const HANDSHAKE_LINGER: Duration = Duration::from_secs(1);

/// Certificates that a client may send: its own and some authorities. Each may be checked several
/// times.
pub const CLIENT_CERTIFICATES_MAX: usize = 6;

/// The names of the authorities for client certificates, in a handshake. Beyond this size the store
/// sends none, which means any authority. The whole message then fits into one TLS record, as some
/// small clients require. TLS has no more than 16 bits for the length of the names.
pub const CLIENT_CA_NAMES_BYTES_MAX: usize = 14 << 10;

/// A file with a list of revoked certificates: a hundred thousand of them, with some forty bytes
/// each in PEM.
pub const CRL_FILE_BYTES_MAX: u64 = 8 << 20;

/// The pause after an accept failed. Without it, a lack of file descriptors would fail in a loop.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The silence of a socket after which the system probes whether the client's machine still exists.
/// Only for clients of MQTT 3.1.1 without a keep alive: those of MQTT 5 send a packet within this
/// time.
pub const CLIENT_PROBE_AFTER: Duration = Duration::from_secs(20 * 60);

/// Header lines of a WebSocket request: browsers send some twenty.
pub const WS_HEADERS_MAX: usize = 64;

/// All header lines of a WebSocket request together, including the host's cookies.
pub const WS_HEAD_BYTES_MAX: usize = 16 << 10;

/// Bytes to read from a socket when a frame header is due: some frames of ordinary size.
pub const WS_READ_BYTES: usize = 1 << 10;

/// The longest frame that is written: its bytes are first copied into a buffer.
pub const WS_FRAME_BYTES_MAX: usize = 64 << 10;

/// A frame buffer that grew beyond this size is freed once it is empty.
pub const WS_IDLE_BYTES_MAX: usize = 4 << 10;

/// The origin of a site whose pages may connect: longer than any host name.
pub const WS_ORIGIN_BYTES_MAX: usize = 512;
