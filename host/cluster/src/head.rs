//! The head of the log: the value of the one key that every transaction compares and changes.
//!
//! A value of the head must never repeat, or else a late transaction of an earlier leader could
//! pass its comparison. The epoch, the number of the change and the id of the writing process make
//! each value unique.

use std::fmt;
use std::time::Duration;

use statehouse_protocol::LogPosition;

use crate::codec::{Malformed, Reader, put_text};
use crate::limits;

/// The format of heads that this version writes, and the latest that it reads.
pub const HEAD_FORMAT: u16 = 1;

/// The latest format of the log that this version reads and, once all hosts read it, writes. In
/// format 2 a record can say that retained messages of a subscription are pending, or name new
/// deadlines of keys without their entries.
pub const LOG_FORMAT: u16 = 2;

/// A hash over a frame and, through the hash in it, over all frames before.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Chain(pub [u8; 32]);

impl fmt::Debug for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Chain({:02x}{:02x}..)", self.0[0], self.0[1])
    }
}

/// The id of a cluster or of a process, from a random number generator.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Id(pub [u8; 16]);

impl Id {
    /// A new id. Fails if the operating system has no random numbers.
    pub fn random() -> std::io::Result<Self> {
        let mut id = [0; 16];
        getrandom::fill(&mut id).map_err(|it| std::io::Error::other(it.to_string()))?;
        Ok(Self(id))
    }
}

impl fmt::Debug for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Id({:02x}{:02x}..)", self.0[0], self.0[1])
    }
}

/// The name of the store that a cluster forms, by which signed orders address it: the name of the
/// cluster, and half of its id as 16 hexadecimal digits. A cluster of the same name at another
/// engine has another name, and so has one that is created again. So an order that was captured at
/// one of them does nothing at the other.
#[must_use]
pub fn store_name(cluster: &str, id: Id) -> String {
    let half = u128::from_be_bytes(id.0) >> 64;
    format!("{cluster}-{half:016x}")
}

/// A complete snapshot in the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotInfo {
    /// The id, which is a part of the keys of its pieces.
    pub id: u64,
    /// The sequence number of the first frame that may contain records after the beginning of the
    /// snapshot.
    pub first_seq: u64,
    /// The first record that must be applied after the snapshot.
    pub first_position: LogPosition,
    /// The chain before frame `first_seq`.
    pub previous: Chain,
    /// The number of pieces.
    pub pieces: u32,
    /// The size of all pieces.
    pub bytes: u64,
    /// The hash of all pieces.
    pub hash: [u8; 32],
}

/// The head of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// The latest format of frames, records and pieces that the log may contain.
    pub log_format: u16,
    /// The id of the cluster.
    pub cluster: Id,
    /// The number of the leadership, 0 before the first one.
    pub epoch: u64,
    /// The number of the change within the epoch.
    pub change: u64,
    /// The id of the process that wrote this value.
    pub writer: Id,
    /// The name of the leader; in a released head also of the host that should lead next
    /// ([`Self::successor`]).
    pub leader: String,
    /// The address at which other hosts reach the leader. Empty if [`Self::leader`] is a successor.
    pub address: String,
    /// Whether the leader has given up its leadership. It answers no clients after that.
    pub released: bool,
    /// Whether the leases of all earlier leaders were certainly over when this value was written.
    /// If not, a takeover must wait even if this leader has ended.
    pub serving: bool,
    /// The longest lease that may be in force, in milliseconds: the leader's, and that of earlier
    /// leaders unless [`Self::serving`]. So hosts can have different settings.
    pub lease_ms: u32,
    /// The sequence number of the last frame.
    pub seq: u64,
    /// The chain after the last frame.
    pub chain: Chain,
    /// The last complete record.
    pub position: LogPosition,
    /// The leader's time in milliseconds since 1970 when it wrote this value
    /// ([`crate::Embedder::now_ms`]). It never decreases. Earlier versions set it with frames
    /// only.
    pub now_ms: u64,
    /// The newest complete snapshot.
    pub snapshot: Option<SnapshotInfo>,
    /// The sequence number of the oldest frame that is kept.
    pub oldest: u64,
}

impl Head {
    /// The head of a new cluster, which has no leader.
    #[must_use]
    pub fn first(cluster: Id, now_ms: u64) -> Self {
        Self {
            log_format: LOG_FORMAT,
            cluster,
            epoch: 0,
            change: 0,
            writer: cluster,
            leader: String::new(),
            address: String::new(),
            released: true,
            serving: true,
            lease_ms: 0,
            seq: 0,
            chain: Chain(*blake3::hash(&cluster.0).as_bytes()),
            position: LogPosition::NONE,
            now_ms,
            snapshot: None,
            oldest: 1,
        }
    }

    /// The place of this value in the order of all values of the head.
    #[must_use]
    pub fn order(&self) -> (u64, u64) {
        (self.epoch, self.change)
    }

    /// The oldest frame that must be in the engine. Those before the newest snapshot may have been
    /// deleted to make room.
    #[must_use]
    pub fn oldest_needed(&self) -> u64 {
        let first = self.snapshot.map_or(0, |it| it.first_seq);
        self.oldest.max(first)
    }

    /// The host that should lead next, if the leader released the head and named one. Other hosts
    /// wait a moment for it. No safety depends on it.
    #[must_use]
    pub fn successor(&self) -> Option<&str> {
        let is_named = self.released && self.address.is_empty() && !self.leader.is_empty();
        is_named.then_some(&self.leader)
    }

    /// How long a new leader waits for the leases of this head: 5 % more, because its own clock may
    /// be fast.
    #[must_use]
    pub fn awaited(&self) -> Duration {
        Duration::from_millis(self.lease_ms.into()) * 105 / 100
    }

    /// Encodes the head. The name and the address must respect their limits.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(limits::HEAD_BYTES_MAX);
        out.extend_from_slice(&HEAD_FORMAT.to_le_bytes());
        out.extend_from_slice(&self.log_format.to_le_bytes());
        out.extend_from_slice(&self.cluster.0);
        out.extend_from_slice(&self.epoch.to_le_bytes());
        out.extend_from_slice(&self.change.to_le_bytes());
        out.extend_from_slice(&self.writer.0);
        put_text(&mut out, &self.leader);
        put_text(&mut out, &self.address);
        out.push(self.released.into());
        out.push(self.serving.into());
        out.extend_from_slice(&self.lease_ms.to_le_bytes());
        out.extend_from_slice(&self.seq.to_le_bytes());
        out.extend_from_slice(&self.chain.0);
        out.extend_from_slice(&self.position.0.to_le_bytes());
        out.extend_from_slice(&self.now_ms.to_le_bytes());
        out.extend_from_slice(&self.oldest.to_le_bytes());
        out.push(self.snapshot.is_some().into());
        if let Some(snapshot) = &self.snapshot {
            snapshot.encode(&mut out);
        }
        out
    }

    /// Decodes a head. Fails for every input that [`Self::encode`] does not write.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        Self::decode_up_to(bytes, LOG_FORMAT)
    }

    /// Decodes a head for a host that reads the log up to this format.
    pub(crate) fn decode_up_to(bytes: &[u8], readable: u16) -> Result<Self, Malformed> {
        if bytes.len() > limits::HEAD_BYTES_MAX {
            return Err(Malformed::Damaged("it is longer than a head"));
        }
        let mut reader = Reader(bytes);
        check_format(reader.u16()?, HEAD_FORMAT)?;
        let log_format = reader.u16()?;
        check_format(log_format, readable)?;
        let head = Self {
            log_format,
            cluster: Id(reader.array()?),
            epoch: reader.u64()?,
            change: reader.u64()?,
            writer: Id(reader.array()?),
            leader: reader.text(limits::HOST_NAME_BYTES_MAX)?,
            address: reader.text(limits::ADDRESS_BYTES_MAX)?,
            released: reader.bool()?,
            serving: reader.bool()?,
            lease_ms: reader.u32()?,
            seq: reader.u64()?,
            chain: Chain(reader.array()?),
            position: LogPosition(reader.u64()?),
            now_ms: reader.u64()?,
            oldest: reader.u64()?,
            snapshot: if reader.bool()? {
                Some(SnapshotInfo::decode(&mut reader)?)
            } else {
                None
            },
        };
        reader.end()?;
        let counters = [head.epoch, head.change, head.seq, head.position.0];
        if counters.iter().any(|&it| it > COUNTER_MAX) || head.oldest > head.seq + 1 {
            return Err(Malformed::Damaged("a counter is out of range"));
        }
        Ok(head)
    }
}

/// Largest counter in a head or a frame. Counters that begin at 0 never reach it, and sums of two
/// cannot overflow.
pub(crate) const COUNTER_MAX: u64 = u64::MAX >> 2;

/// Accepts the formats 1 to `readable`.
pub(crate) fn check_format(format: u16, readable: u16) -> Result<(), Malformed> {
    match format {
        0 => Err(Malformed::Damaged("its format is 0")),
        _ if format > readable => Err(Malformed::LaterFormat { format, readable }),
        _ => Ok(()),
    }
}

impl SnapshotInfo {
    /// A snapshot without pieces that begins behind the last frame of a head, with every effect of
    /// the records up to `last`.
    pub(crate) fn begun(head: &Head, last: LogPosition) -> Self {
        Self {
            id: head.seq,
            first_seq: head.seq + 1,
            first_position: LogPosition(last.0 + 1),
            previous: head.chain,
            pieces: 0,
            bytes: 0,
            hash: [0; 32],
        }
    }

    /// The last record of which every effect is in the snapshot. Its blocks can contain effects of
    /// later records.
    #[must_use]
    pub fn begins_after(&self) -> LogPosition {
        LogPosition(self.first_position.0 - 1)
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.id.to_le_bytes());
        out.extend_from_slice(&self.first_seq.to_le_bytes());
        out.extend_from_slice(&self.first_position.0.to_le_bytes());
        out.extend_from_slice(&self.previous.0);
        out.extend_from_slice(&self.pieces.to_le_bytes());
        out.extend_from_slice(&self.bytes.to_le_bytes());
        out.extend_from_slice(&self.hash);
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Self, Malformed> {
        let snapshot = Self {
            id: reader.u64()?,
            first_seq: reader.u64()?,
            first_position: LogPosition(reader.u64()?),
            previous: Chain(reader.array()?),
            pieces: reader.u32()?,
            bytes: reader.u64()?,
            hash: reader.array()?,
        };
        if snapshot.pieces > limits::SNAPSHOT_PIECES_MAX {
            return Err(Malformed::Damaged("a snapshot has too many pieces"));
        }
        if snapshot.first_seq == 0 || snapshot.first_position == LogPosition::NONE {
            return Err(Malformed::Damaged("a snapshot begins before the log"));
        }
        Ok(snapshot)
    }
}
