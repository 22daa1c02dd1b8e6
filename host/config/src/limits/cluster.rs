//! Limits of a host in a cluster.

use std::time::Duration;

/// The largest difference between the clock of a host and the time of the log, in milliseconds.
/// Locks would end this much too early or too late if the host led.
pub const CLUSTER_CLOCK_OFFSET_MS_MAX: u64 = 1_000;

/// How long a stopping leader waits until its log is handed over: a few round trips to etcd. After
/// that, other hosts wait for its lease.
pub const CLUSTER_HANDOVER_WAIT: Duration = Duration::from_secs(2);

/// How often a starting host asks an etcd that does not answer, and a follower asks for the
/// policies that it lacks.
pub const CLUSTER_START_RETRY: Duration = Duration::from_secs(1);

/// How long a host waits at most before it tries again a policy of the log that it could not save or
/// load. The first attempts follow after [`CLUSTER_START_RETRY`], and each wait is twice as long.
pub const CLUSTER_POLICY_RETRY_MAX: Duration = Duration::from_secs(60);

/// How long the log may take to decide a write before the leader counts as cut off from it. An
/// election in etcd takes longer, but then no other host reaches the log either.
pub const CLUSTER_UNDECIDED_MAX: Duration = Duration::from_millis(1_500);

/// How often followers ask a leader for a sign of life that writes nothing. Each time costs some
/// writes to etcd. The links between the hosts detect a dead leader much sooner.
pub const CLUSTER_QUIET: Duration = Duration::from_secs(600);

/// How long the clients of a leader that hands over or was replaced get to receive what was
/// released. The next leader cannot answer them before the end.
pub const CLUSTER_LEAVING_GRACE: Duration = Duration::from_millis(200);

/// How long a record of the history of a host may be unsynced. The log of the cluster has it too.
pub const CLUSTER_HISTORY_SYNC: Duration = Duration::from_secs(1);

/// How often the history removes what is too old, and marks its end, while little happens.
pub const CLUSTER_HISTORY_IDLE: Duration = Duration::from_secs(60);

/// Bytes of records behind the mark of the history. After a kill they are read again.
pub const CLUSTER_HISTORY_UNMARKED_BYTES_MAX: u64 = 8 << 20;

/// How long a host that stops waits for the disk of its history.
pub const CLUSTER_HISTORY_CLOSE: Duration = Duration::from_secs(5);
