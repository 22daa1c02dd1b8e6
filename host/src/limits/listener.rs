//! Bounds of sockets that clients come through: handshakes, certificates on the way, WebSocket.

use std::time::Duration;

/// TLS and WebSocket handshakes under way at once. Each costs some ten kilobytes; beyond it the oldest of who has most ends,
/// and an honest one is over within a fraction of a second.
pub const HANDSHAKES_MAX: usize = 512;

/// How long such a handshake may take: some round trips, also over a slow link. The time for the CONNECT begins behind it.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a peer has to close after a handshake that failed, so that the reason reaches it.
pub const HANDSHAKE_LINGER: Duration = Duration::from_secs(1);

/// Certificates that a client may show: its own and some authorities. Each may be checked several times.
pub const CLIENT_CERTIFICATES_MAX: usize = 6;

/// A file with a list of revoked certificates: a hundred thousand of them, with some forty bytes each in PEM.
pub const CRL_FILE_BYTES_MAX: u64 = 8 << 20;

/// The pause after an accept that failed: without file descriptors it fails at once, again and again.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Header lines of a request for a WebSocket: browsers send some twenty.
pub const WS_HEADERS_MAX: usize = 64;

/// All of them together, cookies of the host among them.
pub const WS_HEAD_BYTES_MAX: usize = 16 << 10;

/// Bytes asked of a socket where a frame's head is due: some frames of ordinary size.
pub const WS_READ_BYTES: usize = 1 << 10;

/// The longest frame that is written: what is written at once is copied once more.
pub const WS_FRAME_BYTES_MAX: usize = 64 << 10;

/// A buffer of frames that grew beyond this is given back to the allocator once it is empty.
pub const WS_IDLE_BYTES_MAX: usize = 4 << 10;

/// The name of a site whose pages may connect: longer than any host name.
pub const WS_ORIGIN_BYTES_MAX: usize = 512;
