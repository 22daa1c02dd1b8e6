//! Writes a whole store to one file: keys, sessions, remembered requests and policies.
//!
//! A backup has the format of the log's snapshots and holds the state at exactly one log
//! position. Unlike a snapshot it also contains the modules of the policies, which a data directory
//! stores in a directory of their own.

use std::collections::HashSet;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use statehouse_mqtt::{Broker, ImageCursor, Limits, NoService, Options};
use statehouse_protocol::SessionId;
use statehouse_wal::{LogPosition, Source};

use super::{Past, PastError};
use statehouse_core::STANDARD_POLICY;
use statehouse_core::clock::wall_ms;
use statehouse_core::log::record::PolicyRecord;
use statehouse_core::log::{Image, Meta, Progress, module_block, sessions_block};
use statehouse_core::store::{Duplicates, Mode, State};
use statehouse_precompiled::Modules;

/// The contents of a data directory or a backup.
#[derive(Clone, Debug)]
pub struct Contents {
    /// The log position of the state.
    pub position: LogPosition,
    /// The store's time at this position, in milliseconds.
    pub now_ms: u64,
    /// Keys that clients can access, including expired ones that no sweep has removed yet.
    pub keys: u64,
    /// Hidden keys of policies.
    pub hidden_keys: u64,
    /// The bytes that all of these keys count against `max_bytes`.
    pub bytes: u64,
    /// MQTT sessions.
    pub sessions: u64,
    /// Retained messages.
    pub retained: u64,
    /// Durable watches, which a store behind a foreign broker has.
    pub watches: u64,
    /// Remembered requests: a redelivery of one gets the same answer.
    pub remembered: u64,
    /// All policies in the records, active or not.
    pub policies: Vec<Module>,
}

/// A policy and its module.
#[derive(Clone, Debug)]
pub struct Module {
    /// The policy.
    pub policy: PolicyRecord,
    /// Whether it is the active policy.
    pub active: bool,
    /// Whether a route names it.
    pub routed: bool,
    /// Whether the assignment names it in any role: active, the one to roll back to, candidate,
    /// canary, routed, or loaded for a promotion.
    pub held: bool,
    /// The number of remembered requests that it answered.
    pub remembered: u64,
    /// The state of its file.
    pub state: ModuleState,
}

impl Module {
    /// Whether a start fails because of this module.
    pub fn prevents_start(&self) -> bool {
        (self.active || self.routed) && !self.policy.built_in && !self.state.is_well()
    }
}

/// The state of the file of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModuleState {
    /// The file has the bytes that were written.
    Whole,
    /// There is no file and none is needed, because this program contains the policy.
    BuiltIn,
    /// The file is missing.
    Missing,
    /// The file does not have the bytes that were written, with the reason.
    Damaged(String),
}

impl ModuleState {
    /// Whether the policy can run.
    pub fn is_well(&self) -> bool {
        matches!(self, Self::Whole | Self::BuiltIn)
    }

    /// Checks a module in a directory. Fails if this account may not read it: that says nothing
    /// about the file.
    pub(super) fn of(modules: &Modules, digest: &blake3::Hash) -> Result<Self, PastError> {
        match modules.load(digest) {
            Ok(_) => Ok(Self::Whole),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Self::absent(digest)),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => Err(
                PastError::Unreadable(modules.path(digest), error.to_string()),
            ),
            Err(error) => Ok(Self::Damaged(error.to_string())),
        }
    }

    /// The state of a module without a file.
    pub(super) fn absent(digest: &blake3::Hash) -> Self {
        if *digest == blake3::hash(STANDARD_POLICY) {
            Self::BuiltIn
        } else {
            Self::Missing
        }
    }
}

/// A state as a start recovers it: with a broker for its sessions, without expired retained
/// messages, and without the remembered requests of ended sessions.
pub(super) struct RecoveredState {
    image: Image,
    broker: Broker,
}

impl RecoveredState {
    pub(super) fn of(mut image: Image) -> Self {
        let options = Options {
            limits: unlimited(),
            run: image.run,
            ..Options::default()
        };
        let mut sessions = std::mem::take(&mut image.sessions);
        // If the wall clock is behind the log, a restore by the right clock would end the sessions.
        sessions.end_connections(wall_ms().max(image.now_ms));
        let broker = Broker::restore(options, Arc::new(NoService), sessions);
        let live: HashSet<SessionId> = broker.sessions().into_iter().collect();
        let lives = |session| live.contains(&session) || Mode::of_session(session) == Mode::Foreign;
        image.duplicates.retain(lives);
        Self { image, broker }
    }

    pub(super) fn state(&self) -> &State {
        &self.image.state
    }

    /// Counts the contents; `module` returns the state of a policy's file. Fails with its error.
    pub(super) fn contents(
        &self,
        position: LogPosition,
        mut module: impl FnMut(&blake3::Hash) -> Result<ModuleState, PastError>,
    ) -> Result<Contents, PastError> {
        let image = &self.image;
        let (state, duplicates) = (&image.state, &image.duplicates);
        let policies = image.policies.iter().enumerate().map(|(number, policy)| {
            let answered = |digest: &blake3::Hash| *digest == policy.digest;
            let requests = duplicates.range(0);
            let remembered = requests.filter(|it| answered(&it.context.policy)).count();
            Ok(Module {
                policy: policy.clone(),
                active: image.active.is_some_and(|it| it as usize == number),
                routed: (image.assignment.iter())
                    .flat_map(|it| &it.routes)
                    .any(|route| route.policy.0 == policy.digest),
                held: (image.assignment.iter()).any(|it| it.all().contains(&policy.digest.into())),
                remembered: remembered as u64,
                state: module(&policy.digest)?,
            })
        });
        Ok(Contents {
            position,
            now_ms: image.now_ms,
            keys: state.table.keys(),
            hidden_keys: state.hidden.keys(),
            bytes: state.table.bytes() + state.hidden.bytes(),
            sessions: self.broker.sessions().len() as u64,
            retained: self.broker.stats().retained as u64,
            watches: state.watches.len() as u64,
            remembered: duplicates.len() as u64,
            policies: policies.collect::<Result<Vec<_>, PastError>>()?,
        })
    }
}

impl Past {
    /// Writes the newest state to a file. The file gets its name only when it is complete.
    pub fn snapshot(&self, file: &Path, now_ms: u64) -> Result<Contents, PastError> {
        let (image, range) = self.newest()?;
        write(file, image, range.end, now_ms, &self.modules())
    }

    /// The newest state, to begin another log with it.
    pub fn first_state(&self) -> Result<FirstState, PastError> {
        let (image, range) = self.newest()?;
        let modules = self.modules();
        let recovered = RecoveredState::of(image);
        let contents = recovered.contents(range.end, |digest| ModuleState::of(&modules, digest))?;
        let mut blocks = BackupBlocks::of(recovered, modules.clone());
        let digests = std::mem::take(&mut blocks.left).into_iter();
        Ok(FirstState {
            contents,
            modules: digests.map(|it| (it, modules.load(&it).ok())).collect(),
            blocks,
        })
    }
}

/// A state that begins a log elsewhere.
pub struct FirstState {
    /// What it holds.
    pub contents: Contents,
    /// Policies by their digests, with their files if those are intact.
    pub modules: Vec<(blake3::Hash, Option<Vec<u8>>)>,
    blocks: BackupBlocks,
}

impl FirstState {
    /// Fills `block` with the next block of a snapshot, and returns false after the last one. The
    /// text of an error is for the operator.
    pub fn next(&mut self, block: &mut Vec<u8>) -> Result<bool, String> {
        self.blocks.next(block)
    }
}

/// Writes a state as the backup of a position.
pub(super) fn write(
    file: &Path,
    image: Image,
    position: LogPosition,
    now_ms: u64,
    modules: &Modules,
) -> Result<Contents, PastError> {
    let recovered = RecoveredState::of(image);
    let contents = recovered.contents(position, |digest| ModuleState::of(modules, digest))?;
    let mut blocks = BackupBlocks::of(recovered, modules.clone());
    statehouse_wal::write_snapshot_file(file, position, now_ms, &mut blocks).map_err(|error| {
        PastError::Backup(file.to_owned(), format!("cannot be written: {error}"))
    })?;
    Ok(contents)
}

/// The blocks of a state: sessions, then the store, then modules. `image.rs` of `statehouse-core`
/// explains the order.
struct BackupBlocks {
    /// Encodes the sessions.
    broker: Broker,
    sessions: Option<ImageCursor>,
    state: Box<State>,
    duplicates: Duplicates,
    progress: Progress,
    meta: Meta,
    modules: Modules,
    /// Policies whose modules are not written yet, the next one last.
    left: Vec<blake3::Hash>,
}

impl BackupBlocks {
    fn of(recovered: RecoveredState, modules: Modules) -> Self {
        let RecoveredState { image, broker } = recovered;
        let digests = image.policies.iter().map(|policy| policy.digest);
        Self {
            broker,
            sessions: Some(ImageCursor::default()),
            progress: Progress::default(),
            left: digests.rev().collect(),
            meta: image.meta(),
            state: image.state,
            duplicates: image.duplicates,
            modules,
        }
    }
}

/// The limits of a server may exceed the defaults, and a backup contains everything.
fn unlimited() -> Limits {
    let max = usize::MAX / 4;
    Limits {
        sessions_max: max,
        client_id_bytes_max: max,
        subscriptions_per_session_max: max,
        shared_subscriptions_per_session_max: max,
        subscription_bytes_per_session_max: max,
        subscription_bytes_total_max: max,
        state_bytes_total_max: max,
        queue_bytes_max: max,
        queue_bytes_total_max: max,
        retained_max: max,
        retained_bytes_max: max,
        session_expiry_max_s: u32::MAX,
        ..Limits::default()
    }
}

impl Source for BackupBlocks {
    fn begin(&mut self) {}

    fn next(&mut self, block: &mut Vec<u8>) -> Result<bool, String> {
        if let Some(cursor) = &mut self.sessions {
            if let Some(changes) = self
                .broker
                .image(cursor, statehouse_core::limits::SNAPSHOT_PIECE_BYTES)
            {
                *block = sessions_block(&changes);
                return Ok(true);
            }
            self.sessions = None;
        }
        let meta = || self.meta.clone();
        if let Some(piece) = self.progress.next(&self.state, &self.duplicates, meta) {
            *block = piece;
            return Ok(true);
        }
        while let Some(digest) = self.left.pop() {
            // A missing module is already in the counts, and the state is useful without it.
            if let Ok(file) = self.modules.load(&digest) {
                *block = module_block(&digest, &file);
                return Ok(true);
            }
        }
        Ok(false)
    }
}
