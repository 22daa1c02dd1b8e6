//! A whole store in one file: table, sessions, requests that may come again, and the policies that answered.
//!
//! What enters: the newest state of a directory. What leaves: a file in the format of the journal's snapshots,
//! of one place of the journal exactly. It differs from these in one point: it holds the modules of policies,
//! which a data directory keeps beside its journal.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use statehouse_mqtt::{Broker, ImageCursor, Limits, NoService, Options};
use statehouse_wal::{LogPosition, Source};

use super::{Past, PastError};
use statehouse_core::STANDARD_POLICY;
use statehouse_core::log::record::PolicyRecord;
use statehouse_core::log::{Image, Meta, Progress, module_block, sessions_block};
use statehouse_core::store::{Duplicates, Mode, State};
use statehouse_precompiled::Modules;

/// What a directory or a backup holds.
#[derive(Clone, Debug)]
pub struct Contents {
    /// The place of the journal that it stands for.
    pub position: LogPosition,
    /// The store's time there, in milliseconds.
    pub now_ms: u64,
    /// Keys that clients see, expired ones that no sweep has removed yet included.
    pub keys: u64,
    /// Keys of policies' own bookkeeping.
    pub hidden_keys: u64,
    /// What all of them count against `max_bytes`.
    pub bytes: u64,
    /// MQTT sessions.
    pub sessions: u64,
    /// Retained messages.
    pub retained: u64,
    /// Watches that are kept, as behind a foreign broker.
    pub watches: u64,
    /// Requests that are answered alike where they come again.
    pub remembered: u64,
    /// The policies that ever answered.
    pub policies: Vec<Module>,
}

/// A policy and its module.
#[derive(Clone, Debug)]
pub struct Module {
    /// The policy.
    pub policy: PolicyRecord,
    /// Whether it is the one that answers.
    pub active: bool,
    /// Whether it owns the keys of a route.
    pub routed: bool,
    /// Whether it is held ready for anything: to be gone back to, compared or tried, or to be promoted.
    pub held: bool,
    /// Remembered requests that it answered.
    pub remembered: u64,
    /// What became of its file.
    pub state: ModuleState,
}

/// What became of the file of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModuleState {
    /// It is there, byte for byte.
    Whole,
    /// There is none, and none is needed: this program brings it along.
    BuiltIn,
    /// There is none.
    Missing,
    /// It is not what was written.
    Damaged(String),
}

impl ModuleState {
    /// Whether the policy can run.
    pub fn is_well(&self) -> bool {
        matches!(self, Self::Whole | Self::BuiltIn)
    }

    /// How a module in a directory is.
    pub(super) fn of(modules: &Modules, digest: &blake3::Hash) -> Self {
        match modules.load(digest) {
            Ok(_) => Self::Whole,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Self::absent(digest),
            Err(error) => Self::Damaged(error.to_string()),
        }
    }

    /// How a module is that has no file.
    pub(super) fn absent(digest: &blake3::Hash) -> Self {
        if *digest == blake3::hash(STANDARD_POLICY) {
            Self::BuiltIn
        } else {
            Self::Missing
        }
    }
}

/// A state that was read, as a start makes it: with a broker that has its sessions, and without the requests of
/// those that ended.
pub(super) struct Settled {
    image: Image,
    broker: Broker,
    retained: usize,
}

impl Settled {
    pub(super) fn of(mut image: Image) -> Self {
        let options = Options {
            limits: unlimited(),
            run: image.run,
            ..Options::default()
        };
        let sessions = std::mem::take(&mut image.sessions);
        let (_, retained) = sessions.counts();
        let broker = Broker::restore(options, Arc::new(NoService), sessions);
        let live: HashSet<u64> = broker.sessions().into_iter().collect();
        let lives = |number| live.contains(&number) || Mode::of_session(number) == Mode::Foreign;
        image.duplicates.retain(lives);
        Self {
            image,
            broker,
            retained,
        }
    }

    /// The tables.
    pub(super) fn state(&self) -> &State {
        &self.image.state
    }

    /// What it holds; `module` says what became of a policy's file.
    pub(super) fn contents(
        &self,
        position: LogPosition,
        mut module: impl FnMut(&blake3::Hash) -> ModuleState,
    ) -> Contents {
        let image = &self.image;
        let (state, duplicates) = (&image.state, &image.duplicates);
        let policies = image.policies.iter().enumerate().map(|(number, policy)| {
            let by_it = |digest: &blake3::Hash| *digest == policy.digest;
            let of_it = duplicates.range(0);
            let remembered = of_it.filter(|it| by_it(&it.context.policy)).count();
            Module {
                policy: policy.clone(),
                active: image.active.is_some_and(|it| it as usize == number),
                routed: (image.assignment.iter())
                    .flat_map(|it| &it.routes)
                    .any(|route| route.policy.0 == policy.digest),
                held: (image.assignment.iter()).any(|it| it.all().contains(&policy.digest.into())),
                remembered: remembered as u64,
                state: module(&policy.digest),
            }
        });
        Contents {
            position,
            now_ms: image.now_ms,
            keys: state.table.keys(),
            hidden_keys: state.hidden.keys(),
            bytes: state.table.bytes() + state.hidden.bytes(),
            sessions: self.broker.sessions().len() as u64,
            retained: self.retained as u64,
            watches: state.watches.len() as u64,
            remembered: duplicates.len() as u64,
            policies: policies.collect(),
        }
    }
}

impl Past {
    /// Writes the newest state to a file, which appears under its name when it is whole.
    pub fn snapshot(&self, file: &Path, now_ms: u64) -> Result<Contents, PastError> {
        let (image, range) = self.newest()?;
        write(file, image, range.end, now_ms, &self.modules())
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
    let settled = Settled::of(image);
    let contents = settled.contents(position, |digest| ModuleState::of(modules, digest));
    let mut pieces = Pieces::of(settled, modules.clone());
    statehouse_wal::write_snapshot_file(file, position, now_ms, &mut pieces).map_err(|error| {
        PastError::Backup(file.to_owned(), format!("cannot be written: {error}"))
    })?;
    Ok(contents)
}

/// The blocks of a state: sessions, then the store (why in this order is said in `journal/image.rs`), then modules.
struct Pieces {
    /// It alone can write down what it remembers.
    broker: Broker,
    sessions: Option<ImageCursor>,
    state: Box<State>,
    duplicates: Duplicates,
    progress: Progress,
    meta: Meta,
    modules: Modules,
    /// Policies whose modules are still to come, the next one last.
    left: Vec<blake3::Hash>,
}

impl Pieces {
    fn of(settled: Settled, modules: Modules) -> Self {
        let Settled { image, broker, .. } = settled;
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

/// A server may have been set to keep more than the default: a backup keeps all of it.
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
        will_delay_max_s: u32::MAX,
        ..Limits::default()
    }
}

impl Source for Pieces {
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
            // What is missing was counted already; the state is worth keeping without it.
            if let Ok(file) = self.modules.load(&digest) {
                *block = module_block(&digest, &file);
                return Ok(true);
            }
        }
        Ok(false)
    }
}
