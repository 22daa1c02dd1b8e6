//! Bounds of the administration and of whoever asks it.

use std::time::Duration;

/// Connections that have shown the token: some operators, a scraper of metrics, and a few that hang.
pub const ADMIN_OPERATORS_MAX: usize = 16;

/// Connections whose first request is not whole. Beyond it the address with most of them loses its oldest. A probe that is sent in
/// one packet needs its place for some milliseconds, so so many keep it there during a flood of new connections.
pub const ADMIN_ARRIVING_MAX: usize = 128;

/// How long the head of a request to the administration may take.
pub const ADMIN_HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// Header lines of such a request.
pub const ADMIN_HEADERS_MAX: usize = 64;

/// All of them together.
pub const ADMIN_HEADER_BYTES_MAX: usize = 16 << 10;

/// How long a body may take: the largest policy over loopback takes a second.
pub const ADMIN_BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// The longest that a connection of the administration lives, whatever it does.
pub const ADMIN_CONNECTION_TIMEOUT: Duration = Duration::from_secs(600);

/// The pause after an accept that failed: without file descriptors it fails at once, again and again.
pub const ADMIN_ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Connections of the administration that wait to be taken, where it listens at a socket of the file system.
pub const ADMIN_BACKLOG: u32 = 16;

/// The path of such a socket: Linux has room for 108 bytes, with the zero at its end.
pub const ADMIN_SOCKET_PATH_BYTES_MAX: usize = 107;

/// A JSON document that is sent to the administration: a pattern and a name.
pub const ADMIN_DOCUMENT_BYTES_MAX: u64 = 16 << 10;

/// A question about rules: the longest key, or topic, in percent signs, and what is said of a client.
pub const ADMIN_QUESTION_BYTES_MAX: u64 = 512 << 10;

/// Clients that one answer names with what they own: with the longest ids of control characters, which JSON writes in six bytes
/// each, they stay below [`ADMIN_ANSWER_BYTES_MAX`].
pub const ADMIN_CLIENTS_MAX: usize = 2_000;

/// As much of a client id as such an answer holds: all of one at the embedded broker.
pub const ADMIN_CLIENT_ID_BYTES_MAX: usize = 1024;

/// The file that says where the administration is.
pub const ADMIN_FILE_BYTES_MAX: u64 = 4 << 10;

/// The shortest token that is taken from the environment: shorter ones are guessed.
pub const ADMIN_TOKEN_BYTES_MIN: usize = 16;

/// How long a command waits for the administration: an interpreter takes some ten seconds to compile, on a gateway
/// some times that.
pub const ADMIN_ANSWER_TIMEOUT: Duration = Duration::from_secs(300);

/// An answer of the administration, as a command reads it: all policies that can be loaded, or all kept examples of differences.
pub const ADMIN_ANSWER_BYTES_MAX: usize = 16 << 20;
