//! Limits of authentication, authorization and the audit log: users, passwords, certificates,
//! tokens and rules.

use std::time::Duration;

/// Bytes of the users file: a user takes some hundred bytes.
pub const USERS_FILE_BYTES_MAX: u64 = 4 << 20;

/// Users of the users file. Each has an entry in memory. More devices than this must share a user
/// or use certificates.
pub const USERS_MAX: usize = 10_000;

/// Bytes of a user name, which names a person or a device.
pub const USER_NAME_BYTES_MAX: usize = 256;

/// Bytes of a password. Longer ones are no safer, and any client could make the store hash them.
pub const PASSWORD_BYTES_MAX: usize = 1024;

/// Memory of an Argon2id hash of a new password, with the passes and lanes that OWASP recommends
/// for it. Two hashes at once fit a gateway of 256 MB.
pub const PASSWORD_MEMORY_KIB: u32 = 19 << 10;

/// Passes over the memory; see [`PASSWORD_MEMORY_KIB`].
pub const PASSWORD_PASSES: u32 = 2;

/// Parallel lanes; see [`PASSWORD_MEMORY_KIB`].
pub const PASSWORD_LANES: u32 = 1;

/// Memory of a hash that was made elsewhere. This and the next two limits are the cost that a
/// gateway can afford for an unauthenticated client.
pub const PASSWORD_MEMORY_KIB_MAX: u32 = 64 << 10;

/// Passes of a hash that was made elsewhere; see [`PASSWORD_MEMORY_KIB_MAX`].
pub const PASSWORD_PASSES_MAX: u32 = 10;

/// Lanes of a hash that was made elsewhere; see [`PASSWORD_MEMORY_KIB_MAX`].
pub const PASSWORD_LANES_MAX: u32 = 4;

/// Blocks of 1 KiB that are reserved for checking a password. This is more than 32 MiB, because
/// glibc returns such an allocation to the system at once, and caches smaller ones for each thread
/// that ever had one.
pub const PASSWORD_BLOCKS_MIN: usize = 33 << 10;

/// Passwords that are checked at once, if there are as many processors. Each check takes the memory
/// above, and requests of connected clients need processors too.
pub const PASSWORD_CHECKS_AT_ONCE_MAX: usize = 2;

/// Wrong passwords and pending checks of one address. Further ones are refused, except one after
/// each [`LOGIN_INTERVAL`]. A client at another address waits half a second for these checks.
/// Devices behind one address that reconnect together are admitted as fast as their passwords are
/// checked, if they retry.
pub const LOGIN_BURST: u32 = 16;

/// Like [`LOGIN_BURST`], for one user from all addresses. It is larger, so that a guesser needs
/// several addresses to lock out a user who has not connected before.
pub const LOGIN_BURST_USER: u32 = 128;

/// Like [`LOGIN_BURST_USER`], for a user whose password is remembered: wrong guesses from addresses
/// where the user has not logged in. Comparing a guess with the remembered password takes
/// microseconds, so the limit can be far above the flood that locks out a user otherwise.
pub const LOGIN_BURST_REMEMBERED: u32 = 4096;

/// Pairs of a user and an address of its logins that are remembered, 32 KiB together. A pair that
/// is forgotten, for example because another pair has replaced it, is subject to
/// [`LOGIN_BURST_REMEMBERED`].
pub const KNOWN_LOGINS_MAX: usize = 4096;

/// Time after which one more wrong password is allowed. 86 400 guesses a day do not find a strong
/// password.
pub const LOGIN_INTERVAL: Duration = Duration::from_secs(1);

/// Bytes of the file that maps certificates to users: an entry takes some hundred bytes.
pub const CERTIFICATE_USERS_FILE_BYTES_MAX: u64 = 4 << 20;

/// Bytes of a certificate whose subject is read. Ordinary ones have one or two thousand bytes.
pub const CERTIFICATE_BYTES_MAX: usize = 64 << 10;

/// Certificates above a client's own certificate that may give it attributes. Chains have two or
/// three.
pub const CERTIFICATE_CHAIN_MAX: usize = 8;

/// Bytes of the file with the public keys of token issuers: a key takes some hundred bytes.
pub const TOKEN_KEYS_FILE_BYTES_MAX: u64 = 256 << 10;

/// Keys of that file: a cluster has one or two at a time.
pub const TOKEN_KEYS_MAX: usize = 64;

/// Bytes of a token: those of Kubernetes have one or two thousand.
pub const TOKEN_BYTES_MAX: usize = 16 << 10;

/// How far the clock of a token issuer may be ahead of the store's clock. Applies to the start of a
/// token's validity only, never to its end.
pub const TOKEN_LEEWAY_S: u64 = 60;

/// The longest connection that a token permits: a year, which is the maximum of Kubernetes.
pub const TOKEN_LIFE_S_MAX: u64 = 366 * 24 * 3600;

/// Rules of one file. Each connecting client is compared with all rules that apply to attributes,
/// to every client or to every user.
pub const RULES_MAX: usize = 10_000;

/// Bytes of a rules file: a rule takes some hundred bytes, and some rules have long lists of keys.
pub const RULES_FILE_BYTES_MAX: u64 = 8 << 20;

/// Bytes of a pattern of a rule, including the values of its placeholders.
pub const RULE_PATTERN_BYTES_MAX: usize = 1024;

/// Bytes of a pattern between its first `*` and its last. This part may be tried at every byte of a
/// key, which takes some milliseconds for the longest key.
pub const RULE_FLOATING_BYTES_MAX: usize = 64;

/// Levels of a topic in a rule. No more levels of a topic name are compared.
pub const RULE_TOPIC_LEVELS_MAX: usize = 128;

/// Connecting clients whose grants are cached before they have a session. Enough for the clients
/// that connect at the same moment.
pub const GRANTS_CONNECTING_MAX: usize = 64;

/// Clients of a foreign broker whose grants are cached. A client that claims another id with each
/// request defeats the cache, and its grants are evaluated for each request.
pub const GRANTS_FOREIGN_MAX: usize = 4096;

/// Longest id of a client of a foreign broker whose grants are cached. With the two limits above,
/// the cache takes some megabytes.
pub const GRANTS_FOREIGN_CLIENT_BYTES_MAX: usize = 256;

/// Log lines about refusals of one kind per second. A kind is the action, the component that
/// refused it, and whether the client is authenticated. Enough to identify clients, while a flood
/// of refusals does not flood the log.
pub const AUDIT_LINES_PER_SECOND_MAX: u32 = 10;

/// Bytes of a refused topic or key that a log line shows.
pub const NO_RULE_SHOWN_BYTES: usize = 128;

/// Bytes of a client id or user name in such a line, before escaping.
pub const AUDIT_NAME_BYTES_MAX: usize = 256;
