//! The records of hosts for operators: `member/HOST`, one per host.
//!
//! A host writes its record at its start, when its role or its epoch changes, and when its user
//! asks for it. It reads the record from time to time, and writes it again if it was removed or
//! replaced. An idle cluster writes none. The records are information only: writes have no
//! condition, may arrive late or never, and no host decides anything on them.
//!
//! ```text
//! format u16 | log_format u16 | role u8 | process 16 | epoch u64 | written_ms u64 | settings 32
//! host, address, version: texts | missing u8 | missing digests, 32 each
//! ```

use std::convert::Infallible;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use tokio::sync::Notify;

use crate::access::{Access, ClusterError, delete, put};
use crate::codec::{Malformed, Reader, put_text};
use crate::embedder::Embedder;
use crate::head::{Id, check_format};
use crate::host::Host;
use crate::limits;

/// The format of records that this version writes, and the latest that it reads.
const FORMAT: u16 = 1;

/// What the store says of its host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Description {
    /// The version of the program, cut to [`limits::VERSION_BYTES_MAX`] bytes.
    pub version: String,
    /// A digest of the settings that must agree on all hosts.
    pub settings: [u8; 32],
    /// The digests of modules that this host lacks, cut to [`limits::MISSING_MODULES_MAX`].
    pub missing_modules: Vec<[u8; 32]>,
}

/// What a host does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It reads the log for the first time since its start.
    Joining = 0,
    /// It follows a leader.
    Following = 1,
    /// It leads.
    Leading = 2,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Joining => "joins",
            Self::Following => "follows",
            Self::Leading => "leads",
        })
    }
}

/// The record of a host. It says what was true when it was written: a host that ended without a
/// successor keeps its last record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberInfo {
    /// The name of the host.
    pub host: String,
    /// The address at which other hosts reach it.
    pub address: String,
    /// The latest format of frames that it reads.
    pub log_format: u16,
    /// The id of its process.
    pub process: Id,
    /// Its role.
    pub role: Role,
    /// The newest epoch that it knows.
    pub epoch: u64,
    /// Its wall clock in milliseconds since 1970 when it wrote the record.
    pub written_ms: u64,
    /// What its store says.
    pub description: Description,
}

/// A record in the list of members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberEntry {
    /// The name of the host in the key.
    pub host: String,
    /// The record, or why it cannot be read.
    pub info: Result<MemberInfo, Malformed>,
}

/// Lists the records of all hosts by name, at most [`limits::MEMBERS_MAX`] and one page more.
pub async fn members(access: &Access) -> Result<Vec<MemberEntry>, ClusterError> {
    let range = access.keys.members();
    let what = "listing members";
    let records = access.all(what, range, limits::MEMBERS_MAX).await?;
    let entry = |(key, value): (Vec<u8>, Bytes)| {
        Some(MemberEntry {
            host: access.keys.parse_member(&key)?,
            info: MemberInfo::decode(&value),
        })
    };
    Ok(records.into_iter().filter_map(entry).collect())
}

/// Removes the record of a host. Returns false if there is none. A host that still runs writes it
/// again within [`limits::PRESENCE_PACE`]. Fails with [`ClusterError::Input`] if the host leads.
pub async fn remove_member(access: &Access, host: &str) -> Result<bool, ClusterError> {
    let head = access.head().await?;
    if head.leader == host && !head.released {
        let cluster = access.keys.cluster();
        return Err(ClusterError::Input(format!(
            "{host} leads the cluster {cluster}, so it was not removed: stop it, and remove it when another host leads"
        )));
    }
    let key = access.keys.member(host);
    let record = access.get("reading the record of a member", &key).await?;
    if record.is_none() {
        return Ok(false);
    }
    access.transact("removing a member", &delete(key)).await?;
    Ok(true)
}

impl MemberInfo {
    /// Encodes the record. Texts and lists are cut to their limits.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(limits::MEMBER_BYTES_MAX);
        out.extend_from_slice(&FORMAT.to_le_bytes());
        out.extend_from_slice(&self.log_format.to_le_bytes());
        out.push(self.role as u8);
        out.extend_from_slice(&self.process.0);
        out.extend_from_slice(&self.epoch.to_le_bytes());
        out.extend_from_slice(&self.written_ms.to_le_bytes());
        let described = &self.description;
        out.extend_from_slice(&described.settings);
        put_text(&mut out, cut(&self.host, limits::HOST_NAME_BYTES_MAX));
        put_text(&mut out, cut(&self.address, limits::ADDRESS_BYTES_MAX));
        put_text(&mut out, cut(&described.version, limits::VERSION_BYTES_MAX));
        let missing = &described.missing_modules;
        let count = missing.len().min(limits::MISSING_MODULES_MAX);
        out.push(count as u8);
        out.extend(missing.iter().take(count).flatten());
        out
    }

    /// Decodes a record. Fails for every input that [`Self::encode`] does not write.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        if bytes.len() > limits::MEMBER_BYTES_MAX {
            return Err(Malformed::Damaged("it is longer than a record of a member"));
        }
        let mut reader = Reader(bytes);
        check_format(reader.u16()?, FORMAT)?;
        let log_format = reader.u16()?;
        let role = match reader.u8()? {
            0 => Role::Joining,
            1 => Role::Following,
            2 => Role::Leading,
            _ => return Err(Malformed::Damaged("its role is unknown")),
        };
        let process = Id(reader.array()?);
        let (epoch, written_ms) = (reader.u64()?, reader.u64()?);
        let settings = reader.array()?;
        let host = reader.text(limits::HOST_NAME_BYTES_MAX)?;
        let address = reader.text(limits::ADDRESS_BYTES_MAX)?;
        let version = reader.text(limits::VERSION_BYTES_MAX)?;
        let count = usize::from(reader.u8()?);
        if count > limits::MISSING_MODULES_MAX {
            return Err(Malformed::Damaged("it names too many modules"));
        }
        let missing = (0..count).map(|_| reader.array());
        let missing_modules = missing.collect::<Result<_, _>>()?;
        reader.end()?;
        Ok(Self {
            host,
            address,
            log_format,
            process,
            role,
            epoch,
            written_ms,
            description: Description {
                version,
                settings,
                missing_modules,
            },
        })
    }
}

/// The longest prefix of a text with at most `bytes_max` bytes.
fn cut(text: &str, bytes_max: usize) -> &str {
    &text[..text.floor_char_boundary(bytes_max)]
}

/// The record that this host should have. Its writes never delay the protocol.
#[derive(Debug, Default)]
pub(crate) struct Presence {
    wanted: Mutex<Option<Bytes>>,
    changed: Notify,
}

impl Presence {
    fn locked(&self) -> MutexGuard<'_, Option<Bytes>> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The host has this role from now on.
    pub(crate) fn describe(
        &self,
        host: &Host,
        role: Role,
        epoch: u64,
        embedder: &mut dyn Embedder,
    ) {
        let info = MemberInfo {
            host: host.options.host.clone(),
            address: host.options.address.clone(),
            log_format: host.options.log_format,
            process: host.options.process,
            role,
            epoch,
            written_ms: embedder.now_ms(),
            description: embedder.describe(),
        };
        *self.locked() = Some(info.encode().into());
        self.changed.notify_one();
    }

    /// Writes each record, and the last one again if it was removed or replaced. Runs until it is
    /// dropped.
    pub(crate) async fn write(&self, host: &Host) -> Infallible {
        let key = host.keys.member(&host.options.host);
        let mut seen = Seen::default();
        loop {
            let Some(record) = self.locked().clone() else {
                tokio::select! {
                    biased;
                    () = self.changed.notified() => {}
                    () = host.clock.sleep(limits::PRESENCE_PACE) => {
                        if let Some(lost) = seen.lost(host, &key).await {
                            self.locked().get_or_insert(lost);
                        }
                    }
                }
                continue;
            };
            let put = put(key.clone(), record.clone());
            if let Err(error) = host.attempt(host.engine.transact(&put)).await {
                tracing::debug!("the record of this host was not written: {error}");
                host.clock.sleep(host.options.timing.poll).await;
                continue;
            }
            seen.written = Some(record.clone());
            let mut wanted = self.locked();
            if *wanted == Some(record) {
                *wanted = None;
            }
        }
    }
}

/// What a host knows of its record in the engine.
#[derive(Debug, Default)]
struct Seen {
    written: Option<Bytes>,
    /// The last record of another process that replaced it.
    other: Option<Bytes>,
}

impl Seen {
    /// Reads the record. Returns the one that this host must write again. Two processes with one
    /// name must not replace the record of each other without end, so each does so once for each
    /// record. Once for each process is too few: a process that is about to write another record
    /// does not notice that its first one was replaced, and would never warn.
    async fn lost(&mut self, host: &Host, key: &[u8]) -> Option<Bytes> {
        let written = self.written.as_ref()?;
        // The calls of the member change a server that does not answer. If this one did too, it
        // would undo that.
        let found = tokio::select! {
            biased;
            found = host.engine.get(key) => found.ok()?.value,
            () = host.clock.sleep(host.options.timing.attempt) => return None,
        };
        if found.as_ref() == Some(written) {
            return None;
        }
        if let Some(found) = found {
            // A record that cannot be read is that of another version of the program.
            let process = MemberInfo::decode(&found).ok()?.process;
            let options = &host.options;
            let is_own = process == options.process || Some(process) == options.predecessor;
            if !is_own && self.other.as_ref() == Some(&found) {
                return None;
            }
            if !is_own {
                self.other = Some(found);
                let name = &options.host;
                tracing::warn!(
                    "another process uses the name {name} of this host: give each host of the cluster a name of its own"
                );
            }
        }
        Some(written.clone())
    }
}
