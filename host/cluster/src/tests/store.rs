//! A small store for the simulation: keys with versions.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::ledger::Ledger;
use crate::{Embedder, Ended, Head, LeaderLog, LogPosition, Takeover};

/// The number of keys. Few, so that clients meet.
pub(super) const KEYS: u8 = 4;

/// Versions by key, and the last version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct State {
    pub(super) versions: BTreeMap<u8, u64>,
    pub(super) last_version: u64,
}

/// A record: a write of a version, or (with version 0) the opening of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Write {
    pub(super) key: u8,
    pub(super) version: u64,
}

impl Write {
    /// Encodes the write; `filler` bytes make it longer.
    pub(super) fn encode(self, filler: usize) -> Vec<u8> {
        let mut out = vec![self.key];
        out.extend_from_slice(&self.version.to_le_bytes());
        out.resize(out.len() + filler, 0xAB);
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (key, rest) = bytes.split_first()?;
        let version = u64::from_le_bytes(*rest.first_chunk()?);
        Some(Self { key: *key, version })
    }
}

impl State {
    pub(super) fn apply(&mut self, write: Write) {
        if write.version > 0 {
            self.versions.insert(write.key, write.version);
            self.last_version = self.last_version.max(write.version);
        }
    }
}

/// What the clients of a host see of its store.
#[derive(Debug, Default)]
pub(super) struct Shared {
    pub(super) state: State,
    /// The position of the last write of each key.
    pub(super) written: BTreeMap<u8, LogPosition>,
    pub(super) log: Option<Arc<LeaderLog>>,
    /// The name of the leader that this host follows.
    pub(super) leader: String,
}

#[derive(Debug)]
pub(super) struct Store {
    pub(super) shared: Arc<Mutex<Shared>>,
    pub(super) ledger: Arc<Mutex<Ledger>>,
    pub(super) now_ms: u64,
    pub(super) cursor: u8,
}

impl Embedder for Store {
    fn now_ms(&self) -> u64 {
        self.now_ms
    }

    fn reset(&mut self) {
        *self.shared.lock().unwrap() = Shared::default();
        self.ledger.lock().unwrap().joins += 1;
    }

    fn block(&mut self, block: &[u8]) -> Result<(), String> {
        let write = Write::decode(block).ok_or("a malformed block")?;
        self.shared.lock().unwrap().state.apply(write);
        Ok(())
    }

    fn record(&mut self, position: LogPosition, record: &[u8]) -> Result<(), String> {
        self.ledger.lock().unwrap().replicated(position, record);
        let write = Write::decode(record).ok_or("a malformed record")?;
        self.shared.lock().unwrap().state.apply(write);
        Ok(())
    }

    fn following(&mut self, head: &Head) {
        self.shared.lock().unwrap().leader = head.leader.clone();
    }

    fn may_lead(&mut self, _head: &Head) -> Result<(), String> {
        Ok(())
    }

    fn opening(&mut self, epoch: u64) -> Vec<u8> {
        let key = u8::try_from(epoch % 256).unwrap();
        Write { key, version: 0 }.encode(0)
    }

    fn leading(&mut self, takeover: Takeover) {
        let mut shared = self.shared.lock().unwrap();
        let epoch = takeover.log.epoch();
        self.ledger.lock().unwrap().took_over(epoch, &shared.state);
        shared.log = Some(takeover.log);
    }

    fn released(&mut self, _position: LogPosition) {}

    fn ended(&mut self, _ended: Ended) {
        self.shared.lock().unwrap().log = None;
    }

    fn snapshot_bytes(&self) -> u64 {
        (0..KEYS).map(|key| 13 + u64::from(key) * 40).sum()
    }

    fn begin_snapshot(&mut self) {
        self.cursor = 0;
    }

    fn next_block(&mut self, block: &mut Vec<u8>) -> Result<bool, String> {
        if self.cursor == KEYS {
            return Ok(false);
        }
        let key = self.cursor;
        self.cursor += 1;
        let shared = self.shared.lock().unwrap();
        let version = shared.state.versions.get(&key).copied().unwrap_or(0);
        *block = Write { key, version }.encode(usize::from(key) * 40);
        Ok(true)
    }
}
