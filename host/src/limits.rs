//! Every bound of the host, with its unit in its name and its reason. What the broker bounds by
//! itself (connections, queues, packets) is in `statehouse_mqtt::Limits`; the ones that an operator
//! may move are defaults of the configuration.

use std::time::Duration;

/// How far ahead of `now` a version may lie: clients refuse a later one, and the protocol allows a
/// request's clock this much (the protocol, section 5).
pub const SKEW_MS_MAX: u64 = 60_000;

/// Default bound of the fuel of one call (`max_fuel`), about a thousand times what a SET burns: room for a page of SCAN,
/// and at most some ten milliseconds of a runaway loop.
pub const FUEL_PER_CALL_DEFAULT: u64 = 4_000_000;

/// What `max_fuel` may be lowered to: some thirty SETs. Much below, even the built-in policy could answer nothing.
pub const FUEL_PER_CALL_MIN: u64 = 50_000;

/// What `max_fuel` may be raised to: well before the watchdog, also on a machine that is slow or busy. What ran once has this
/// much whenever it runs again, since it may have run under any bound.
pub const FUEL_PER_CALL_MAX: u64 = 40_000_000;

/// Fuel on top for every byte of the payload, since a parser must look at each: the worst payload
/// (nothing but empty strings, six bytes each) burns about a quarter of it.
pub const FUEL_PER_PAYLOAD_BYTE: u64 = 64;

/// Fuel of `describe` and `configure`: interpreters start up there.
pub const FUEL_SETUP: u64 = 2_000_000_000;

/// The watchdog's tick. It is no verdict (fuel is, since it does not depend on the machine's load), so it
/// is coarse enough to cost an idle gateway nothing.
pub const EPOCH_TICK: Duration = Duration::from_millis(20);

/// Ticks until the watchdog stops a call: longer than any honest call on a slow, loaded machine,
/// short enough that other clients only notice a hiccup.
pub const EPOCH_TICKS_PER_CALL: u64 = 25;

/// How long that is.
pub const WATCHDOG: Duration = EPOCH_TICK.saturating_mul(EPOCH_TICKS_PER_CALL as u32);

/// Linear memory of a policy: the request and its reply lie in it, everything else is small. It also
/// bounds `max_packet_bytes`, since a payload is copied into it.
pub const GUEST_MEMORY_BYTES_MAX: usize = 32 << 20;

/// Elements of a policy's tables (its function pointers).
pub const GUEST_TABLE_ELEMENTS_MAX: usize = 20_000;

/// Core instances of one component: three where the guest is Rust, 13 with QuickJS, 38 with CPython, whose standard
/// library comes as shared objects.
pub const GUEST_INSTANCES_MAX: usize = 64;

/// Memories of one component: QuickJS comes with three, of which two are empty. The bound of bytes is that of all
/// together.
pub const GUEST_MEMORIES_MAX: usize = 3;

/// Tables of one component: one for its function pointers and one of wit-component's; QuickJS has one more.
pub const GUEST_TABLES_MAX: usize = 4;

/// Native stack of a policy call. A recursion without end stops here instead of in the host's guard page.
pub const GUEST_STACK_BYTES_MAX: usize = 256 << 10;

/// A policy file: Python policies with their interpreter are 18 MB.
pub const POLICY_FILE_BYTES_MAX: u64 = 64 << 20;

/// The section of a module with its signatures: room for some fifty of them, so that checking them all against all
/// keys takes less than a second.
pub const SIGNATURE_SECTION_BYTES_MAX: usize = 4 << 10;

/// Keys that a store trusts: each is tried on each signature.
pub const TRUSTED_KEYS_MAX: usize = 64;

/// A file with a key: PEM is the longest form, with some hundred bytes.
pub const KEY_FILE_BYTES_MAX: u64 = 4 << 10;

/// Connections of the administration: some operators, a scraper of metrics, and a few that hang.
pub const ADMIN_CONNECTIONS_MAX: usize = 16;

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

/// The file that says where the administration is.
pub const ADMIN_FILE_BYTES_MAX: u64 = 4 << 10;

/// The shortest token that is taken from the environment: shorter ones are guessed.
pub const ADMIN_TOKEN_BYTES_MIN: usize = 16;

/// Policies that are held ready at once. Each costs the memory of its machine code, some hundred kilobytes or,
/// with an interpreter in it, some ten megabytes.
pub const LOADED_POLICIES_MAX: usize = 16;

/// Policies that a rollback can go back to.
pub const PREVIOUS_POLICIES_MAX: usize = 4;

/// Policies that are kept only because a request that they handled may come again.
pub const RETIRED_POLICIES_MAX: usize = 16;

/// Files of policies on disk. Beyond it those that nothing needs are removed, the oldest first; a replay of history can
/// use the others.
pub const MODULE_BYTES_MAX: u64 = 256 << 20;

/// Files of machine code: one for each policy that is held ready or that a request which may come again was handled by.
pub const CODE_FILES_MAX: usize = LOADED_POLICIES_MAX + RETIRED_POLICIES_MAX;

/// All of them together. Machine code is about three times as long as the policy. Beyond it those that no start used for
/// longest are removed, and a start that needs one compiles it again.
pub const CODE_BYTES_MAX: u64 = 256 << 20;

/// Prefixes with a policy of their own: each request is compared with all of them.
pub const ROUTES_MAX: usize = 64;

/// Such a prefix.
pub const ROUTE_PREFIX_BYTES_MAX: usize = 1024;

/// A pattern of client ids or keys. Comparing costs at most its length times that of a key.
pub const CANARY_PATTERN_BYTES_MAX: usize = 256;

/// Requests that the guard over a policy looks back on.
pub const GUARD_WINDOW_REQUESTS: usize = 1000;

/// Default bound of failed ones among them (`guard_failures`): a broken policy reaches it at once. A client with one bad
/// habit does too, but where others are answered well it brings at most half of them.
pub const GUARD_FAILURES_DEFAULT: u32 = 10;

/// Requests among them that the watchdog may stop, before that is the policy's fault: they hold everybody up for five
/// seconds. For an honest policy's calls, which take a tenth of a second together, to be hit so often, their thread would
/// have to get a fiftieth of a core.
pub const GUARD_WATCHDOG_MAX: u32 = 10;

/// Requests before their mean fuel says anything.
pub const GUARD_FUEL_REQUESTS_MIN: usize = 100;

/// Default of how many requests of the active policy go by for each that runs again on a fresh instance
/// (`purity_sample`): a thousandth of its time.
pub const PURITY_SAMPLE_DEFAULT: u32 = 1024;

/// Requests that wait for running again, beside the store. What finds no room is not compared.
pub const OBSERVED_QUEUE_MAX: usize = 1024;

/// All of them in bytes.
pub const OBSERVED_QUEUE_BYTES_MAX: u64 = 32 << 20;

/// What one of them costs besides its payload, properties and what it read and wrote, rounded up.
pub const OBSERVED_OVERHEAD_BYTES: u64 = 1024;

/// Keys of which a candidate in shadow is told what they held, though the request did not read them.
pub const OBSERVED_QUESTIONS_MAX: usize = 64;

/// How often a candidate is run for one request, since each answer may lead to the next question.
pub const OBSERVED_ROUNDS_MAX: u32 = 4;

/// Removed keys that the store recalls while a candidate is in shadow: an absent one among them may have been there.
pub const RECENT_REMOVALS_MAX: usize = 4096;

/// Examples of differences that a report holds.
pub const SHADOW_EXAMPLES_MAX: usize = 32;

/// Those of them that differ in the same way, at the same command.
pub const SHADOW_EXAMPLES_ALIKE_MAX: usize = 4;

/// A request or an answer in an example; the rest is cut.
pub const SHADOW_EXAMPLE_BYTES_MAX: usize = 512;

/// Writes that are shown of one request.
pub const SHADOW_EXAMPLE_WRITES_MAX: usize = 8;

/// How often somebody who assigned policies looks whether that is on disk.
pub const ASSIGNED_POLL: Duration = Duration::from_micros(200);

/// Swaps of the active policy that are listed: more than anybody looks at, 64 KiB at most.
pub const SWAPS_LISTED_MAX: usize = 256;

/// How often a change of the assignment is tried again where another came between.
pub const ASSIGN_ATTEMPTS_MAX: u32 = 8;

/// A name that somebody gives for a policy: a name, a version and what is between them.
pub const SELECTOR_BYTES_MAX: usize = 2 * POLICY_NAME_BYTES_MAX + 1;

/// Hex digits of a digest that name a policy.
pub const DIGEST_DIGITS_MIN: usize = 6;

/// How long a command waits for the administration: an interpreter takes some ten seconds to compile, on a gateway
/// some times that.
pub const ADMIN_ANSWER_TIMEOUT: Duration = Duration::from_secs(300);

/// An answer of the administration, as a command reads it: all policies that can be loaded, or all kept examples of differences.
pub const ADMIN_ANSWER_BYTES_MAX: usize = 16 << 20;

/// An order over MQTT: its list of chunks is nearly all of it.
pub const ORDER_BYTES_MAX: usize = 128 << 10;

/// Chunks of one order: the largest policy in pieces of 64 KiB.
pub const ORDER_CHUNKS_MAX: usize = 1024;

/// A chunk: small beside a packet, so that no client waits behind one.
pub const CHUNK_BYTES_MAX: usize = 256 << 10;

/// How long the chunks of an order may take. Until then they take memory.
pub const ORDER_TIMEOUT: Duration = Duration::from_secs(600);

/// How often it is looked whether they took longer.
pub const ORDER_CHECK_INTERVAL: Duration = Duration::from_secs(30);

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

/// How often it is looked whether files of certificates, users, rules and settings have changed: soon enough for whoever takes a right
/// away, and a few calls of the system for each.
pub const RELOAD_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// How often the drop directory is looked at.
pub const DROP_POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Policies in it that are looked at.
pub const DROP_FILES_MAX: usize = 64;

/// What stands beside a policy there: a line with its name, its version and its digest, or why it was refused.
pub const DROP_STATUS_BYTES_MAX: u64 = 4 << 10;

/// Entries of it that are looked at, whatever their names.
pub const DROP_ENTRIES_MAX: usize = 4096;

/// Writes that one request may stage: policies that keep books beside the key need a few.
pub const STAGED_WRITES_MAX: usize = 64;

/// What these weigh together: the longest values twice over. With the request itself and its answer, of half as much
/// each, their record stays well below what the journal takes.
pub const STAGED_BYTES_MAX: u64 = 32 << 20;

/// Watch changes that one request may stage.
pub const STAGED_WATCHES_MAX: usize = 64;

/// Head of a reply or notification: a page of SCAN lies in it whole.
pub const REPLY_HEAD_BYTES_MAX: usize = 1 << 20;

/// Name and version in a policy's description: they go on every log line.
pub const POLICY_NAME_BYTES_MAX: usize = 64;

/// Commands in a policy's description: each becomes a metric.
pub const POLICY_COMMANDS_MAX: usize = 64;

/// Keys of one page that a policy asks for.
pub const PAGE_KEYS_MAX: u32 = 1024;

/// Bytes of the keys of one page, beyond its first: what a guest must hold at once.
pub const PAGE_BYTES_MAX: usize = 64 << 10;

/// Keys looked at for one page: hidden and expired ones are passed over, and a page may be empty.
pub const PAGE_KEYS_EXAMINED_MAX: usize = 4096;

/// Bytes that a policy may draw at once from the seeded generator.
pub const RANDOM_BYTES_MAX: u32 = 1024;

/// A log line of a policy; the rest is cut.
pub const GUEST_LOG_BYTES_MAX: usize = 1024;

/// Log lines by and about a policy in one second; the rest is counted.
pub const GUEST_LOG_LINES_PER_SECOND_MAX: u32 = 20;

/// Distinct counters that a policy may name.
pub const GUEST_COUNTERS_MAX: usize = 256;

/// Default bound of watches of one connection (`max_client_watches`). The official clients hold one per observed key.
pub const WATCHES_PER_CONNECTION_MAX_DEFAULT: u64 = 10_000;

/// Default bound of watches of all connections (`max_watches`).
pub const WATCHES_MAX_DEFAULT: u64 = 1_000_000;

/// What a watch costs besides its key: the two indexes that hold it, rounded up.
pub const WATCH_OVERHEAD_BYTES: usize = 256;

/// What of all queues, subscriptions and watches one client may take by default, as a part: little memory is not taken by two
/// or three, and half of the queues still holds what comes for four clients that are away.
pub const CLIENT_PARTS_OF_TOTAL: usize = 8;

/// Watches of one connection in bytes: all it may have, with keys of 500 bytes. Watched keys need
/// not exist, so no other quota sees them. Where memory is little it is less, see [`CLIENT_PARTS_OF_TOTAL`].
pub const WATCH_BYTES_PER_CONNECTION_MAX: usize = 8 << 20;

/// Watches of all connections in bytes: never more than a sixteenth of the memory either.
pub const WATCH_BYTES_MAX: u64 = 512 << 20;

/// Keys that one step removes in a sweep: it holds the store's lock, and the next step follows at once.
pub const SWEEP_KEYS_PER_STEP_MAX: usize = 256;

/// The longest a sweep waits before it looks again, so that a stepped wall clock cannot leave keys lying.
pub const SWEEP_SLEEP_MAX: Duration = Duration::from_millis(50);

/// What an entry counts against `max_bytes` besides its key, value and fence's node: its version and expiry, what the
/// allocator rounds up, its slot, and its places in the index, in the order and among those that expire.
pub const ENTRY_OVERHEAD_BYTES: u64 = 128;

/// The longest packet that can be configured: its payload and what a policy makes of it have to fit
/// into the policy's memory.
pub const PACKET_BYTES_MAX_MAX: usize = GUEST_MEMORY_BYTES_MAX / 2;

/// What an answer or notification adds to a value in a client's queue: topic, properties, overhead.
pub const ENVELOPE_BYTES: u64 = 4096;

/// Answers that may wait for delivery while a batch of requests runs. One small request can ask for
/// the longest value, and a batch has hundreds.
pub const BATCH_REPLY_BYTES_MAX: usize = 4 << 20;

/// How long a stopping host waits for clients to take what is theirs. SIGTERM to exit is at most two seconds.
pub const SHUTDOWN_GRACE: Duration = Duration::from_millis(1000);

/// How long it then waits for calls of the administration: long enough to answer one that was about to, while a compiler
/// goes on for seconds.
pub const SHUTDOWN_BLOCKING_GRACE: Duration = Duration::from_millis(200);

/// Default bound of requests that a foreign broker may have sent and not seen acknowledged (`broker_window`): twice
/// what fills Mosquitto's own default, and 128 MiB of the longest packets.
pub const BROKER_WINDOW_DEFAULT: u16 = 64;

/// What `broker_window` may be raised to: a gateway has no memory for more of the longest packets.
pub const BROKER_WINDOW_MAX: u16 = 4096;

/// Default of `broker_keep_alive`: a connection that went half open is given up after twice this.
pub const BROKER_KEEP_ALIVE_MS_DEFAULT: u64 = 15_000;

/// How long a foreign broker keeps the store's session, with the requests that come meanwhile, while the store is away:
/// a day covers a reboot and a repair. Requests that carry an expiry end sooner.
pub const BROKER_SESSION_EXPIRY: Duration = Duration::from_secs(86_400);

/// The same where nobody will have the client id again, since it is kept nowhere: a lost connection comes back within this,
/// and what a run leaves behind takes requests for no longer.
pub const BROKER_SESSION_EXPIRY_UNKEPT: Duration = Duration::from_secs(300);

/// How long a connection to a foreign broker may take, from TCP to CONNACK.
pub const BROKER_CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// First and longest pause between attempts to connect to a foreign broker.
pub const BROKER_PAUSES: (Duration, Duration) =
    (Duration::from_millis(100), Duration::from_secs(5));

/// Answers and notifications on their way to a foreign broker, where it allows as many: more than fills any loopback.
pub const BROKER_IN_FLIGHT_MAX: u16 = 1024;

/// Answers and notifications that a foreign broker has not taken, above which no further request runs. Requests wait at
/// the broker then, as it gets no PUBACK for them.
pub const BROKER_OUTBOX_HOLD: usize = 16 << 10;

/// The same in bytes.
pub const BROKER_OUTBOX_BYTES_HOLD: usize = 64 << 20;

/// Notifications beyond this are lost: with [`BROKER_OUTBOX_OVERHEAD_BYTES`] some of 100 bytes for each of 800 000 watches, since
/// a single change may be told to all. Only keys that expire while the broker is away get here.
pub const BROKER_OUTBOX_BYTES_MAX: usize = 512 << 20;

/// What an answer or notification costs beside its bytes: its place in the ledger and its PUBLISH, rounded up.
pub const BROKER_OUTBOX_OVERHEAD_BYTES: usize = 512;

/// Levels of a response topic: EMQX takes 128, Mosquitto 200, and it closes the connection of who publishes to more.
pub const BROKER_TOPIC_LEVELS_MAX: usize = 128;

/// Messages that are looked at before it is looked again whether the outbox is full.
pub const BROKER_HELD_CHUNK: usize = 64;

/// Messages at QoS 0 that wait for the outbox, in bytes: the broker's Receive Maximum does not bound them. They tell of
/// clients that come and go, some hundred bytes each.
pub const BROKER_HELD_BYTES_MAX: usize = 8 << 20;

/// Answers remembered as those that the broker closes the connection for, in hashes: one for each request that can come
/// again.
pub const BROKER_HOPELESS_MAX: usize = BROKER_WINDOW_MAX as usize;

/// What a log line shows of a topic that a client chose.
pub const BROKER_LOG_TOPIC_BYTES_MAX: usize = 256;

/// The shortest between two log lines that clients can bring about at will; what is left out is counted.
pub const BROKER_LOG_PAUSE: Duration = Duration::from_secs(10);

/// How often a stopping store looks whether the broker has taken what is decided.
pub const BROKER_DRAIN_POLL: Duration = Duration::from_millis(5);

/// The store's client id at a foreign broker: what every broker takes.
pub const BROKER_CLIENT_ID_BYTES_MAX: usize = 256;

/// A file with a password: MQTT carries 65 535 bytes of one.
pub const BROKER_PASSWORD_BYTES_MAX: u64 = 65_535;

/// A line of a broker's connection log. Mosquitto 2.0 cuts at 1000 bytes and 1.6 may cut at some more than 500, and
/// what was cut is not to be believed.
pub const PRESENCE_LINE_BYTES_MAX: usize = 500;

/// An event of a broker about one client: some 300 bytes besides its client id and user name.
pub const PRESENCE_EVENT_BYTES_MAX: usize = 4 << 10;

/// Clients of which it is remembered when their connection began: 3 MiB, and more than a gateway's broker serves.
pub const PRESENCE_CLIENTS_MAX: usize = 1 << 16;

/// How long a start waits for the broker to tell of a client. Mosquitto does it in a few milliseconds.
pub const PRESENCE_EVIDENCE_WAIT: Duration = Duration::from_secs(2);

/// How often within `watch_ttl` it is looked who was silent: watches live an eighth longer at most.
pub const WATCH_TTL_CHECKS: u32 = 8;

/// The longest time between these looks. One takes the store's lock for a walk over all who watch.
pub const WATCH_TTL_CHECK_MAX: Duration = Duration::from_secs(60);

/// How long a user stays disabled that was kicked: long enough that a client which breaks a rule with every request
/// is no load, short enough for an operator who looks.
pub const KICK_TIME: Duration = Duration::from_secs(5);

/// When a user is enabled once more, where the broker did not answer the first time.
pub const KICK_RETRY: Duration = Duration::from_secs(60);

/// Connected clients whose user names are known: 8 MiB, since both stood in one line of the connection log.
pub const KICK_CLIENTS_MAX: usize = 1 << 14;

/// Users that are disabled at once.
pub const KICKED_USERS_MAX: usize = 256;

/// The file with their names: each has 500 bytes at most, and JSON may need six for one.
pub const KICKED_FILE_BYTES_MAX: u64 = 1 << 20;

/// How long Mosquitto's dynamic security may take to say that it is there. It does so in a few milliseconds.
pub const KICK_ANSWER_WAIT: Duration = Duration::from_secs(2);

/// An answer of Mosquitto's dynamic security to an order of the store's; lists for others are longer.
pub const KICK_ANSWER_BYTES_MAX: usize = 16 << 10;

/// A configuration file.
pub const CONFIG_FILE_BYTES_MAX: u64 = 1 << 20;

/// Keys, calls or properties that are recorded of one request so that it can run again. Policies look at a
/// few; the answer to one that looks at more is kept instead.
pub const EVIDENCE_READS_MAX: usize = 64;

/// What a request saw, in bytes: beyond it its answer is kept instead, which is nearly always smaller.
pub const EVIDENCE_BYTES_MAX: u64 = 16 << 10;

/// A page of keys that is recorded so that its request can run again.
pub const EVIDENCE_PAGE_BYTES_MAX: usize = 4 << 10;

/// Answers up to this are kept with the record of their request, as a check of running it again. Those of
/// the published commands that change anything have at most some ten bytes.
pub const OUTCOME_INLINE_BYTES_MAX: usize = 256;

/// What a remembered request costs besides what it saw and was answered: itself and its places in two indexes, with the
/// room that these keep to grow.
pub const REMEMBERED_OVERHEAD_BYTES: u64 = 256;

/// The shortest that a request is remembered: longer than any client waits before it sends again.
pub const DUPLICATE_WINDOW_MS_MIN: u64 = 60_000;

/// Default bound of how long a request is remembered (`duplicate_window`).
pub const DUPLICATE_WINDOW_MS_DEFAULT: u64 = 10 * 60_000;

/// Default bound of remembered requests beyond the last ones of live sessions (`max_duplicates`).
pub const DUPLICATES_MAX_DEFAULT: u64 = 100_000;

/// Default bound of remembered requests in bytes (`max_duplicate_bytes`). The last ones of live sessions may
/// take as much again. By default never more than a thirty-second of the memory either.
pub const DUPLICATE_BYTES_MAX_DEFAULT: u64 = 64 << 20;

/// Default bound of the age of history (`history_retention`): long enough to look into what happened overnight.
pub const HISTORY_MS_DEFAULT: u64 = 86_400_000;

/// Default bound of the bytes of history (`history_bytes`): a quarter of a small gateway's data partition.
pub const HISTORY_BYTES_DEFAULT: u64 = 256 << 20;

/// Ends of keys that a start behind a foreign broker tells of again, since nobody knows whether the run before did: more
/// than expire while the broker takes a message.
pub const ENDS_TOLD_AGAIN_MAX: usize = 1024;

/// How long ago they may have been: whoever waited for longer, such as for a lock, has looked by itself.
pub const ENDS_TOLD_AGAIN_MS_MAX: u64 = 10 * 60_000;

/// How often a standby looks whether the data directory is free: unnoticed by clients, and by an idle machine.
pub const STANDBY_POLL: Duration = Duration::from_millis(100);

/// How far the system clock may be behind the last recorded time at a start without anybody being asked.
pub const CLOCK_BEHIND_MS_MAX: u64 = 60_000;

/// A piece of a snapshot: the store's lock is held while one is made, so that requests wait for some tens of
/// microseconds at most.
pub const SNAPSHOT_PIECE_BYTES: usize = 64 << 10;

/// Entries of one piece, for small ones.
pub const SNAPSHOT_PIECE_ENTRIES: usize = 512;

/// Arguments of a request that are shown to a person.
pub const REQUEST_WORDS_SHOWN_MAX: usize = 16;

/// A value as `history` and `replay` show it; `get --as-of` gives the whole.
pub const VALUE_SHOWN_BYTES_MAX: usize = 4 << 10;

/// Names of commands in the summary of a replay. Clients choose them; what is beyond counts as others.
pub const REPLAY_COMMANDS_MAX: usize = 64;

/// Policies that a replay holds ready at once: compiling one again costs less than holding all that ever answered.
pub const REPLAY_POLICIES_MAX: usize = 8;

/// Blocks of a backup on their way from its file into a data directory.
pub const RESTORE_BLOCKS_MAX: usize = 4;

/// How often a checkup looks again at what seems damaged, since a server may just be writing it.
pub const CHECKUP_ATTEMPTS_MAX: u32 = 5;

/// How long it waits before that: a frame is written in far less.
pub const CHECKUP_RETRY_MS: u64 = 50;

/// How far a transcript's clock runs on by itself to the end of a key that somebody is to be told of: as long as
/// the tests over sockets wait for a message.
pub const TRANSCRIPT_WAIT_MS_MAX: u64 = 10_000;

/// A transcript: far more than a person reads.
pub const TRANSCRIPT_BYTES_MAX: u64 = 16 << 20;

/// Default bound of keys (`max_keys`).
pub const KEYS_MAX_DEFAULT: u64 = 10_000_000;

/// Keys that there are never more of, whatever is configured: the table numbers them in four bytes.
pub const KEYS_MAX_MAX: u64 = u32::MAX as u64;

/// Default bound of all keys and values with their overhead (`max_bytes`): most of a small gateway's memory, and by
/// default never more than three eighths of what there is. With queues (an eighth), subscriptions, watches, large packets that
/// are not whole and remembered requests (a sixteenth each) that is three quarters of it; some megabytes of retained messages
/// and CONNECTs, and what each connection may have in any case, come on top.
pub const BYTES_MAX_DEFAULT: u64 = 512 << 20;

/// The keys of one client may by default be all but one of so many parts of a store (`max_client_keys`, `max_client_bytes`): a
/// store with one writer is hardly bound by that, and whoever fills his part leaves a quarter to all others.
pub const PARTS_WITH_ONE_FOR_OTHERS: u64 = 4;

/// What a client that owns keys counts against `max_bytes` besides its id: its sums, the room that their table keeps to grow, a
/// place in the index, and what the allocator takes for the id.
pub const OWNER_OVERHEAD_BYTES: u64 = 96;

/// Tables that the index of owners is divided into, for the reason that [`INDEX_PARTS`] has. There are far fewer owners than keys,
/// but for somebody who writes each key by another client id.
pub const OWNER_INDEX_PARTS: usize = 64;

/// Default bound of a key (`max_key_bytes`): a watchable one, in hex within a topic, is at most half
/// of MQTT's 65 535 bytes.
pub const KEY_BYTES_MAX_DEFAULT: u64 = 32 << 10;

/// What `max_key_bytes` may be raised to. Above twice this, matching a pattern against one page of
/// such keys would use up the fuel of a SCAN.
pub const KEY_BYTES_MAX_MAX: u64 = 65_535;

/// Slots in a run of the order of keys: putting one in the middle moves two kilobytes, and of ten million keys there are
/// some thirty thousand runs.
pub const RUN_SLOTS_MAX: usize = 512;

/// Tables that the index of keys is divided into. One of ten million keys that grows moves the places of them all, while every
/// request waits; a part of it some ten thousands. Each costs 32 bytes while it is empty.
pub const INDEX_PARTS: usize = 1024;

/// Default bound of a value (`max_value_bytes`).
pub const VALUE_BYTES_MAX_DEFAULT: u64 = 1 << 20;

/// Threads that serve clients (`threads`): more than one lock can keep busy.
pub const SERVE_THREADS_MAX: usize = 64;

/// Of these by default half of the cores, since journal, policies and other programs want some, and no more than this: every
/// request passes one lock, and a second thread on two cores costs a third of the requests by waiting for it.
pub const SERVE_THREADS_DEFAULT_MAX: usize = 4;

/// Connections of a load (`statehouse bench`), and as many of its watchers: what a store takes by default.
pub const LOAD_CONNECTIONS_MAX: usize = 10_000;

/// Requests of a load in flight over all its connections: what is remembered of each makes some hundred megabytes.
pub const LOAD_IN_FLIGHT_MAX: usize = 1_000_000;

/// Keys of a load: those of the largest store and some.
pub const LOAD_KEYS_MAX: u64 = 100_000_000;

/// Requests per second of a load: more than loopback carries.
pub const LOAD_RATE_MAX: u64 = 10_000_000;

/// Threads of a load.
pub const LOAD_THREADS_MAX: usize = 64;

/// Threads of a load by itself: half of the cores, since the server needs some, and no more than it takes to keep the
/// largest server busy.
pub const LOAD_THREADS_DEFAULT_MAX: usize = 8;

/// The longest load.
pub const LOAD_DURATION_MAX: Duration = Duration::from_secs(86_400);

/// The shortest: enough answers for a p99.
pub const LOAD_DURATION_MIN: Duration = Duration::from_millis(100);

/// Runs of a sweep.
pub const LOAD_SWEEP_MAX: usize = 64;

/// Encoded requests that wait for the socket of one connection, in bytes: what one write takes. Above, no further ones are
/// encoded.
pub const LOAD_OUTPUT_BYTES_HIGH: usize = 256 << 10;

/// Bytes asked of a socket in one read, at least: a batch of short answers.
pub const LOAD_READ_BYTES: usize = 8 << 10;

/// What a packet holds besides a value, at most.
pub const LOAD_ENVELOPE_BYTES: usize = 64 << 10;

/// Keep alive of a load's connections in seconds: only watchers are ever silent.
pub const LOAD_KEEP_ALIVE_S: u16 = 60;

/// How often a connection looks whether an answer is overdue, the run is over, or a sign of life is due.
pub const LOAD_TICK: Duration = Duration::from_millis(100);

/// How far ahead the first request is planned, so that all connections have begun by then.
pub const LOAD_START: Duration = Duration::from_millis(20);

/// The shortest latency that is told from none, in nanoseconds: a hundredth of what a socket takes.
pub const LOAD_LATENCY_NS_MIN: u64 = 100;

/// The longest, in nanoseconds: what took longer counts as this.
pub const LOAD_LATENCY_NS_MAX: u64 = 600_000_000_000;

/// Kinds of errors that are told apart.
pub const LOAD_ERROR_KINDS_MAX: usize = 16;

/// The users file: some hundred bytes for each user.
pub const USERS_FILE_BYTES_MAX: u64 = 4 << 20;

/// Users in it. Each has an entry in memory; more devices than this share a user, or have certificates.
pub const USERS_MAX: usize = 10_000;

/// A user name, which is a person's or a device's.
pub const USER_NAME_BYTES_MAX: usize = 256;

/// A password. Longer ones are no safer, and hashing them is work that anybody could ask for.
pub const PASSWORD_BYTES_MAX: usize = 1024;

/// What hashing a new password takes, as OWASP recommends for Argon2id: so much memory, so often filled, by one thread. Two
/// at once fit a gateway of 256 MB.
pub const PASSWORD_MEMORY_KIB: u32 = 19 << 10;

/// See [`PASSWORD_MEMORY_KIB`].
pub const PASSWORD_PASSES: u32 = 2;

/// See [`PASSWORD_MEMORY_KIB`].
pub const PASSWORD_LANES: u32 = 1;

/// The same of a hash that was made elsewhere: what a gateway can afford for somebody who is not even known.
pub const PASSWORD_MEMORY_KIB_MAX: u32 = 64 << 10;

/// See [`PASSWORD_MEMORY_KIB_MAX`].
pub const PASSWORD_PASSES_MAX: u32 = 10;

/// See [`PASSWORD_MEMORY_KIB_MAX`].
pub const PASSWORD_LANES_MAX: u32 = 4;

/// Blocks of a KiB that are reserved for checking a password: more than 32 MiB, which glibc gives back to the system at once,
/// while it keeps smaller ones for each thread that ever had one.
pub const PASSWORD_BLOCKS_MIN: usize = 33 << 10;

/// Passwords that are checked at once, if there are as many processors: each takes the memory above, and requests of those who
/// are connected need processors too.
pub const PASSWORD_CHECKS_AT_ONCE_MAX: usize = 2;

/// Wrong passwords from one address, or checks that wait, before it has to wait for [`LOGIN_INTERVAL`]. Somebody at another
/// address waits behind these: half a second. Devices behind one address that come back together are let in as fast as their
/// passwords are checked, if they try again.
pub const LOGIN_BURST: u32 = 16;

/// The same for one user, from all addresses: more, so that a guesser has to use several to keep somebody out who was not
/// connected before.
pub const LOGIN_BURST_USER: u32 = 128;

/// After which one more may be wrong: 86 400 guesses a day find no password that is worth the name.
pub const LOGIN_INTERVAL: Duration = Duration::from_secs(1);

/// The file that gives certificates their owners: some hundred bytes for each.
pub const CERTIFICATE_USERS_FILE_BYTES_MAX: u64 = 4 << 20;

/// A certificate, as far as its subject is looked for: ordinary ones have one or two thousand bytes.
pub const CERTIFICATE_BYTES_MAX: usize = 64 << 10;

/// Certificates above a client's own that may give it attributes: chains have two or three.
pub const CERTIFICATE_CHAIN_MAX: usize = 8;

/// Log lines about refusals of one kind (of what, by whom, to strangers or not) in a second: enough to see who is there, and a flood of refusals is not one of log lines.
pub const AUDIT_LINES_PER_SECOND_MAX: u32 = 10;

/// Log lines that wait for whoever reads stderr, in bytes; as many may be on their way out. At one line of 250 bytes for each
/// request that is a tenth of a second of a busy store.
pub const LOG_QUEUE_BYTES_MAX: usize = 1 << 20;

/// How long an end waits for log lines to be read.
pub const LOG_FLUSH_WAIT: Duration = Duration::from_millis(500);

/// The pause before stderr is tried again, where another process made it one that does not wait.
pub const LOG_RETRY_PAUSE: Duration = Duration::from_millis(10);

/// The file with the keys of whoever signs tokens: a key takes some hundred bytes.
pub const TOKEN_KEYS_FILE_BYTES_MAX: u64 = 256 << 10;

/// Keys in it: a cluster has one or two at a time.
pub const TOKEN_KEYS_MAX: usize = 64;

/// A token: those of Kubernetes have one or two thousand bytes.
pub const TOKEN_BYTES_MAX: usize = 16 << 10;

/// How far the clock of whoever makes tokens may be ahead of ours. No token is good after its end because of it.
pub const TOKEN_LEEWAY_S: u64 = 60;

/// The longest that a token lets its bearer stay: a year, as Kubernetes has it at most.
pub const TOKEN_LIFE_S_MAX: u64 = 366 * 24 * 3600;

/// Rules of one file. A client is compared with those that do not name it by its id or user name at each connection.
pub const RULES_MAX: usize = 10_000;

/// A file of rules: some hundred bytes for each, with room for long lists of keys.
pub const RULES_FILE_BYTES_MAX: u64 = 8 << 20;

/// A pattern of a rule, with what is put into it.
pub const RULE_PATTERN_BYTES_MAX: usize = 1024;

/// What of a pattern stands between its first `*` and its last, since it may be tried at every byte of a key: with the
/// longest key some milliseconds.
pub const RULE_FLOATING_BYTES_MAX: usize = 64;

/// Levels of a topic in a rule, which are also those of a topic name that are compared.
pub const RULE_TOPIC_LEVELS_MAX: usize = 128;

/// Clients that ask to be let in, of which it is kept what they may do until they are: as many as connect at once.
pub const GRANTS_ARRIVING_MAX: usize = 64;

/// Clients of a foreign broker of which it is kept what they may do. They may claim another id with each request; then all is
/// worked out again.
pub const GRANTS_CLAIMED_MAX: usize = 4096;

/// The longest id of these: with the two above some megabytes.
pub const GRANTS_CLAIMED_CLIENT_BYTES_MAX: usize = 256;

/// Of a topic or a key that was refused, what a log line shows.
pub const NO_RULE_SHOWN_BYTES: usize = 128;

/// The id of a request in the log: those of the official clients have 16 bytes.
pub const REQUEST_LINE_ID_BYTES_MAX: usize = 32;

/// The text of its error there.
pub const REQUEST_LINE_ERROR_BYTES_MAX: usize = 256;

/// A client id or user name in such a line, before it is escaped.
pub const AUDIT_NAME_BYTES_MAX: usize = 256;
