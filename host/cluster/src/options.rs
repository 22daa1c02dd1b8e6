//! The settings of a host in a cluster.

use std::time::Duration;

use crate::head::Id;
use crate::limits;

/// The settings of a host.
#[derive(Clone, Debug)]
pub struct Options {
    /// The name of the cluster, a part of every key.
    pub cluster: String,
    /// The name of this host.
    pub host: String,
    /// The address at which other hosts reach this host.
    pub address: String,
    /// The id of this process. It must be random and new for each process, or else two processes
    /// could write the same value of the head.
    pub process: Id,
    /// The id of an earlier process of this host that has certainly ended. A takeover from it waits
    /// for no lease, if it had the same name. The lock of the data directory proves the end of the
    /// process that held it before.
    pub predecessor: Option<Id>,
    /// How reads are protected.
    pub reads: Reads,
    /// All times.
    pub timing: Timing,
    /// All sizes.
    pub sizes: Sizes,
    /// Whether the leader compacts the engine after truncation.
    pub compacts: bool,
    /// The latest format of the log that this host reads: [`crate::LOG_FORMAT`], except in tests
    /// of hosts of different versions.
    pub log_format: u16,
    /// A rule that a test breaks on purpose.
    #[cfg(any(test, feature = "simulation"))]
    pub broken: Option<Broken>,
}

/// How reads are protected against answers from a leader that was replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reads {
    /// By a lease, which depends on the rates of two clocks.
    #[default]
    Lease,
    /// By a transaction per read or group of reads, which depends on no clock.
    Confirmed,
}

/// All times, on the clock of the host.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// The length of a lease of this host.
    pub lease: Duration,
    /// The wait for an answer before the same transaction is sent to the next server. A server of
    /// etcd lets a client wait long if its leader died.
    pub attempt: Duration,
    /// The wait for a page of the log or of a snapshot: 8 MiB at 7 Mbit/s.
    pub read: Duration,
    /// How long a challenged leader must be silent before a follower campaigns.
    pub silence: Duration,
    /// How often a follower looks at the head while it suspects the leader.
    pub probe: Duration,
    /// The largest random delay of a campaign, so that candidates do not collide.
    pub delay: Duration,
    /// How often a follower reads the head while it suspects nothing, in case that its watch is
    /// broken.
    pub poll: Duration,
    /// After this time without a change of the head a follower suspects the leader. Longer than
    /// the links between hosts need, because each challenge costs the engine two writes.
    pub quiet: Duration,
    /// How long a host does not campaign after it handed over, so that others can.
    pub abstention: Duration,
    /// How long a host does not campaign after the leader named another one as its successor.
    /// Longer than a broken watch and a campaign take.
    pub precedence: Duration,
    /// How often the leader asks the engine for its size.
    pub status: Duration,
    /// The wait for the defragmentation of all servers of an engine that is full: 8 GiB at 100 MB/s
    /// on five servers.
    pub shrink: Duration,
    /// The time between two pieces of a snapshot: 128 KiB at 4 MiB/s.
    pub piece: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(2),
            attempt: Duration::from_millis(500),
            read: Duration::from_secs(10),
            silence: Duration::from_secs(1),
            probe: Duration::from_millis(200),
            delay: Duration::from_millis(200),
            poll: Duration::from_secs(2),
            quiet: Duration::from_secs(30),
            abstention: Duration::from_secs(5),
            precedence: Duration::from_secs(3),
            status: Duration::from_secs(10),
            shrink: Duration::from_secs(400),
            piece: Duration::from_millis(31),
        }
    }
}

impl Timing {
    /// How long a leader trusts a lease: 5 % less than the lease, because its clock may be slow.
    #[must_use]
    pub fn trusted(&self) -> Duration {
        self.lease * 95 / 100
    }

    /// The length of a lease in milliseconds, as the head says it.
    pub(crate) fn lease_ms(&self) -> u32 {
        self.lease
            .as_micros()
            .div_ceil(1000)
            .try_into()
            .unwrap_or(u32::MAX)
    }
}

/// All sizes.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Bytes up to which waiting groups are combined into one frame.
    pub frame_bytes: usize,
    /// The size of the parts of a long group, at most [`limits::FRAME_BODY_BYTES_MAX`].
    pub part_bytes: usize,
    /// The size of a piece of a snapshot, at most [`limits::PIECE_BYTES_MAX`].
    pub piece_bytes: usize,
    /// A snapshot is due when the log is longer than this and twice the last snapshot.
    pub snapshot_after_bytes: u64,
    /// The quota of the engine in bytes (`--quota-backend-bytes`). An engine that reports its own
    /// overrides it: etcd 3.6 and later.
    pub quota_bytes: u64,
}

impl Default for Sizes {
    fn default() -> Self {
        Self {
            frame_bytes: limits::FRAME_BYTES,
            part_bytes: limits::PART_BYTES,
            piece_bytes: limits::PIECE_BYTES_MAX,
            snapshot_after_bytes: 64 << 20,
            quota_bytes: 2 << 30,
        }
    }
}

impl Options {
    /// Default settings of a host. `process` must be new for each process ([`Id::random`]).
    #[must_use]
    pub fn new(cluster: &str, host: &str, address: &str, process: Id) -> Self {
        Self {
            cluster: cluster.to_owned(),
            host: host.to_owned(),
            address: address.to_owned(),
            process,
            predecessor: None,
            reads: Reads::default(),
            timing: Timing::default(),
            sizes: Sizes::default(),
            compacts: true,
            log_format: crate::LOG_FORMAT,
            #[cfg(any(test, feature = "simulation"))]
            broken: None,
        }
    }

    /// Checks names, times and sizes against their limits. Fails with a text for the operator.
    pub fn check(&self) -> Result<(), String> {
        check_cluster_name(&self.cluster)?;
        check_name("host", &self.host, limits::HOST_NAME_BYTES_MAX)?;
        // A head without an address names a successor.
        if self.address.is_empty() || self.address.len() > limits::ADDRESS_BYTES_MAX {
            let bytes_max = limits::ADDRESS_BYTES_MAX;
            return Err(format!(
                "the address {:?} does not have 1 to {bytes_max} bytes",
                self.address
            ));
        }
        if self.timing.lease > limits::LEASE_MAX {
            return Err(format!("the lease is longer than {:?}", limits::LEASE_MAX));
        }
        let sizes = &self.sizes;
        let body = sizes.frame_bytes.max(sizes.part_bytes);
        if body > limits::FRAME_BODY_BYTES_MAX || sizes.piece_bytes > limits::PIECE_BYTES_MAX {
            return Err("a frame or a piece would exceed the largest request of etcd".into());
        }
        if sizes.part_bytes == 0 || sizes.piece_bytes == 0 {
            return Err("a part or a piece would be empty".into());
        }
        Ok(())
    }
}

/// Checks the name of a cluster. Fails with a text for the operator.
pub fn check_cluster_name(name: &str) -> Result<(), String> {
    check_name("cluster", name, limits::CLUSTER_NAME_BYTES_MAX)
}

fn check_name(what: &str, name: &str, bytes_max: usize) -> Result<(), String> {
    let allowed = |it: u8| it.is_ascii_alphanumeric() || b"-_.".contains(&it);
    if name.is_empty() || name.len() > bytes_max || !name.bytes().all(allowed) {
        return Err(format!(
            "the name of the {what} is {name:?}: use 1 to {bytes_max} letters, digits, '-', '_' or '.'"
        ));
    }
    Ok(())
}

/// A rule that a test breaks, to prove that the simulation finds the fault.
#[cfg(any(test, feature = "simulation"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Broken {
    /// The lease counts from the answer of a transaction, not from its first sending.
    LeaseFromAnswer,
    /// A turn looks at the lease before it reads the request, not after.
    LeaseBeforeRead,
    /// A takeover waits from the last frame, not from the last change of the head.
    WaitFromLastFrame,
    /// A takeover from a leader that released or ended waits for nothing, even if that leader was
    /// still waiting for the lease of the leader before it.
    EndedLeaderNeverWaited,
    /// A repeated transaction has no condition.
    RetryWithoutCondition,
    /// A follower applies frames as they are read, without a look at their sequence and chain.
    FollowerTrustsReads,
}

/// Whether a test breaks a rule. Always false in production.
#[cfg(any(test, feature = "simulation"))]
macro_rules! broken {
    ($options:expr, $rule:ident) => {
        $options.broken == Some($crate::options::Broken::$rule)
    };
}
#[cfg(not(any(test, feature = "simulation")))]
macro_rules! broken {
    ($options:expr, $rule:ident) => {{
        let _ = &$options;
        false
    }};
}
pub(crate) use broken;
