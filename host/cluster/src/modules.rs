//! Policy modules in the engine, by the hash of their bytes.
//!
//! ```text
//! module/DIGEST/PIECE     pieces of at most 1 MiB, PIECE in 8 hex digits
//! modules/DIGEST/attempt  a random number, written before the first piece if there is none
//! modules/DIGEST/begun    the size, written with it
//! modules/DIGEST/stored   the size, written after the last piece
//! ```
//!
//! Unlike everything else that a host writes, modules are stored without a comparison with the head:
//! the key determines each piece and size, so two hosts that store the same module write the same
//! bytes, and a late request writes what is there already. The log refers to a module by its
//! digest, and a reader checks the digest, so a wrong piece can never be used.
//!
//! Only the leader removes modules, in a transaction of the log. Otherwise a host that was replaced
//! could remove what the next leader needs.
//!
//! A removal ends the attempt. A writer marks a module as stored only if the attempt in which it
//! has written all pieces goes on. Writers at the same time share an attempt. Otherwise a module
//! that was removed, and begun again by another writer, could be marked although it lacks pieces.
//!
//! A late request that arrives after a removal can leave a piece behind, which costs room only. A
//! host of an earlier version, or a late request that begins an attempt again, can mark a module
//! that lacks pieces. The next call of [`Modules::put`] completes it.

use bytes::Bytes;

use crate::access::{Access, ClusterError, put};
use crate::codec::{Malformed, Reader};
use crate::engine::{Condition, KeyRange, Outcome, Page, Transaction, next_key};
use crate::head::{Id, check_format};
use crate::limits;
use crate::options::Timing;

/// The format of the sizes that this version writes, and the latest that it reads.
const FORMAT: u16 = 1;

/// The modules of a cluster.
#[derive(Clone, Debug)]
pub struct Modules {
    access: Access,
    quota_bytes: u64,
}

/// A module in the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModuleInfo {
    /// The BLAKE3 hash of the module.
    pub digest: [u8; 32],
    /// Its size in bytes.
    pub bytes: u64,
    /// Whether all pieces were written. If not, its writer still works or has failed.
    pub is_complete: bool,
}

impl Modules {
    /// The modules of a cluster, and the quota of the engine in bytes
    /// ([`crate::Sizes::quota_bytes`]).
    #[must_use]
    pub fn new(access: Access, quota_bytes: u64) -> Self {
        Self {
            access,
            quota_bytes,
        }
    }

    /// Stores a module and returns its digest. Writes nothing if it is complete already, replaces
    /// what is damaged of it, and is safe to repeat after an error. Modules that are stored at the
    /// same time can exceed the limits of all modules by their own size. Fails with
    /// [`ClusterError::Limit`] if the module is too large, there are too many, or the engine has no
    /// room, and with [`ClusterError::Input`] if the module is empty.
    pub async fn put(&self, module: &[u8]) -> Result<[u8; 32], ClusterError> {
        let digest = *blake3::hash(module).as_bytes();
        let size = Size::of(module)?;
        match self.get(&digest).await {
            Ok(Some(_)) => return Ok(digest),
            Ok(None) | Err(ClusterError::DamagedModule { .. }) => {}
            Err(error) => return Err(error),
        }
        self.check_limits(&digest, size).await?;
        for _ in 0..limits::CALL_ATTEMPTS_MAX {
            let attempt = self.begin(&digest, size).await?;
            self.put_pieces(&digest, module).await?;
            let store = Transaction {
                key: self.access.keys.module_attempt(&digest),
                // A module that was removed in the meantime lacks pieces.
                condition: Condition::Value(attempt),
                puts: vec![(self.access.keys.module_stored(&digest), size.encode())],
                deletes: Vec::new(),
            };
            let outcome = self.access.transact("storing a module", &store).await?;
            if matches!(outcome, Outcome::Applied(_)) {
                return Ok(digest);
            }
        }
        Err(damaged(
            &digest,
            "another host removes it while it is stored",
        ))
    }

    /// Begins an attempt to store a module, or joins one. Returns its number.
    async fn begin(&self, digest: &[u8; 32], size: Size) -> Result<Bytes, ClusterError> {
        let attempt = Id::random().map_err(|error| {
            ClusterError::Input(format!(
                "the operating system has no random numbers: {error}"
            ))
        })?;
        let attempt = Bytes::copy_from_slice(&attempt.0);
        let key = self.access.keys.module_attempt(digest);
        let begin = Transaction {
            key: key.clone(),
            condition: Condition::Absent,
            puts: vec![
                (key, attempt.clone()),
                (self.access.keys.module_begun(digest), size.encode()),
            ],
            deletes: Vec::new(),
        };
        let begun = self.access.transact("storing a module", &begin).await?;
        Ok(match begun {
            Outcome::Applied(_) => attempt,
            Outcome::Failed(found) => found.value.unwrap_or(attempt),
        })
    }

    async fn put_pieces(&self, digest: &[u8; 32], module: &[u8]) -> Result<(), ClusterError> {
        for (number, piece) in (0..).zip(module.chunks(limits::MODULE_PIECE_BYTES)) {
            let key = self.access.keys.module_piece(digest, number);
            let transaction = put(key, Bytes::copy_from_slice(piece));
            let what = "storing a piece of a module";
            self.access.transact(what, &transaction).await?;
        }
        Ok(())
    }

    async fn check_limits(&self, digest: &[u8; 32], size: Size) -> Result<(), ClusterError> {
        let mut others = self.list().await?;
        others.retain(|it| it.digest != *digest);
        let count = others.len() as u64 + 1;
        let bytes = others.iter().map(|it| it.bytes).sum::<u64>() + size.bytes;
        check(
            "the number of modules",
            count,
            limits::MODULES_MAX as u64,
            "unload policies (statehouse policy unload)",
        )?;
        check(
            "the size of all modules in bytes",
            bytes,
            limits::MODULES_BYTES_MAX,
            "unload policies (statehouse policy unload)",
        )?;
        let status = self.access.status().await?;
        let quota = status.quota_bytes.unwrap_or(self.quota_bytes);
        check(
            "the size of etcd's database in bytes",
            status.bytes + size.bytes,
            limits::room_bytes(quota),
            "raise etcd's --quota-backend-bytes, unload policies, or remove keys",
        )
    }

    /// Reads a module. Returns `None` if it is not complete. A server that is behind may not show a
    /// module that was just stored. Fails with [`ClusterError::DamagedModule`] if the bytes do not
    /// have this digest.
    pub async fn get(&self, digest: &[u8; 32]) -> Result<Option<Vec<u8>>, ClusterError> {
        let Some(size) = self.size(digest).await? else {
            return Ok(None);
        };
        let mut module = Vec::new();
        let mut range = self.access.keys.module_pieces(digest);
        for number in 0.. {
            let page = self.read_pieces(&range).await?;
            for (_, piece) in &page.values {
                if (module.len() + piece.len()) as u64 > size.bytes {
                    return Err(damaged(digest, "it has more bytes than its size says"));
                }
                module.extend_from_slice(piece);
            }
            let (true, Some((last, _))) = (page.more, page.values.last()) else {
                break;
            };
            if number > size.pieces {
                return Err(damaged(digest, "it has more pieces than its size says"));
            }
            range.from = next_key(last);
        }
        if blake3::hash(&module) != *digest {
            return Err(damaged(digest, "its bytes have another hash"));
        }
        Ok(Some(module))
    }

    /// Reads the first pieces of a range: few, so that they arrive in time over a slow link.
    async fn read_pieces(&self, range: &KeyRange) -> Result<Page, ClusterError> {
        let (access, limit) = (&self.access, Timing::default().read);
        let values_max = limits::MODULE_PAGE_PIECES_MAX;
        let call = || access.engine.range(range, None, values_max);
        access.repeat("reading a module", limit, call).await
    }

    /// All modules by digest, with those that are not complete. Fails with
    /// [`ClusterError::Malformed`] for a size that cannot be read.
    pub async fn list(&self) -> Result<Vec<ModuleInfo>, ClusterError> {
        list(&self.access).await
    }

    /// The modules that a leader should remove ([`crate::LeaderLog::remove_modules`]) before it
    /// stores `module`: those without a policy that needs them, if more than half of a limit is
    /// used. Up to there they remain, since a host that joins may replay requests with them.
    pub async fn unneeded(
        &self,
        module: &[u8],
        needed: impl FnOnce() -> Vec<[u8; 32]>,
    ) -> Result<Vec<[u8; 32]>, ClusterError> {
        let mut stored = self.list().await?;
        let bytes = stored.iter().map(|it| it.bytes).sum::<u64>() + module.len() as u64;
        if stored.len() < limits::MODULES_MAX / 2 && bytes <= limits::MODULES_BYTES_MAX / 2 {
            return Ok(Vec::new());
        }
        let (digest, needed) = (*blake3::hash(module).as_bytes(), needed());
        stored.retain(|it| it.digest != digest && !needed.contains(&it.digest));
        Ok(stored.iter().map(|it| it.digest).collect())
    }

    async fn size(&self, digest: &[u8; 32]) -> Result<Option<Size>, ClusterError> {
        let key = self.access.keys.module_stored(digest);
        let value = self
            .access
            .get("reading the size of a module", &key)
            .await?;
        value.map(|it| Size::decode(&it)).transpose()
    }
}

/// All modules by digest.
pub(crate) async fn list(access: &Access) -> Result<Vec<ModuleInfo>, ClusterError> {
    // Each module has two sizes and an attempt.
    let values_max = 6 * limits::MODULES_MAX;
    let range: KeyRange = access.keys.modules();
    let sizes = access.all("listing modules", range, values_max).await?;
    let mut modules: Vec<ModuleInfo> = Vec::new();
    for (key, value) in sizes {
        let Some((digest, is_complete)) = access.keys.parse_module_size(&key) else {
            continue;
        };
        let bytes = Size::decode(&value)?.bytes;
        match modules.last_mut().filter(|it| it.digest == digest) {
            Some(module) => module.is_complete |= is_complete,
            None => modules.push(ModuleInfo {
                digest,
                bytes,
                is_complete,
            }),
        }
    }
    Ok(modules)
}

fn check(
    what: &'static str,
    value: u64,
    limit: u64,
    advice: &'static str,
) -> Result<(), ClusterError> {
    if value <= limit {
        return Ok(());
    }
    Err(ClusterError::Limit {
        what,
        value,
        limit,
        advice,
    })
}

fn damaged(digest: &[u8; 32], what: &'static str) -> ClusterError {
    ClusterError::DamagedModule {
        digest: crate::keys::hex(digest),
        what,
    }
}

/// The size of a module: `format u16 | bytes u64 | pieces u32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Size {
    bytes: u64,
    pieces: u32,
}

impl Size {
    fn of(module: &[u8]) -> Result<Self, ClusterError> {
        if module.is_empty() {
            return Err(ClusterError::Input(
                "the module is empty: give a WebAssembly component".into(),
            ));
        }
        let bytes = module.len() as u64;
        check(
            "the size of the module in bytes",
            bytes,
            limits::MODULE_BYTES_MAX,
            "build it with optimization and without debug information",
        )?;
        Ok(Self::from_bytes(bytes))
    }

    fn from_bytes(bytes: u64) -> Self {
        // At most 64, because the size is limited.
        let pieces = bytes.div_ceil(limits::MODULE_PIECE_BYTES as u64) as u32;
        Self { bytes, pieces }
    }

    fn encode(self) -> Bytes {
        let mut out = FORMAT.to_le_bytes().to_vec();
        out.extend_from_slice(&self.bytes.to_le_bytes());
        out.extend_from_slice(&self.pieces.to_le_bytes());
        out.into()
    }

    fn decode(bytes: &[u8]) -> Result<Self, ClusterError> {
        let decode = || {
            let mut reader = Reader(bytes);
            check_format(reader.u16()?, FORMAT)?;
            let size = Self {
                bytes: reader.u64()?,
                pieces: reader.u32()?,
            };
            reader.end()?;
            if size.bytes > limits::MODULE_BYTES_MAX || Self::from_bytes(size.bytes) != size {
                return Err(Malformed::Damaged("the size is out of range"));
            }
            Ok(size)
        };
        decode().map_err(|error| ClusterError::Malformed {
            what: "the size of a module",
            error,
        })
    }
}
