//! The replicated log of a cluster: one host leads and appends, the others follow, and an existing
//! consensus engine (etcd) keeps the log. Any host may die at any moment.
//!
//! The crate knows nothing of MQTT or of the store. Records and blocks of snapshots are opaque
//! bytes; positions are [`LogPosition`].
//!
//! # Entry points
//!
//! * [`create`] and [`create_from`] create a cluster, empty or from a state, with its [`identity`];
//!   [`check_room`] says before whether the state fits.
//!   [`etcd::Etcd::check`] examines the engine at a start.
//! * [`Member::run`] joins, follows, campaigns and leads, until an error that a repetition does
//!   not heal. It calls the store through [`Embedder`].
//! * [`LeaderLog`] is the log of one leadership: [`LeaderLog::append`], [`LeaderLog::released`],
//!   [`LeaderLog::may_decide`], [`LeaderLog::hand_over`].
//! * [`LogCopy`] keeps a copy of the log on this host, for tools. It never delays the member.
//! * [`Member::suspect`] reports that the leader does not answer.
//! * [`Modules`] stores policy modules by their digest; [`LeaderLog::remove_modules`] removes them.
//! * [`overview`], [`members`] and [`check`] are for operators. No host decides anything on them.
//!   They reach the cluster by [`Access`].
//! * [`check_successor`] and [`upgrade`] are what a leader does for operators; [`Figures`] is what
//!   it counts.
//! * [`Engine`] is the interface to the engine, [`etcd`] its implementation. `simulated` (feature
//!   `simulation`) is an engine in memory with faults.
//!
//! # Keys
//!
//! ```text
//! /statehouse/NAME/0/head           the head: epoch, leader, last frame, chain, newest snapshot
//! /statehouse/NAME/0/log/SEQ        frames of records, SEQ in 16 hex digits
//! /statehouse/NAME/0/snap/ID/PIECE  pieces of snapshots
//! /statehouse/NAME/0/challenge      written by a follower that suspects the leader
//! /statehouse/NAME/0/secret         a random key that all hosts share, written at the creation
//! /statehouse/NAME/0/module/..      pieces of policy modules by digest; modules/ has their sizes
//! /statehouse/NAME/0/member/HOST    what each host says of itself, for operators
//! /statehouse/NAME/0/check          written and deleted by a check
//! ```
//!
//! # The protocol
//!
//! Everything that a leader changes is a transaction of one shape, one at a time:
//!
//! ```text
//! if head = h  then put frame, put piece, delete old frames, put head = h'
//!              else get head
//! ```
//!
//! * **Append.** A frame holds what waits, up to 128 KiB, or one group or a part of it, up to
//!   256 KiB. Without an answer within 0.5 s the leader sends the same bytes to the next server,
//!   each time from the first byte, until the transaction is decided. A failed
//!   comparison with head = h' means that an earlier attempt was applied. Any other head means
//!   that this leader was deposed. After a transaction the leader waits a moment for the next
//!   records of the clients that it has answered, so that they share the next one.
//! * **Lease.** Each applied transaction renews the lease until 0.95 leases after the sending of
//!   its first attempt. Without a lease [`LeaderLog::may_decide`] changes the head to renew it, so
//!   an idle cluster writes nothing. This change proves the leadership to requests before it, even
//!   if it takes longer than the lease.
//! * **Follow.** A frame counts if its sequence number and its chain continue the log. Otherwise
//!   the follower reads the missing frames.
//! * **Campaign.** A follower that suspects the leader writes `challenge`. If the head does not
//!   change for a second while the engine answers, the follower appends the first frame of the
//!   next epoch. The comparison with h proves that nothing happened since h.
//! * **Takeover.** From then on the earlier leader can commit nothing, but it may still answer
//!   reads. So the new leader releases and answers nothing until 1.05 leases after it first saw h.
//!   If the earlier leader released the head or its process has ended, no wait is needed, unless
//!   that leader was still waiting itself ([`Head::serving`]). The head says how long the longest
//!   lease is that may be in force. A released head can name a successor, for which other hosts
//!   wait a moment.
//! * **Snapshot.** The leader puts pieces of a snapshot into its transactions. When all records
//!   that the pieces can contain are committed, the head names the snapshot. Older frames are then
//!   deleted. A snapshot begins only if it fits the engine's quota. The first transaction of a
//!   leadership deletes the pieces that an earlier leader left unfinished.
//!
//! # Why it is safe
//!
//! 1. Every transaction compares and changes the head, and no value of the head repeats. So the
//!    engine's order of these transactions is the order of the log, and a deposed leader's next
//!    transaction fails.
//! 2. Released records are committed. A candidate has applied everything up to h, so a takeover
//!    loses no acknowledged record.
//! 3. The last change by the earlier leader is h or before h. It was sent before it was applied,
//!    and applied before the candidate saw it. So the earlier lease ends before the new leader
//!    answers, if the rates of two clocks differ by at most 10 % during a lease.
//! 4. Until the new leader answers, a read by the earlier leader returns the newest acknowledged
//!    state. A turn must look at the lease after it has read the input and before it decides.
//!
//! Nothing else of the engine matters for safety: no lease, no watch, no read and no revision of
//! etcd. Faults of these were found in versions that distributions ship.
//!
//! The weak point is a virtual machine that is frozen while its clock stands still.
//! [`Reads::Confirmed`] uses no clock: each turn waits for a transaction that began after its input
//! arrived.
//!
//! # Invariants
//!
//! * A transaction must never change before it is decided, and must never be given up if an
//!   attempt may be applied. Otherwise a late attempt could overwrite a decision.
//! * A lease must count from the sending of the first attempt, never from an answer. Otherwise a
//!   paused leader would answer from the past.
//! * A follower must never apply a frame that does not continue its log, and never decide anything
//!   on a read.
//! * A snapshot must never begin within a group of records in parts, and must never be named
//!   before its last record is committed. Otherwise a host that joins could not read the log, or
//!   would see records that were never committed.
//! * The log must never take the space of the next snapshot. Only a snapshot makes room, so a full
//!   engine would stay full.
//! * A handover must wait until the leader itself serves. Otherwise the next leader could answer
//!   while the lease of the leader before both is valid.
#![forbid(unsafe_code)]

mod access;
mod check;
mod clock;
mod codec;
mod copy;
mod create;
mod cursor;
mod embedder;
mod engine;
mod error;
pub mod etcd;
mod feed;
mod figures;
mod follower;
mod frame;
mod head;
mod host;
mod keys;
mod leader;
pub mod limits;
mod member;
mod modules;
mod operations;
mod options;
mod overview;
mod pieces;
mod presence;
#[cfg(any(test, feature = "simulation"))]
pub mod simulated;
mod space;

#[cfg(test)]
mod tests;

pub use access::{Access, ClusterError};
pub use check::{AGREEING_SETTINGS, Finding, Report, Severity, check};
pub use clock::{Clock, MachineClock};
pub use codec::Malformed;
pub use copy::store::{CopyError, CopyStore, Resumed};
pub use copy::{LogCopy, confirm_copy};
pub use create::{FirstState, Secret, check_room, create, create_from, identity};
pub use cursor::LogPoint;
pub use embedder::{Embedder, Ended, Takeover};
pub use engine::{
    Call, Change, Condition, Engine, EngineError, KeyRange, Outcome, Page, Revision, Status,
    Transaction, Value, Watch,
};
pub use error::Stop;
pub use figures::{After, Figures};
pub use frame::{Assembler, FRAME_HEADER_BYTES, Frame, Kind, chain, records};
pub use head::{Chain, HEAD_FORMAT, Head, Id, LOG_FORMAT, SnapshotInfo, store_name};
pub use leader::{LeaderLog, NotLeading, TooLarge};
pub use member::Member;
pub use modules::{ModuleInfo, Modules};
pub use operations::{OperationError, Upgraded, check_reach, check_successor, upgrade};
#[cfg(any(test, feature = "simulation"))]
pub use options::Broken;
pub use options::{Options, Reads, Sizes, Timing, check_cluster_name};
pub use overview::{LogWindow, Overview, overview};
pub use presence::{Description, MemberEntry, MemberInfo, Role, members, remove_member};
pub use statehouse_protocol::LogPosition;
