//! The creation of a cluster, empty or from the state of a host.
//!
//! The head and the secret are written together, if no head exists. The pieces of a first snapshot
//! are written before, each if no head exists, under an id that follows from the id of the cluster.
//! So a repetition overwrites what an earlier attempt wrote, two creations at the same time cannot
//! mix their pieces, and no late attempt can change a cluster that exists. The creation deletes all
//! other pieces. If a piece cannot be written, the pieces before it are deleted. They must never be
//! deleted after the head was sent: it may be written later, and then names them.

use bytes::Bytes;
use statehouse_protocol::LogPosition;

use crate::access::{Access, ClusterError, decode_head};
use crate::engine::{Condition, Engine, EngineError, KeyRange, Outcome, Transaction, Value};
use crate::head::{Head, Id, SnapshotInfo};
use crate::keys::Keys;
use crate::pieces::Cutter;
use crate::{limits, space};

/// The key that all hosts of a cluster share. They authenticate streams with it that they pass to
/// each other.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub [u8; 32]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

impl Secret {
    fn random() -> Result<Self, String> {
        let mut secret = [0; 32];
        getrandom::fill(&mut secret)
            .map_err(|it| format!("the operating system has no random numbers: {it}"))?;
        Ok(Self(secret))
    }
}

/// The state with which a cluster begins.
#[derive(Debug)]
pub struct FirstState<B> {
    /// The id of the new cluster. It must be random. A repetition of a call that was dropped may
    /// use the same id with the same state, or a new id: the creation deletes the pieces of all
    /// other attempts. After an error it must use a new id, since the deletion of the pieces may be
    /// late.
    pub id: Id,
    /// The wall clock in milliseconds since 1970: the later of this host's clock and of the last
    /// time in the state.
    pub now_ms: u64,
    /// The position of the last record in the state.
    pub position: LogPosition,
    /// Fills the empty vector with the next block and returns true, or returns false after the
    /// last block. An error cancels the creation.
    pub next_block: B,
}

/// Creates a cluster without records, with a new secret. Returns false if another cluster of this
/// name exists. If this id created it already, returns true and changes nothing, so if the outcome
/// is unknown, a repetition with the same id is safe.
pub async fn create(
    engine: &dyn Engine,
    cluster: &str,
    id: Id,
    now_ms: u64,
) -> Result<bool, EngineError> {
    let keys = Keys::new(cluster);
    let head = Head::first(id, now_ms);
    let secret = Secret::random().map_err(EngineError::NotApplied)?;
    let creation = creation(&keys, &head, &secret, vec![keys.all_snapshots()]);
    match engine.transact(&creation).await? {
        Outcome::Applied(_) => Ok(true),
        // Hosts may lead it by now. A head that cannot be read is that of another program.
        Outcome::Failed(value) => Ok(created_by(&value, id).unwrap_or(false)),
    }
}

/// Checks that the engine has room for a cluster that begins with a state, so that state may grow
/// then. Takes the sizes in bytes of the first snapshot, of the policy modules, and of the quota;
/// an engine that reports its own quota overrides it. Fails with [`ClusterError::Limit`] if there
/// is too little room.
pub async fn check_room(
    access: &Access,
    (snapshot_bytes, module_bytes): (u64, u64),
    quota_bytes: u64,
) -> Result<(), ClusterError> {
    let status = access.status().await?;
    let quota = status.quota_bytes.unwrap_or(quota_bytes);
    // The next snapshot is written beside the first one.
    let further = module_bytes.saturating_add(snapshot_bytes.saturating_mul(2));
    if space::has_room(quota, status.bytes, further) {
        return Ok(());
    }
    Err(ClusterError::Limit {
        what: "the size of etcd's database in bytes, with the state and its next snapshot,",
        value: space::filled(status.bytes, further),
        limit: quota - space::reserve(quota),
        advice: "raise etcd's --quota-backend-bytes, and give its value with --cluster-quota",
    })
}

/// Creates a cluster with a first snapshot and a new secret. Returns false if another cluster of
/// this name exists. If this id created it already, returns true and changes nothing. Fails with
/// [`ClusterError::Input`] if the state cannot be captured, and with [`ClusterError::Limit`] if it
/// has too many pieces; [`check_room`] says before whether the engine has room. If it fails before
/// the creation was sent, nothing of the state remains in the engine, unless that does not answer.
pub async fn create_from<B>(access: &Access, state: FirstState<B>) -> Result<bool, ClusterError>
where
    B: FnMut(&mut Vec<u8>) -> Result<bool, String>,
{
    let keys = &access.keys;
    let mut head = first_head(&state)?;
    let (mut cutter, mut next_block) = (Cutter::default(), state.next_block);
    let secret = Secret::random().map_err(ClusterError::Input)?;
    let mut info = SnapshotInfo::begun(&head, head.position);
    let own = keys.snapshots(info.id, info.id + 1);
    match write_pieces(access, &mut cutter, &mut next_block, &mut info).await {
        Ok(None) => {}
        Ok(Some(value)) => return created_by(&value, state.id),
        Err(error) => {
            let deletion = if_absent(keys, Vec::new(), vec![own]);
            let what = "deleting the pieces of the first snapshot";
            // The first error says more.
            _ = access.transact(what, &deletion).await;
            return Err(error);
        }
    }
    info.hash = cutter.hash();
    head.snapshot = Some(info);
    let others = keys.all_snapshots();
    let deletes = vec![
        KeyRange::new(others.from, own.from),
        KeyRange::new(own.to, others.to),
    ];
    let creation = creation(keys, &head, &secret, deletes);
    match access.transact("creating the cluster", &creation).await? {
        Outcome::Applied(_) => Ok(true),
        Outcome::Failed(value) => created_by(&value, state.id),
    }
}

/// Writes the pieces, and counts them and their bytes. Returns the head if a cluster exists.
async fn write_pieces<B>(
    access: &Access,
    cutter: &mut Cutter,
    next_block: &mut B,
    info: &mut SnapshotInfo,
) -> Result<Option<Value>, ClusterError>
where
    B: FnMut(&mut Vec<u8>) -> Result<bool, String>,
{
    loop {
        let filled = cutter.fill(limits::PIECE_BYTES_MAX, &mut *next_block);
        filled.map_err(ClusterError::Input)?;
        let Some(piece) = cutter.cut(limits::PIECE_BYTES_MAX) else {
            return Ok(None);
        };
        if info.pieces == limits::SNAPSHOT_PIECES_MAX {
            return Err(ClusterError::Limit {
                what: "the number of pieces of the snapshot",
                value: u64::from(info.pieces) + 1,
                limit: limits::SNAPSHOT_PIECES_MAX.into(),
                advice: "the state is larger than etcd can be: remove entries before",
            });
        }
        info.bytes += piece.len() as u64;
        let key = access.keys.piece(info.id, info.pieces);
        info.pieces += 1;
        let transaction = if_absent(&access.keys, vec![(key, piece)], Vec::new());
        let what = "writing a piece of the first snapshot";
        if let Outcome::Failed(value) = access.transact(what, &transaction).await? {
            return Ok(Some(value));
        }
    }
}

/// Reads the id and the secret of a cluster. Fails with [`ClusterError::NotCreated`] or
/// [`ClusterError::NoSecret`] if it does not exist.
pub async fn identity(access: &Access) -> Result<(Id, Secret), ClusterError> {
    // A cluster without a head has no secret either, and the first error says what to do.
    let id = access.head().await?.cluster;
    let keys = &access.keys;
    let secret = access.get("reading the secret", &keys.secret()).await?;
    let bytes = secret.ok_or_else(|| ClusterError::NoSecret(keys.cluster().to_owned()))?;
    let bytes = <[u8; 32]>::try_from(&bytes[..]).map_err(|_| ClusterError::Malformed {
        what: "the secret of the cluster",
        error: crate::codec::Malformed::Damaged("it does not have 32 bytes"),
    })?;
    Ok((id, Secret(bytes)))
}

/// The transaction that creates a cluster.
fn creation(keys: &Keys, head: &Head, secret: &Secret, deletes: Vec<KeyRange>) -> Transaction {
    let secret = Bytes::copy_from_slice(&secret.0);
    let puts = vec![
        (keys.head(), Bytes::from(head.encode())),
        (keys.secret(), secret),
    ];
    if_absent(keys, puts, deletes)
}

/// A transaction that does nothing after the creation of the cluster.
fn if_absent(keys: &Keys, puts: Vec<(Vec<u8>, Bytes)>, deletes: Vec<KeyRange>) -> Transaction {
    Transaction {
        key: keys.head(),
        condition: Condition::Absent,
        puts,
        deletes,
    }
}

/// Whether the existing head belongs to the cluster with this id.
fn created_by(value: &Value, id: Id) -> Result<bool, ClusterError> {
    let head = decode_head(value.value.as_deref().unwrap_or_default())?;
    Ok(head.cluster == id)
}

/// The head without the pieces of the snapshot. The log begins after a frame number that follows
/// from the id, so that no other cluster writes pieces of the same snapshot.
fn first_head<B>(state: &FirstState<B>) -> Result<Head, ClusterError> {
    let mut number = [0; 8];
    number[..5].copy_from_slice(&blake3::hash(&state.id.0).as_bytes()[..5]);
    let seq = u64::from_le_bytes(number) + 1;
    let head = Head {
        seq,
        oldest: seq + 1,
        position: state.position,
        ..Head::first(state.id, state.now_ms)
    };
    if state.position.0 >= crate::head::COUNTER_MAX {
        return Err(ClusterError::Input(format!(
            "the position {} is out of range: the data directory is damaged",
            state.position.0
        )));
    }
    Ok(head)
}
