//! Limits of the admin API and its callers.

use std::time::Duration;

/// Authenticated connections of a listener: enough for some operators with a page each, a metrics
/// scraper, and a few that hang. The listeners for this machine and for TLS have limits of their
/// own. So operators on other machines cannot block those on this machine.
pub const ADMIN_OPERATORS_MAX: usize = 32;

/// Authenticated connections of one user at a listener: a browser opens six. At the listener of
/// metrics, where no client logs in, those of one network of clients. So neither can take the place
/// of all others.
pub const ADMIN_USER_CONNECTIONS_MAX: usize = ADMIN_OPERATORS_MAX / 4;

/// How long a connection may wait with an answer of which its client takes no byte.
pub const ADMIN_ANSWER_STALL: Duration = Duration::from_secs(10);

/// Open streams of events of a listener. Each holds an operator seat, so as many seats stay free
/// for other requests.
pub const ADMIN_STREAMS_MAX: usize = ADMIN_OPERATORS_MAX / 2;

/// Events that wait for the reader of a stream. Further ones wait in the socket's buffers.
pub const ADMIN_STREAM_EVENTS_MAX: usize = 4;

/// How long an event waits for room in the queue of a stream until the reader counts as too slow: a
/// phone in a tunnel reconnects.
pub const ADMIN_STREAM_STALL: Duration = Duration::from_secs(10);

/// How long a stream lasts until its reader must ask again, and log in again.
pub const ADMIN_STREAM_LIFE: Duration = Duration::from_secs(300);

/// After which silence a stream sends a comment: proxies end connections that are silent for a
/// minute.
pub const ADMIN_STREAM_KEEP_ALIVE: Duration = Duration::from_secs(15);

/// How often a stream checks that its operator still has the role that it needs, and a connection
/// that the certificate of its client is still valid.
pub const ADMIN_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Connections of a listener whose first request is incomplete, or whose password is not checked
/// yet. Beyond this limit the address with most of them loses its oldest. A probe that is sent in
/// one packet needs its place for some milliseconds. This many places let it through even during a
/// flood of new connections. There are less if the process may open less than 4096 files.
pub const ADMIN_ARRIVING_MAX: usize = 128;

/// Listeners of the admin API: for this machine, for TLS and for metrics.
pub const ADMIN_LISTENERS_MAX: usize = 3;

/// The time limit for the check of a password. A gateway does some ten checks in a second.
pub const ADMIN_LOGIN_TIMEOUT: Duration = Duration::from_secs(10);

/// The time limit for a TLS handshake, and for the head of a request.
pub const ADMIN_HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// Header lines of a request.
pub const ADMIN_HEADERS_MAX: usize = 64;

/// All header lines of a request together.
pub const ADMIN_HEADER_BYTES_MAX: usize = 16 << 10;

/// The time limit for a body: the largest policy over loopback takes a second.
pub const ADMIN_BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a body may make no progress. It must be well below [`ADMIN_UPLOAD_WAIT`], so that
/// uploads that wait for the room of a stalled one are not refused.
pub const ADMIN_BODY_STALL: Duration = Duration::from_secs(10);

/// How long the body of a refused request is discarded, so that its sender reads the answer.
pub const ADMIN_DISCARD_TIMEOUT: Duration = Duration::from_secs(10);

/// How long it waits for more of such a body.
pub const ADMIN_DISCARD_IDLE: Duration = Duration::from_secs(1);

/// After which time a connection to the admin API begins no other request. The one that it has
/// begun may take another [`ADMIN_ANSWER_TIMEOUT`].
pub const ADMIN_CONNECTION_TIMEOUT: Duration = Duration::from_secs(600);

/// Sessions of the page at one address: some tabs for each operator. One takes some hundred bytes.
pub const ADMIN_SESSIONS_MAX: usize = 64;

/// How long a session of the page lasts without a request. A page that is open sends some.
pub const ADMIN_SESSION_IDLE_MAX: Duration = Duration::from_secs(30 * 60);

/// How long a session of the page lasts at most: a shift.
pub const ADMIN_SESSION_MAX: Duration = Duration::from_secs(12 * 3600);

/// The pause after an accept failed. Without it, a lack of file descriptors would fail in a loop.
pub const ADMIN_ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The backlog of connections if the admin API listens on a Unix socket.
pub const ADMIN_BACKLOG: u32 = 16;

/// The path of a Unix socket: Linux has room for 108 bytes, with the final zero.
pub const ADMIN_SOCKET_PATH_BYTES_MAX: usize = 107;

/// A JSON document that is sent to the admin API: a pattern and a name.
pub const ADMIN_DOCUMENT_BYTES_MAX: u64 = 16 << 10;

/// A question about access rules: the longest key or topic in percent-encoding, and the attributes
/// of a client.
pub const ADMIN_QUESTION_BYTES_MAX: u64 = 512 << 10;

/// Clients that one response lists with what they own. Even with the longest ids of control
/// characters, which JSON writes in six bytes each, the list stays below
/// [`ADMIN_ANSWER_BYTES_MAX`].
pub const ADMIN_CLIENTS_MAX: usize = 2_000;

/// Keys that a list of clients examines for locks, of those that expire first: some milliseconds.
/// Locks are among them, because their holders renew short leases.
pub const ADMIN_LOCKS_EXAMINED_MAX: usize = 16 << 10;

/// Bytes of a client id in such a response: a whole id of the embedded broker fits.
pub const ADMIN_CLIENT_ID_BYTES_MAX: usize = 1024;

/// Readers that wait for the next log line of a policy or of the audit log. They hold operator
/// seats while they wait. Beside them and [`ADMIN_STREAMS_MAX`], a quarter of the seats stays free
/// for short requests.
pub const ADMIN_LOG_FOLLOWERS_MAX: usize = ADMIN_OPERATORS_MAX / 4;

/// How long a response waits for the next log line of a policy. It must end well before
/// [`ADMIN_ANSWER_TIMEOUT`].
pub const ADMIN_LOG_WAIT: Duration = Duration::from_secs(20);

/// How often such a response looks for a line.
pub const ADMIN_LOG_POLL: Duration = Duration::from_millis(100);

/// Changes of a key in one answer.
pub const ADMIN_HISTORY_CHANGES_MAX: usize = 2_000;

/// Bytes of changes or differences in one answer, in JSON: half of [`ADMIN_ANSWER_BYTES_MAX`]. Less
/// on a machine with less than 128 times this memory.
pub const ADMIN_PAST_BYTES_MAX: u64 = 8 << 20;

/// Answers about the past in memory, from the read until they are sent.
pub const ADMIN_PAST_ANSWERS_MAX: usize = 4;

/// Differences in the answer to a replay.
pub const ADMIN_REPLAY_DIFFERENCES_MAX: usize = 1_000;

/// How long a request for history waits for another one. Reading a gigabyte takes some seconds.
pub const ADMIN_PAST_WAIT: Duration = Duration::from_secs(20);

/// How long a replay may take. It must be less than [`ADMIN_ANSWER_TIMEOUT`].
pub const ADMIN_REPLAY_TIMEOUT: Duration = Duration::from_secs(240);

/// The largest store that replays its records while it runs, in bytes of keys and values: a replay
/// holds a copy of them. Less on a machine with less than four times this memory.
pub const ADMIN_REPLAY_STORE_BYTES_MAX: u64 = 256 << 20;

/// Keys and groups in one list. Each costs at most two searches among the keys.
pub const ADMIN_KEYS_MAX: usize = 1_000;

/// Keys and groups of a list that are read while the store's lock is held: at two searches each,
/// less than the steps of one socket read take.
pub const KEYS_PER_TURN: usize = 64;

/// Bytes of keys in one list, in JSON. A list with longer keys ends earlier.
pub const ADMIN_KEYS_BYTES_MAX: usize = 1 << 20;

/// The delimiter of a list.
pub const ADMIN_DELIMITER_BYTES_MAX: usize = 16;

/// Bytes of a key in the cursor of a list. A longer one would not fit into the head of a request.
pub const ADMIN_CURSOR_KEY_BYTES_MAX: usize = 4 << 10;

/// Bytes of a value that an operator reads or writes through the admin API. JSON writes some bytes
/// as six, so an answer stays below [`ADMIN_ANSWER_BYTES_MAX`].
pub const ADMIN_VALUE_BYTES_MAX: usize = 1 << 20;

/// How long the upload of a policy waits for room, and then for the policies before it.
pub const ADMIN_UPLOAD_WAIT: Duration = Duration::from_secs(20);

/// How often a waiting upload looks for room.
pub const ADMIN_UPLOAD_PAUSE: Duration = Duration::from_millis(50);

/// An upload that does not announce its length; commands and browsers do. It takes all of this room
/// from others, also if it is smaller.
pub const ADMIN_UPLOAD_UNANNOUNCED_BYTES_MAX: u64 = 8 << 20;

/// How long a change by an operator waits for the one before, and then for its response.
pub const ADMIN_EDIT_WAIT: Duration = Duration::from_secs(20);

/// How often a stream of changes looks for changes.
pub const ADMIN_CHANGES_INTERVAL: Duration = Duration::from_millis(200);

/// Changes that a stream sends at each look. Of more, a person could read none.
pub const ADMIN_CHANGES_SENT_MAX: usize = 100;

/// Bytes of these changes. Keys and client ids may be long, and JSON writes some bytes as six.
pub const ADMIN_CHANGES_BYTES_MAX: usize = 1 << 20;

/// Changes, of any keys, that a stream examines while the store's lock is held. Each costs a
/// comparison, and a lookup if it is below the prefix.
pub const CHANGES_PER_TURN: usize = 256;

/// Turns of a stream at each look. It can follow 20 000 changes per second.
pub const ADMIN_CHANGES_TURNS_MAX: usize = 16;

/// How long an answer waits until the state that it shows is durable.
pub const ADMIN_DURABLE_WAIT: Duration = Duration::from_secs(10);

/// How often it looks.
pub const ADMIN_DURABLE_POLL: Duration = Duration::from_millis(2);

/// Files of a project that `policy dev` watches.
pub const PROJECT_FILES_MAX: usize = 10_000;

/// The file that contains the address of the admin API.
pub const ADMIN_FILE_BYTES_MAX: u64 = 4 << 10;

/// The shortest token that is accepted from the environment: shorter ones can be guessed.
pub const ADMIN_TOKEN_BYTES_MIN: usize = 16;

/// How long a command waits for the admin API. An interpreter takes some ten seconds to compile,
/// and several times that on a gateway.
pub const ADMIN_ANSWER_TIMEOUT: Duration = Duration::from_secs(300);

/// The same for a question that reads no history, and for a disconnect. It must be longer than
/// [`ADMIN_LOG_WAIT`].
pub const ADMIN_SHORT_ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// A response of the admin API, as a command reads it: all policies that can be loaded, or all
/// stored examples of differences.
pub const ADMIN_ANSWER_BYTES_MAX: usize = 16 << 20;

/// Bytes of an answer that needs no room. All connections together hold a few times this memory.
pub const ADMIN_SMALL_ANSWER_BYTES_MAX: usize = 256 << 10;

/// Bytes of larger answers in memory until they are sent, of all listeners together. Less on a
/// machine with less than eight times this memory. Answers about the past have a limit of their own.
pub const ADMIN_UNSENT_BYTES_MAX: u64 = 64 << 20;

/// How often an overview is computed while there are readers.
pub const OVERVIEW_INTERVAL: Duration = Duration::from_secs(1);

/// The time that the first overview is about: the reader waits for it.
pub const OVERVIEW_FIRST: Duration = Duration::from_millis(250);

/// For how long overviews are computed after a request for one, since the next one is likely.
pub const OVERVIEW_LINGER: Duration = Duration::from_secs(10);

/// How long a request waits for the first overview.
pub const OVERVIEW_WAIT: Duration = Duration::from_secs(5);

/// Overviews that latencies are computed over: at one per second, a window of ten seconds.
pub const OVERVIEW_WINDOW: usize = 10;

/// How often open files are counted for overviews: the count takes a millisecond with ten thousand
/// connections.
pub const OVERVIEW_FDS_INTERVAL: Duration = Duration::from_secs(10);

/// The shortest interval of `statehouse top`.
pub const TOP_INTERVAL_MIN: Duration = Duration::from_millis(250);

/// Clients that `statehouse top` asks for.
pub const TOP_CLIENTS: usize = 200;

/// Rates that `statehouse top` draws: one per column of a wide terminal.
pub const TOP_HISTORY_MAX: usize = 200;

/// Keys that wait while `statehouse top` draws.
pub const TOP_EVENTS_MAX: usize = 64;
