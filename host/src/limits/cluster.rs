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
pub const CLUSTER_RETRY: Duration = Duration::from_secs(1);

/// How long the clients of a leader that was replaced get to receive what was released.
pub const CLUSTER_DEPOSED_GRACE: Duration = Duration::from_millis(100);
