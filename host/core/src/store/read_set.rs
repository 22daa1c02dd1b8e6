//! Records what a request reads, so that a redelivery can be re-executed and gives the same answer.
//!
//! A [`ReadSet`] notes every read of the table and every import whose result the table alone does
//! not determine. It yields [`CapturedReads`], or nothing if these are too many. Reads that would
//! cost more than storing the answer must not be remembered, but the answer rests on them alone.

use std::ops::Range;

use super::entry::{Entry, Key};
use crate::clock::Stamp;
use crate::limits;
use crate::policy::{Fault, Page, Reached};
use statehouse_protocol::rights::Right;

/// A key. It is stored as a range of the payload if it lies there: most keys do, and a redelivery
/// carries the same payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyRef {
    /// A range of the payload.
    Payload(Range<u32>),
    /// Its own copy of the key.
    Own(Key),
}

impl KeyRef {
    /// Refers to `key`, which may be a slice of `payload`.
    pub(super) fn new(key: &[u8], payload: &[u8]) -> Self {
        match within(key, payload) {
            Some(range) => Self::Payload(range),
            None => Self::Own(Key::copy_from_slice(key)),
        }
    }

    /// The key, or `None` if `payload` is too short to be the one that this was made from.
    pub fn resolve<'a>(&'a self, payload: &'a [u8]) -> Option<&'a [u8]> {
        match self {
            Self::Payload(range) => payload.get(range.start as usize..range.end as usize),
            Self::Own(key) => Some(key),
        }
    }

    /// The length of the key.
    fn bytes(&self) -> u64 {
        match self {
            Self::Payload(range) => range.len() as u64,
            Self::Own(key) => key.len() as u64,
        }
    }
}

/// The range of `part` in `whole`, if it is a slice of it.
pub(super) fn within(part: &[u8], whole: &[u8]) -> Option<Range<u32>> {
    let start = part.as_ptr().addr().checked_sub(whole.as_ptr().addr())?;
    let end = start.checked_add(part.len())?;
    if part.is_empty() || end > whole.len() {
        return None;
    }
    Some(u32::try_from(start).ok()?..u32::try_from(end).ok()?)
}

/// A key that the request read, and its entry before the request, even if that had expired.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read {
    /// The key.
    pub key: KeyRef,
    /// Whether the key is hidden: private to policies.
    pub hidden: bool,
    /// The entry, or `None` if the key was absent.
    pub entry: Option<Entry>,
}

/// The result of an import that the captured entries alone do not determine.
#[derive(Clone, Debug, PartialEq)]
pub enum Imported {
    /// A put or a watch was refused by a quota, a configured limit or a missing right.
    Refused(Fault),
    /// A watch was registered.
    Watched,
    /// A watch was registered, and the version of the last change was returned.
    Followed(Stamp),
    /// Missed changes were sent.
    Reached(Reached),
    /// A watch was ended (true), or did not exist.
    Unwatched(bool),
    /// A page of keys.
    Page(Page),
    /// The client lacked this right to the key, so every access that needs it was refused.
    Denied(KeyRef, Right),
}

/// A user property that the policy asked for, and its value.
pub type Property = (Box<str>, Option<Box<str>>);

/// Everything that the policy's answer depended on, apart from the request itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CapturedReads {
    /// The keys that were read, each once.
    pub reads: Vec<Read>,
    /// Import results by the number of the call. Calls of `put`, `keys` and those of watches are
    /// counted together from one. Denied rights have number zero, because they hold for every call.
    pub imports: Vec<(u32, Imported)>,
    /// User properties that were read.
    pub properties: Vec<Property>,
    /// The seed of the request's pseudo-random bytes, if it drew any.
    pub seed: Option<[u8; 32]>,
}

impl CapturedReads {
    fn read(&self, key: &[u8], hidden: bool, payload: &[u8]) -> Option<&Read> {
        let is_it = |it: &&Read| it.hidden == hidden && it.key.resolve(payload) == Some(key);
        self.reads.iter().find(is_it)
    }

    /// Whether the client lacked `right` to a key.
    fn denies(&self, key: &[u8], right: Right, payload: &[u8]) -> bool {
        self.imports.iter().any(|(_, imported)| {
            matches!(imported, Imported::Denied(it, denied) if *denied == right && it.resolve(payload) == Some(key))
        })
    }

    /// Whether they cost more than storing the answer, so that they must not be remembered.
    pub(super) fn is_large(&self) -> bool {
        self.cost_bytes() > limits::CAPTURED_BYTES_MAX
    }

    /// The memory cost in bytes. It must not depend on a restart, or a recovered store could evict
    /// requests that the store remembered before.
    pub fn cost_bytes(&self) -> u64 {
        let reads = self.reads.iter().map(|read| {
            let key_bytes = read.key.bytes();
            let own = match &read.key {
                KeyRef::Payload(_) => 0,
                KeyRef::Own(_) => key_bytes,
            };
            // The table shares the entry only until the key is written again. Its block has the key
            // as well, unless it is from a snapshot.
            let entry = read.entry.as_ref();
            let entry = entry.map_or(0, |it| key_bytes + it.weight_without_key());
            own + size_of::<Read>() as u64 + entry
        });
        let imports = self.imports.iter().map(|(_, imported)| {
            let bytes = match imported {
                Imported::Refused(Fault::Other(text)) => text.len(),
                Imported::Page(page) => page_bytes(page),
                Imported::Denied(KeyRef::Own(key), _) => key.len(),
                _ => 0,
            };
            (bytes + size_of::<(u32, Imported)>()) as u64
        });
        let properties = self.properties.iter().map(|(name, value)| {
            (name.len() + value.as_ref().map_or(0, |value| value.len()) + size_of::<Property>())
                as u64
        });
        reads.chain(imports).chain(properties).sum()
    }
}

fn page_bytes(page: &Page) -> usize {
    page.keys
        .iter()
        .map(|key| key.len() + size_of::<Key>())
        .sum()
}

/// Records the reads of one request, or replays a recording.
#[derive(Default)]
pub(super) struct ReadSet {
    captured: CapturedReads,
    /// Calls of `put`, `keys` and those of watches so far.
    calls: u32,
    /// Whether the limits in number were exceeded, so that nothing is captured.
    overflowed: bool,
    /// The recording to answer from; `None` while recording.
    recording: Option<Box<Recording>>,
    /// Whether the policy asked for something that the recording does not hold.
    pub(super) diverged: bool,
    /// Whether a lenient replay needed an answer that neither the recording nor the table has.
    guessed: bool,
    /// Whether a lenient replay staged a put for which no refusal is recorded.
    put: bool,
    /// Number of recorded refusals that were replayed.
    refused: usize,
    /// Keys, hidden (true) or not, that a replay on a partial state read and did not find there.
    pub(super) missing_reads: Vec<(bool, Key)>,
}

/// The import that is called. A recorded result of one import must not answer another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ImportKind {
    Put,
    Keys,
    Watch,
    /// `unwatch` and `unfollow`.
    Unwatch,
    Follow,
    FollowSince,
}

impl Imported {
    fn answers(&self, kind: ImportKind) -> bool {
        match self {
            // `keys` has no quota, and `unwatch` is never refused.
            Self::Refused(Fault::Quota) => matches!(
                kind,
                ImportKind::Put | ImportKind::Watch | ImportKind::Follow | ImportKind::FollowSince
            ),
            Self::Refused(_) => kind != ImportKind::Unwatch,
            Self::Watched => kind == ImportKind::Watch,
            Self::Followed(_) => kind == ImportKind::Follow,
            Self::Reached(_) => kind == ImportKind::FollowSince,
            Self::Unwatched(_) => kind == ImportKind::Unwatch,
            Self::Page(_) => kind == ImportKind::Keys,
            Self::Denied(..) => false,
        }
    }
}

/// A recording to replay.
pub(super) struct Recording {
    pub(super) captured: CapturedReads,
    pub(super) unrecorded: Unrecorded,
}

/// What to do if the policy asks for something that the recording does not hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unrecorded {
    Fail,
    /// Answer from the state, which is complete.
    FromState,
    /// Answer from the state, which is partial, and collect the keys that are missing.
    Collect,
}

/// How to answer an import.
pub(super) enum NextImport {
    /// Execute it, as the recorded run did.
    Live,
    /// Return this recorded result.
    Recorded(Imported),
    /// Fail: the recorded run did not make this call.
    Unknown,
}

impl ReadSet {
    pub(super) fn replaying(recording: Recording) -> Self {
        Self {
            recording: Some(Box::new(recording)),
            ..Self::default()
        }
    }

    pub(super) fn is_replaying(&self) -> bool {
        self.recording.is_some()
    }

    /// Whether this is a replay that may ask for more than the recorded run.
    pub(super) fn is_lenient(&self) -> bool {
        let recording = self.recording.as_ref();
        recording.is_some_and(|it| it.unrecorded != Unrecorded::Fail)
    }

    /// Whether a lenient replay depends on something unknown, so that its result may differ from a
    /// real run. This includes a put that succeeds now while a recorded refusal was not replayed:
    /// the quota at that time is unknown.
    pub(super) fn guessed(&self) -> bool {
        let recorded = self.recording.iter().flat_map(|it| &it.captured.imports);
        let refusals = recorded.filter(|(_, it)| matches!(it, Imported::Refused(_)));
        self.guessed || (self.put && self.refused < refusals.count())
    }

    /// Notes a read. `entry` is called only for the first read of a key. Returns false if a strict
    /// replay diverges.
    pub(super) fn read(
        &mut self,
        key: &[u8],
        hidden: bool,
        payload: &[u8],
        entry: impl FnOnce() -> Option<Entry>,
    ) -> bool {
        if let Some(recording) = &self.recording {
            let known = recording.captured.read(key, hidden, payload).is_some();
            self.diverged |= !known;
            let new = |(h, k): &(bool, Key)| *h != hidden || k != key;
            if !known
                && recording.unrecorded == Unrecorded::Collect
                && self.missing_reads.iter().all(new)
            {
                self.guessed |= self.missing_reads.len() >= limits::SAMPLE_MISSING_READS_MAX;
                self.missing_reads
                    .truncate(limits::SAMPLE_MISSING_READS_MAX - 1);
                self.missing_reads.push((hidden, Key::copy_from_slice(key)));
            }
            return known || recording.unrecorded != Unrecorded::Fail;
        }
        if !self.overflowed && self.known(key, hidden, payload).is_none() {
            self.overflowed = self.captured.reads.len() >= limits::CAPTURED_READS_MAX;
            self.captured.reads.push(Read {
                key: KeyRef::new(key, payload),
                hidden,
                entry: entry(),
            });
        }
        true
    }

    pub(super) fn known(&self, key: &[u8], hidden: bool, payload: &[u8]) -> Option<&Read> {
        self.captured.read(key, hidden, payload)
    }

    /// Decides how to answer the next call of `put`, `watch` or `keys`. A put that was not refused
    /// is executed again, because the same entries give the same result.
    pub(super) fn next_import(&mut self, kind: ImportKind) -> NextImport {
        self.calls += 1;
        let Some(recording) = &self.recording else {
            return NextImport::Live;
        };
        let is_strict = recording.unrecorded == Unrecorded::Fail;
        let mut imports = recording.captured.imports.iter();
        let recorded = imports.find(|(call, _)| *call == self.calls);
        let recorded = recorded.filter(|(_, it)| is_strict || it.answers(kind));
        match recorded {
            Some((_, imported)) => {
                self.refused += usize::from(matches!(imported, Imported::Refused(_)));
                NextImport::Recorded(imported.clone())
            }
            None if kind == ImportKind::Put => {
                self.put = true;
                NextImport::Live
            }
            None => {
                self.diverged = true;
                match recording.unrecorded {
                    Unrecorded::Fail => return NextImport::Unknown,
                    // The complete table is available, but watches are not recorded.
                    Unrecorded::FromState => self.guessed |= kind != ImportKind::Keys,
                    Unrecorded::Collect => self.guessed = true,
                }
                NextImport::Live
            }
        }
    }

    /// Notes the result of the call that the last `next_import` was for.
    pub(super) fn imported(&mut self, imported: impl FnOnce() -> Imported) {
        if self.recording.is_none() && !self.overflowed {
            let imported = imported();
            self.overflowed = self.captured.imports.len() >= limits::CAPTURED_READS_MAX
                || matches!(&imported, Imported::Page(page) if page_bytes(page) > limits::CAPTURED_PAGE_BYTES_MAX);
            self.captured.imports.push((self.calls, imported));
        }
    }

    /// Notes that the client lacks a right to a key.
    pub(super) fn denied(&mut self, key: &[u8], right: Right, payload: &[u8]) {
        if self.recording.is_none()
            && !self.overflowed
            && !self.captured.denies(key, right, payload)
        {
            self.overflowed = self.captured.imports.len() >= limits::CAPTURED_READS_MAX;
            let denied = Imported::Denied(KeyRef::new(key, payload), right);
            self.captured.imports.push((0, denied));
        }
    }

    /// Whether the client of the recorded run lacked a right to a key.
    pub(super) fn was_denied(&self, key: &[u8], right: Right, payload: &[u8]) -> bool {
        let recording = self.recording.as_ref();
        recording.is_some_and(|it| it.captured.denies(key, right, payload))
    }

    /// The recorded value of a property. The outer `None` means that it must be looked up in
    /// the request.
    pub(super) fn recorded_property(&mut self, name: &str) -> Option<Option<String>> {
        let recording = self.recording.as_ref()?;
        let asked = recording.captured.properties.iter();
        let found = asked.clone().find(|(asked, _)| **asked == *name);
        self.diverged |= found.is_none();
        // A request that was handled just now still has its properties; an old recording does not.
        self.guessed |= found.is_none() && recording.unrecorded == Unrecorded::FromState;
        match found {
            Some((_, value)) => Some(value.as_deref().map(str::to_owned)),
            None if recording.unrecorded == Unrecorded::FromState => Some(None),
            None => None,
        }
    }

    /// Notes a property that the policy asked for.
    pub(super) fn property(&mut self, name: &str, value: Option<&str>) {
        let properties = &mut self.captured.properties;
        if self.recording.is_none()
            && !self.overflowed
            && properties.iter().all(|(asked, _)| **asked != *name)
        {
            self.overflowed = properties.len() >= limits::CAPTURED_READS_MAX;
            properties.push((name.into(), value.map(Into::into)));
        }
    }

    pub(super) fn recorded_seed(&mut self) -> Option<[u8; 32]> {
        let recording = self.recording.as_ref()?;
        let seed = recording.captured.seed;
        self.diverged |= seed.is_none();
        self.guessed |= seed.is_none() && recording.unrecorded == Unrecorded::FromState;
        seed
    }

    pub(super) fn seed(&mut self, seed: [u8; 32]) {
        self.captured.seed = Some(seed);
    }

    /// Returns what was captured, or `None` if it exceeds the limits in number. If there is none,
    /// or [it is large](CapturedReads::is_large), the answer is stored whole.
    pub(super) fn take(&mut self) -> Option<CapturedReads> {
        let captured = std::mem::take(&mut self.captured);
        (!self.overflowed).then_some(captured)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    /// Whether the next import is executed.
    fn is_live(run: &mut ReadSet, kind: ImportKind) -> bool {
        matches!(run.next_import(kind), NextImport::Live)
    }

    /// The recorded result of the next import.
    fn recorded(run: &mut ReadSet, kind: ImportKind) -> Option<Imported> {
        match run.next_import(kind) {
            NextImport::Recorded(imported) => Some(imported),
            NextImport::Live | NextImport::Unknown => None,
        }
    }

    #[test]
    fn key_in_the_payload_is_stored_as_a_range() {
        let payload = Bytes::from_static(b"SET key value");
        let key = payload.slice(4..7);
        let of = KeyRef::new(&key, &payload);
        assert_eq!(of, KeyRef::Payload(4..7));
        assert_eq!(of.resolve(&payload), Some(&b"key"[..]));
        // The payload of a redelivery is another buffer with the same bytes.
        assert_eq!(of.resolve(b"SET key value"), Some(&b"key"[..]));
        assert_eq!(of.resolve(b"SET"), None);
        let elsewhere = KeyRef::new(b"key", &payload);
        assert_eq!(elsewhere, KeyRef::Own(Bytes::from_static(b"key")));
        let empty = within(&payload[13..], &payload);
        assert_eq!(empty, None, "an empty part has no position");
        assert_eq!(within(&payload, &payload[..5]), None);
    }

    #[test]
    fn read_set_beyond_limits_is_not_captured_or_large() {
        let mut read_set = ReadSet::default();
        let read = |read_set: &mut ReadSet, n: usize| {
            read_set.read(format!("key {n}").as_bytes(), false, b"", || None)
        };
        for n in 0..limits::CAPTURED_READS_MAX {
            assert!(read(&mut read_set, n) && read(&mut read_set, n));
        }
        let reads = read_set.captured.reads.len();
        assert_eq!(reads, limits::CAPTURED_READS_MAX, "each key once");
        assert!(read(&mut read_set, limits::CAPTURED_READS_MAX));
        assert!(read_set.take().is_none());

        for (bytes, is_large) in [(1, false), (limits::CAPTURED_BYTES_MAX as usize, true)] {
            let mut read_set = ReadSet::default();
            let entry = Entry::new(b"k", &vec![0; bytes], Stamp::default(), None, None);
            read_set.read(b"k", false, b"", || Some(entry));
            let captured = read_set.take().unwrap();
            assert_eq!(captured.is_large(), is_large);
            assert_eq!(captured.reads[0].key.resolve(b""), Some(&b"k"[..]));
        }
    }

    /// Regression: remembered requests held blocks with long keys that counted nothing.
    #[test]
    fn key_in_the_block_of_a_captured_entry_counts() {
        let payload = Bytes::from(vec![b'k'; limits::CAPTURED_BYTES_MAX as usize]);
        let entry = Entry::new(&payload, b"v", Stamp::default(), None, None);
        let mut read_set = ReadSet::default();
        read_set.read(&payload, false, &payload, || Some(entry));
        let mut captured = read_set.take().unwrap();
        assert!(matches!(captured.reads[0].key, KeyRef::Payload(_)));
        assert!(captured.is_large());
        let cost_bytes = captured.cost_bytes();
        assert!(cost_bytes > payload.len() as u64);
        // A snapshot leaves the key out.
        captured.reads[0].entry = Some(Entry::new(b"", b"v", Stamp::default(), None, None));
        assert_eq!(captured.cost_bytes(), cost_bytes);
    }

    #[test]
    fn strict_replay_diverges_on_an_unrecorded_read() {
        let mut read_set = ReadSet::default();
        assert!(read_set.read(b"a", false, b"", || None));
        assert!(is_live(&mut read_set, ImportKind::Unwatch));
        read_set.imported(|| Imported::Unwatched(true));
        // A put that succeeded.
        assert!(is_live(&mut read_set, ImportKind::Put));
        assert!(is_live(&mut read_set, ImportKind::Put));
        read_set.imported(|| Imported::Refused(Fault::Quota));
        read_set.property("x", Some("1"));
        let captured = read_set.take().unwrap();

        let recording = |unrecorded| Recording {
            captured: captured.clone(),
            unrecorded,
        };
        let mut strict = ReadSet::replaying(recording(Unrecorded::Fail));
        assert!(strict.read(b"a", false, b"", || None));
        let unwatched = recorded(&mut strict, ImportKind::Unwatch);
        assert_eq!(unwatched, Some(Imported::Unwatched(true)));
        assert!(is_live(&mut strict, ImportKind::Put));
        let refused = recorded(&mut strict, ImportKind::Put);
        assert_eq!(refused, Some(Imported::Refused(Fault::Quota)));
        assert_eq!(strict.recorded_property("x"), Some(Some("1".to_owned())));
        assert!(!strict.diverged);
        let is_known = strict.read(b"a", true, b"", || None);
        assert!(!is_known, "a hidden key is another key");
        assert!(strict.diverged);
        let unknown = strict.next_import(ImportKind::Watch);
        assert!(matches!(unknown, NextImport::Unknown));
        assert_eq!(strict.recorded_property("y"), None);

        let mut lenient = ReadSet::replaying(recording(Unrecorded::FromState));
        assert!(lenient.read(b"b", false, b"", || None) && lenient.diverged);
        assert!(!lenient.guessed(), "the table has the answer");
        assert_eq!(lenient.recorded_property("y"), Some(None));
        assert!(lenient.guessed());
    }

    #[test]
    fn lenient_replay_reports_unknown_results() {
        let lenient = |imports: &[(u32, Imported)]| {
            let mut recording = Recording {
                captured: CapturedReads::default(),
                unrecorded: Unrecorded::FromState,
            };
            recording.captured.imports = imports.to_vec();
            ReadSet::replaying(recording)
        };
        // Keys can be read from the table; watches are recorded nowhere.
        let mut run = lenient(&[]);
        assert!(is_live(&mut run, ImportKind::Keys) && !run.guessed());
        assert!(is_live(&mut run, ImportKind::Watch) && run.guessed());
        // A recorded result of another import must not be used.
        let mut run = lenient(&[(1, Imported::Watched)]);
        assert!(is_live(&mut run, ImportKind::Keys) && !run.guessed());
        let mut run = lenient(&[(1, Imported::Watched)]);
        assert!(recorded(&mut run, ImportKind::Watch).is_some() && !run.guessed());
        let mut run = lenient(&[(1, Imported::Watched)]);
        assert!(is_live(&mut run, ImportKind::Unwatch) && run.guessed());
        // A quota that refused the second put then refuses it now.
        let quota = [(2, Imported::Refused(Fault::Quota))];
        let mut run = lenient(&quota);
        assert!(is_live(&mut run, ImportKind::Put) && run.guessed());
        assert!(recorded(&mut run, ImportKind::Put).is_some() && !run.guessed());
        // A run that puts nothing needs no quota.
        let mut run = lenient(&quota);
        assert!(is_live(&mut run, ImportKind::Keys));
        assert!(is_live(&mut run, ImportKind::Keys) && !run.guessed());
        let mut run = lenient(&[]);
        assert!(run.recorded_seed().is_none() && run.guessed());
    }
}
