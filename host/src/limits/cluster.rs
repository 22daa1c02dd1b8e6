//! Limits of a host in a cluster.

use std::time::Duration;

/// The largest difference between the clock of a host and the time of the log, in milliseconds.
/// Locks would end this much too early or too late if the host led.
pub const CLUSTER_CLOCK_OFFSET_MS_MAX: u64 = 1_000;

/// How long a stopping leader waits until its log is handed over: a few round trips to etcd. After
/// that, other hosts wait for its lease.
pub const CLUSTER_HANDOVER_WAIT: Duration = Duration::from_secs(2);

/// How often a starting host asks an etcd that does not answer, and a follower asks for the policies
/// that it lacks.
pub const CLUSTER_START_RETRY: Duration = Duration::from_secs(1);

/// How long the log may take to decide a write before the leader counts as cut off from it. An
/// election in etcd takes longer, but then no other host reaches the log either.
pub const CLUSTER_UNDECIDED_MAX: Duration = Duration::from_millis(1_500);

/// How often followers ask a leader for a sign of life that writes nothing. Each time costs some
/// writes to etcd. The links between the hosts detect a dead leader much sooner.
pub const CLUSTER_QUIET: Duration = Duration::from_secs(600);

/// How long the clients of a leader that hands over or was replaced get to receive what was
/// released. The next leader cannot answer them before the end.
pub const CLUSTER_LEAVING_GRACE: Duration = Duration::from_millis(200);
