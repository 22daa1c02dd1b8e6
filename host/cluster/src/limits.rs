//! Every limit of the replicated log, with its unit in the name and its reason.

use std::time::Duration;

/// Largest encoded head. Every transaction writes the head, and every watcher receives it.
pub const HEAD_BYTES_MAX: usize = 512;

/// Longest lease. A takeover from a host that died takes longer than a lease.
pub const LEASE_MAX: Duration = Duration::from_secs(60);

/// Longest name of a host: a DNS label, so that a host name fits.
pub const HOST_NAME_BYTES_MAX: usize = 63;

/// Longest address of a host: a DNS name of 120 bytes with a port, so that the head fits its limit.
pub const ADDRESS_BYTES_MAX: usize = 127;

/// Longest name of a cluster. It is a part of every key.
pub const CLUSTER_NAME_BYTES_MAX: usize = 63;

/// Default size up to which waiting records are combined into one frame. Larger frames add latency
/// but hardly any throughput, and etcd keeps recent transactions in memory by count.
pub const FRAME_BYTES: usize = 128 << 10;

/// Default size of a part of a long group. With a piece of a snapshot it needs 8 Mbit/s to reach
/// etcd within [`crate::Timing::attempt`]. An attempt that is given up has sent its bytes in vain,
/// so below that rate a leader would repeat a transaction without end.
pub const PART_BYTES: usize = 256 << 10;

/// Largest body of a frame. The frame, the head and a piece of a snapshot must fit the largest
/// request of etcd (1.5 MiB). Earlier versions wrote parts of this size.
pub const FRAME_BODY_BYTES_MAX: usize = 1 << 20;

/// Largest group of records that one call appends, with 4 bytes per record. It is the limit of the
/// write-ahead log on disk too, because a group must fit either log.
pub const GROUP_BYTES_MAX: usize = 96 << 20;

/// Records in one frame. This is far more than fit usefully, and bounds the loop of a reader.
pub const FRAME_RECORDS_MAX: u32 = 1 << 24;

/// Undecided bytes above which the log is behind and clients that write must wait, as in the
/// write-ahead log on disk.
pub const WAITING_BYTES_MAX: usize = 16 << 20;

/// Default and largest piece of a snapshot. It shares a transaction with a frame.
pub const PIECE_BYTES_MAX: usize = 128 << 10;

/// Pieces of one snapshot: 8 GiB, the largest advised size of an etcd database.
pub const SNAPSHOT_PIECES_MAX: u32 = 1 << 16;

/// Largest block of a snapshot. One entry with its value must fit.
pub const BLOCK_BYTES_MAX: usize = GROUP_BYTES_MAX;

/// Values in the first page of a range read. With values of 1 MiB a page fits an answer of
/// [`ANSWER_BYTES_MAX`].
pub const PAGE_VALUES_MIN: usize = 16;

/// Values in any page. A log of single small records has one value for each.
pub const PAGE_VALUES_MAX: usize = 1_024;

/// The aimed size of a page in bytes. A page that exceeds [`ANSWER_BYTES_MAX`] because its values
/// are larger than those before is read again in shorter pages.
pub const PAGE_BYTES: usize = 8 << 20;

/// Largest answer that is accepted from the engine: a full page, or a batch of events.
pub const ANSWER_BYTES_MAX: usize = 32 << 20;

/// Received events of a watch that are not yet processed. They hold at most 64 MiB, and usually
/// far less.
pub const WATCH_EVENTS_MAX: usize = 64;

/// Frames that one transaction removes. etcd blocks other requests during a transaction, and the
/// removal of a key costs some microseconds.
pub const TRUNCATED_FRAMES_MAX: u64 = 1_000;

/// Part of the quota that only removals, the end of a snapshot and fragmentation may use. Growth is
/// refused before the next snapshot would take it.
pub const RESERVE_QUOTA_PART: u64 = 8;

/// How long a snapshot may still make room after its last piece: the log before it is truncated,
/// the engine is compacted, and counts the free pages.
pub const MAKING_ROOM: Duration = Duration::from_secs(5);

/// The least quota of etcd that `cluster check` accepts without a warning. The log grows while a
/// snapshot is written, and etcd needs seconds to reuse the pages of what is removed.
pub const QUOTA_BYTES_ADVISED: u64 = 1 << 30;

/// Part of the quota, in sixteenths, below which the file must be before a host disarms the alarm
/// of an engine that was full. It is above what hosts use, so that they can continue when the keys
/// of other clients are deleted. Removals fit the rest.
pub const DISARMED_SIXTEENTHS_MAX: u64 = 15;

/// The size of the state is measured again after a log of this part of the quota: 16 MiB of 2 GiB.
pub const MEASURED_QUOTA_PART: u64 = 128;

/// How long one server of the engine has for a login. It may compute the hash of the password for
/// many clients at once.
pub const LOGIN_TIMEOUT: Duration = Duration::from_secs(60);

/// How often the certificates for a server are read again while its connection fails.
pub const CERTIFICATES_PACE: Duration = Duration::from_secs(1);

/// How long one server of the engine has to answer before it is skipped.
pub const PROBE_TIMEOUT: Duration = Duration::from_secs(2);

/// The engine is asked for its size after writes of this part of the quota: 32 MiB of 2 GiB.
pub const REPORTED_QUOTA_PART: u64 = 64;

/// The shortest time between two questions for the size of the engine. etcd commits its file, and
/// counts its pages, ten times a second.
pub const REPORT_PACE: Duration = Duration::from_millis(110);

/// Part of a value that etcd needs in addition, for the rest of its pages and for their old
/// versions. Measured: 5 to 13 % of values of 100 kB.
pub const OVERHEAD_PART: u64 = 8;

/// With little room, or while the engine does not answer, it is asked for its size so many times as
/// often.
pub const TIGHT_STATUS_DIVISOR: u32 = 10;

/// Changes of the head after a compaction while growth is refused. etcd counts freed space at the
/// write behind it, and compacts in the background, so a few are needed.
pub const COUNTING_WRITES_MAX: u32 = 10;

/// Changes of the head that only reads found, before a follower watches another endpoint.
pub const MISSED_HEADS_MAX: u32 = 3;

/// Attempts to read a frame that continues the log, before a follower stops. Each asks another
/// endpoint, so more attempts than voters find a healthy one.
pub const MISMATCHES_MAX: u32 = 8;

/// Bytes of frames that wait for the copy of the log on this host: a fifth of a second of the most
/// active leaders. The copy reads frames that were dropped from the engine.
pub const FEED_BYTES_MAX: usize = 16 << 20;

/// How long the copy of the log on this host waits after a change for further ones.
pub const COPY_PACE: Duration = Duration::from_millis(200);

/// The pause of the copy between two pages, so that a host that was away long does not occupy the
/// engine: 160 MB/s.
pub const COPY_PAGE_PACE: Duration = Duration::from_millis(50);

/// The pause of the copy after a call that the engine did not answer.
pub const COPY_RETRY: Duration = Duration::from_secs(1);

/// Attempts of a call by an operator before it is reported as failed. Each asks the next server, so
/// an election in etcd is survived, and an operator waits some seconds at most.
pub const CALL_ATTEMPTS_MAX: u32 = 12;

/// After this time no further attempt of such a call begins.
pub const CALL_TIME_MAX: Duration = Duration::from_secs(20);

/// Largest policy module in bytes: the largest file that the admin API accepts.
pub const MODULE_BYTES_MAX: u64 = 64 << 20;

/// Size of the pieces of a module. A piece must fit the largest request of etcd (1.5 MiB).
pub const MODULE_PIECE_BYTES: usize = 1 << 20;

/// Pieces of a module that one read returns: 4 MiB, which need 4 Mbit/s to arrive in time.
pub const MODULE_PAGE_PIECES_MAX: usize = 4;

/// Modules of a cluster: each loaded or retired policy of a host, and as many more.
pub const MODULES_MAX: usize = 64;

/// Bytes of all modules of a cluster: an eighth of etcd's default quota. The leader removes modules
/// that no policy needs when there are more than half of this, or of [`MODULES_MAX`].
pub const MODULES_BYTES_MAX: u64 = 256 << 20;

/// How long the leader waits for the next requests of clients that it has just answered. A
/// transaction takes 1 to 3 ms, and the timer of tokio has steps of 1 ms.
pub const GATHER: Duration = Duration::from_millis(1);

/// The leader does not wait for one of so many groups: some clients are slow.
pub const GATHER_DIVISOR: usize = 10;

/// After waits in vain, the leader waits again after so many transactions at most.
pub const GATHER_PAUSE_MAX: u32 = 64;

/// Modules that one transaction removes. Each takes two operations, and etcd allows 128 in all.
pub const REMOVED_MODULES_MAX: usize = 16;

/// Largest record of a member in bytes: its fields, texts and missing modules at their limits.
pub const MEMBER_BYTES_MAX: usize = 1536;

/// Members that are listed. Hosts of a cluster are few, but records of removed hosts remain.
pub const MEMBERS_MAX: usize = 256;

/// How often a host looks whether its record was removed or replaced.
pub const PRESENCE_PACE: Duration = Duration::from_secs(10);

/// Longest version of a program in a record of a member, in bytes.
pub const VERSION_BYTES_MAX: usize = 64;

/// Missing modules that a record of a member names. More say nothing new to an operator.
pub const MISSING_MODULES_MAX: usize = 32;

/// With little room, a snapshot is due after this part of the usual length of the log, or of the
/// quota if that is less: 4 MiB of 64.
pub const SHORT_LOG_DIVISOR: u64 = 16;

/// With little room, a snapshot is due if the log has this part of the last one. A shorter log
/// makes little room for many writes.
pub const SHORT_LOG_SNAPSHOT_DIVISOR: u64 = 4;

/// The time for which the engine keeps old versions although there is no room, so that a host that
/// joins can read them: 400 MB at 11 Mbit/s.
pub const JOIN: Duration = Duration::from_secs(300);

/// Writes that a check of the engine measures.
pub const CHECK_WRITES: usize = 10;

/// Commits with a longer median are a warning of a check. An SSD needs 2 to 10 ms.
pub const CHECK_MEDIAN: Duration = Duration::from_millis(50);

/// A longer commit is a warning of a check: a leader then repeats its transaction.
pub const CHECK_WORST: Duration = Duration::from_millis(500);

/// How long a check waits for a sign of life of the leader. One takes milliseconds, and an election
/// in the engine some seconds.
pub const CHECK_SIGN_OF_LIFE: Duration = Duration::from_secs(3);

/// How much earlier than a check assumes the leader may have read its clock, in milliseconds: a
/// commit that was under way when the check began. A longer one is a warning of the check.
pub const CHECK_CLOCK_SLACK_MS: u64 = 500;

/// Largest difference of wall clocks in milliseconds that is no warning of a check. The store
/// refuses to lead with a larger one.
pub const CLOCK_OFFSET_MS_MAX: u64 = 1_000;

/// Bytes of an engine with a quota, above which no module is stored: the rest hardly holds a
/// snapshot.
#[must_use]
pub const fn room_bytes(quota_bytes: u64) -> u64 {
    quota_bytes / 8 * 6
}
