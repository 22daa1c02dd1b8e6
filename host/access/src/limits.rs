//! Bounds of who is let in and what each may do: users, passwords, certificates, tokens, rules.

use std::time::Duration;

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

/// The same for one user whose password is remembered: wrong guesses that are compared with it in microseconds, from addresses
/// where the user has not logged in. Far more than a flood that is meant to keep a user out has to send.
pub const LOGIN_BURST_REMEMBERED: u32 = 4096;

/// Pairs of a user and an address where it has logged in that are remembered: 32 KiB. Each forgotten one, such as one that
/// another pair has replaced, is bound by [`LOGIN_BURST_REMEMBERED`].
pub const LOGIN_PLACES: usize = 4096;

/// After which one more may be wrong: 86 400 guesses a day find no password that is worth the name.
pub const LOGIN_INTERVAL: Duration = Duration::from_secs(1);

/// The file that gives certificates their owners: some hundred bytes for each.
pub const CERTIFICATE_USERS_FILE_BYTES_MAX: u64 = 4 << 20;

/// A certificate, as far as its subject is looked for: ordinary ones have one or two thousand bytes.
pub const CERTIFICATE_BYTES_MAX: usize = 64 << 10;

/// Certificates above a client's own that may give it attributes: chains have two or three.
pub const CERTIFICATE_CHAIN_MAX: usize = 8;

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

/// Log lines about refusals of one kind (of what, by whom, to strangers or not) in a second: enough to see who is there, and a flood of refusals is not one of log lines.
pub const AUDIT_LINES_PER_SECOND_MAX: u32 = 10;

/// Of a topic or a key that was refused, what a log line shows.
pub const NO_RULE_SHOWN_BYTES: usize = 128;

/// A client id or user name in such a line, before it is escaped.
pub const AUDIT_NAME_BYTES_MAX: usize = 256;
