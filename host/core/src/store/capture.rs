//! What a request saw, kept so that it can be run again and give the same answer.
//!
//! What enters: every read of the table and every import whose answer the table alone does not give
//! again. What leaves: [`Evidence`], or nothing where keeping it would cost more than the answer itself.

use std::ops::Range;

use super::entry::{Entry, Key};
use crate::limits;
use crate::policy::{Fault, Page};
use statehouse_protocol::rights::Right;

/// A key, as a part of the payload where it stands there: most do, and a duplicate brings the payload again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyRef {
    /// A range of the payload.
    Payload(Range<u32>),
    /// Anything else.
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

    /// The key; none where the payload is not the one it was made with.
    pub fn resolve<'a>(&'a self, payload: &'a [u8]) -> Option<&'a [u8]> {
        match self {
            Self::Payload(range) => payload.get(range.start as usize..range.end as usize),
            Self::Own(key) => Some(key),
        }
    }
}

/// Where `part` lies in `whole`, if it is a slice of it.
pub(super) fn within(part: &[u8], whole: &[u8]) -> Option<Range<u32>> {
    let start = part.as_ptr().addr().checked_sub(whole.as_ptr().addr())?;
    let end = start.checked_add(part.len())?;
    if part.is_empty() || end > whole.len() {
        return None;
    }
    Some(u32::try_from(start).ok()?..u32::try_from(end).ok()?)
}

/// A key that was read, and what it held before the request, expired or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Read {
    /// The key.
    pub key: KeyRef,
    /// Whether it was a policy's own.
    pub hidden: bool,
    /// Its entry.
    pub entry: Option<Entry>,
}

/// The answer of an import that reading the same keys does not give again.
#[derive(Clone, Debug)]
pub enum Imported {
    /// A put, or a watch, was refused: for a quota, a bound of the configuration, a right.
    Refused(Fault),
    /// A watch was registered.
    Watched,
    /// A watch was ended, or there was none.
    Unwatched(bool),
    /// A page of keys.
    Page(Page),
    /// Whatever touched this key was refused, since the client did not have this right to it.
    Denied(KeyRef, Right),
}

impl PartialEq for Imported {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Refused(a), Self::Refused(b)) => match (a, b) {
                (Fault::Denied, Fault::Denied) | (Fault::Quota, Fault::Quota) => true,
                (Fault::Other(a), Fault::Other(b)) => a == b,
                _ => false,
            },
            (Self::Watched, Self::Watched) => true,
            (Self::Unwatched(a), Self::Unwatched(b)) => a == b,
            (Self::Page(a), Self::Page(b)) => a.keys == b.keys && a.next == b.next,
            (Self::Denied(a, right), Self::Denied(b, other)) => a == b && right == other,
            _ => false,
        }
    }
}

/// A user property that was asked for.
pub type Property = (Box<str>, Option<Box<str>>);

/// Everything that a handler's answer depended on, besides the request itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Evidence {
    /// The keys read, each once.
    pub reads: Vec<Read>,
    /// Answers by the number of the call, counted over all calls of `put`, `watch` and `keys` from one on. What a client had
    /// no right to has the number zero: it is the same for every call.
    pub imports: Vec<(u32, Imported)>,
    /// User properties.
    pub properties: Vec<Property>,
    /// What the request's pseudo-random bytes come from, where it drew any.
    pub seed: Option<[u8; 32]>,
}

impl Evidence {
    /// The read of a key.
    fn read(&self, key: &[u8], hidden: bool, payload: &[u8]) -> Option<&Read> {
        let is_it = |it: &&Read| it.hidden == hidden && it.key.resolve(payload) == Some(key);
        self.reads.iter().find(is_it)
    }

    /// Whether the client had no right to a key.
    fn denies(&self, key: &[u8], right: Right, payload: &[u8]) -> bool {
        self.imports.iter().any(|(_, imported)| {
            matches!(imported, Imported::Denied(it, denied) if *denied == right && it.resolve(payload) == Some(key))
        })
    }

    /// What keeping it costs, in bytes.
    pub fn cost_bytes(&self) -> u64 {
        let reads = self.reads.iter().map(|read| {
            let key = match &read.key {
                KeyRef::Payload(_) => 0,
                KeyRef::Own(key) => key.len() as u64,
            };
            // The entry is shared until somebody writes the key; then it is held for this alone.
            key + size_of::<Read>() as u64
                + read.entry.as_ref().map_or(0, Entry::weight_without_key)
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

/// The recording of one request, or the playing back of one.
#[derive(Default)]
pub(super) struct Capture {
    evidence: Evidence,
    /// Calls so far.
    calls: u32,
    /// More than is worth keeping.
    overflowed: bool,
    /// What is played back instead of being found out.
    script: Option<Script>,
    /// Whether anything was asked that the recorded run did not ask.
    pub(super) strayed: bool,
    /// Whether a lenient run asked what neither the recording nor the table can answer.
    guessed: bool,
    /// Whether a lenient run put anything that no recorded refusal stood against.
    put: bool,
    /// Recorded refusals that were played back.
    refused: usize,
    /// Keys that a run over parts of the state read beyond them, hidden or not.
    pub(super) wanted: Vec<(bool, Key)>,
}

/// What a call asks, so that no answer to another question is played back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Question {
    /// Whether this may be put.
    Put,
    /// Which keys there are.
    Keys,
    /// Whether a watch may begin.
    Watch,
    /// Whether there was one to end.
    Unwatch,
}

impl Imported {
    fn answers(&self, question: Question) -> bool {
        match self {
            // There is no quota on looking, and nothing refuses an end.
            Self::Refused(Fault::Quota) => matches!(question, Question::Put | Question::Watch),
            Self::Refused(_) => question != Question::Unwatch,
            Self::Watched => question == Question::Watch,
            Self::Unwatched(_) => question == Question::Unwatch,
            Self::Page(_) => question == Question::Keys,
            Self::Denied(..) => false,
        }
    }
}

/// A recorded run that is played back.
pub(super) struct Script {
    pub(super) evidence: Evidence,
    pub(super) beyond: Beyond,
}

/// What answers a question that the recorded run did not ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Beyond {
    /// Nothing: the run has gone astray.
    Nothing,
    /// The state at hand, which is all of it.
    State,
    /// The state at hand, which holds some keys: the others are taken down, to be asked for.
    Parts,
}

/// What to do about an import.
pub(super) enum Cue {
    /// Find it out, as in the recorded run.
    Live,
    /// Answer this.
    Recorded(Imported),
    /// The recorded run did not ask it here, so there is no answer.
    Unknown,
}

impl Capture {
    pub(super) fn playing(script: Script) -> Self {
        Self {
            script: Some(script),
            ..Self::default()
        }
    }

    pub(super) fn is_playing(&self) -> bool {
        self.script.is_some()
    }

    /// Whether the run is played back and may ask more than the recorded one.
    pub(super) fn is_lenient(&self) -> bool {
        self.script
            .as_ref()
            .is_some_and(|script| script.beyond != Beyond::Nothing)
    }

    /// Whether a lenient run rests on anything that is not known: the recorded one might have seen another
    /// answer there. Where a put was refused then and none is now, nobody can say whether it would be.
    pub(super) fn guessed(&self) -> bool {
        let recorded = self.script.iter().flat_map(|it| &it.evidence.imports);
        let refusals = recorded.filter(|(_, it)| matches!(it, Imported::Refused(_)));
        self.guessed || (self.put && self.refused < refusals.count())
    }

    /// Notes a read; the entry is asked for where it is the key's first. False where a strict run strays.
    pub(super) fn read(
        &mut self,
        key: &[u8],
        hidden: bool,
        payload: &[u8],
        entry: impl FnOnce() -> Option<Entry>,
    ) -> bool {
        if let Some(script) = &self.script {
            let known = script.evidence.read(key, hidden, payload).is_some();
            self.strayed |= !known;
            let new = |(h, k): &(bool, Key)| *h != hidden || k != key;
            if !known && script.beyond == Beyond::Parts && self.wanted.iter().all(new) {
                self.guessed |= self.wanted.len() >= limits::OBSERVED_QUESTIONS_MAX;
                self.wanted.truncate(limits::OBSERVED_QUESTIONS_MAX - 1);
                self.wanted.push((hidden, Key::copy_from_slice(key)));
            }
            return known || script.beyond != Beyond::Nothing;
        }
        if !self.overflowed && self.known(key, hidden, payload).is_none() {
            self.overflowed = self.evidence.reads.len() >= limits::EVIDENCE_READS_MAX;
            self.evidence.reads.push(Read {
                key: KeyRef::new(key, payload),
                hidden,
                entry: entry(),
            });
        }
        true
    }

    /// What was noted of a key.
    pub(super) fn known(&self, key: &[u8], hidden: bool, payload: &[u8]) -> Option<&Read> {
        self.evidence.read(key, hidden, payload)
    }

    /// What the next call of `put`, `watch` or `keys` is to do. A put that was not refused is found out
    /// again: the same entries give the same.
    pub(super) fn cue(&mut self, question: Question) -> Cue {
        self.calls += 1;
        let Some(script) = &self.script else {
            return Cue::Live;
        };
        let recorded = script
            .evidence
            .imports
            .iter()
            .find(|(call, _)| *call == self.calls)
            .filter(|(_, imported)| script.beyond == Beyond::Nothing || imported.answers(question));
        match recorded {
            Some((_, imported)) => {
                self.refused += usize::from(matches!(imported, Imported::Refused(_)));
                Cue::Recorded(imported.clone())
            }
            None if question == Question::Put => {
                self.put = true;
                Cue::Live
            }
            None => {
                self.strayed = true;
                match script.beyond {
                    Beyond::Nothing => return Cue::Unknown,
                    // The table is at hand; who watched what is recorded nowhere.
                    Beyond::State => self.guessed |= question != Question::Keys,
                    Beyond::Parts => self.guessed = true,
                }
                Cue::Live
            }
        }
    }

    /// Notes the answer of the call that the last cue was for.
    pub(super) fn imported(&mut self, imported: impl FnOnce() -> Imported) {
        if self.script.is_none() && !self.overflowed {
            let imported = imported();
            self.overflowed = self.evidence.imports.len() >= limits::EVIDENCE_READS_MAX
                || matches!(&imported, Imported::Page(page) if page_bytes(page) > limits::EVIDENCE_PAGE_BYTES_MAX);
            self.evidence.imports.push((self.calls, imported));
        }
    }

    /// Notes that the client had no right to a key.
    pub(super) fn denied(&mut self, key: &[u8], right: Right, payload: &[u8]) {
        if self.script.is_none() && !self.overflowed && !self.evidence.denies(key, right, payload) {
            self.overflowed = self.evidence.imports.len() >= limits::EVIDENCE_READS_MAX;
            let denied = Imported::Denied(KeyRef::new(key, payload), right);
            self.evidence.imports.push((0, denied));
        }
    }

    /// Whether the recorded run had no right to a key.
    pub(super) fn was_denied(&self, key: &[u8], right: Right, payload: &[u8]) -> bool {
        let script = self.script.as_ref();
        script.is_some_and(|it| it.evidence.denies(key, right, payload))
    }

    /// The recorded answer to a question for a property.
    pub(super) fn recorded_property(&mut self, name: &str) -> Option<Option<String>> {
        let script = self.script.as_ref()?;
        let asked = script.evidence.properties.iter();
        let found = asked.clone().find(|(asked, _)| **asked == *name);
        self.strayed |= found.is_none();
        // A request that was just handled still has its properties.
        self.guessed |= found.is_none() && script.beyond == Beyond::State;
        match found {
            Some((_, value)) => Some(value.as_deref().map(str::to_owned)),
            None if script.beyond == Beyond::State => Some(None),
            None => None,
        }
    }

    /// Notes a property that was asked for.
    pub(super) fn property(&mut self, name: &str, value: Option<&str>) {
        let properties = &mut self.evidence.properties;
        if self.script.is_none()
            && !self.overflowed
            && properties.iter().all(|(asked, _)| **asked != *name)
        {
            self.overflowed = properties.len() >= limits::EVIDENCE_READS_MAX;
            properties.push((name.into(), value.map(Into::into)));
        }
    }

    /// The recorded seed.
    pub(super) fn recorded_seed(&mut self) -> Option<[u8; 32]> {
        let script = self.script.as_ref()?;
        let seed = script.evidence.seed;
        self.strayed |= seed.is_none();
        self.guessed |= seed.is_none() && script.beyond == Beyond::State;
        seed
    }

    /// Notes the seed.
    pub(super) fn seed(&mut self, seed: [u8; 32]) {
        self.evidence.seed = Some(seed);
    }

    /// What was recorded. None where it is more than is worth keeping: then the answer is kept whole.
    pub(super) fn take(&mut self) -> Option<Evidence> {
        let evidence = std::mem::take(&mut self.evidence);
        (!self.overflowed && evidence.cost_bytes() <= limits::EVIDENCE_BYTES_MAX)
            .then_some(evidence)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn a_slice_of_the_payload_is_a_range_and_anything_else_a_copy() {
        let payload = Bytes::from_static(b"SET key value");
        let key = payload.slice(4..7);
        let of = KeyRef::new(&key, &payload);
        assert_eq!(of, KeyRef::Payload(4..7));
        assert_eq!(of.resolve(&payload), Some(&b"key"[..]));
        // The duplicate's payload is another buffer with the same bytes.
        assert_eq!(of.resolve(b"SET key value"), Some(&b"key"[..]));
        assert_eq!(of.resolve(b"SET"), None);
        let elsewhere = KeyRef::new(b"key", &payload);
        assert_eq!(elsewhere, KeyRef::Own(Bytes::from_static(b"key")));
        assert_eq!(within(&payload[13..], &payload), None, "nothing is nowhere");
        assert_eq!(within(&payload, &payload[..5]), None);
    }

    #[test]
    fn what_is_more_than_an_answer_is_worth_is_not_kept() {
        let mut capture = Capture::default();
        let read = |capture: &mut Capture, n: usize| {
            capture.read(format!("key {n}").as_bytes(), false, b"", || None)
        };
        for n in 0..limits::EVIDENCE_READS_MAX {
            assert!(read(&mut capture, n) && read(&mut capture, n));
        }
        assert_eq!(
            capture.evidence.reads.len(),
            limits::EVIDENCE_READS_MAX,
            "each key once"
        );
        assert!(read(&mut capture, limits::EVIDENCE_READS_MAX));
        assert!(capture.take().is_none());

        let mut capture = Capture::default();
        let big = vec![0; limits::EVIDENCE_BYTES_MAX as usize];
        capture.read(b"k", false, b"", || {
            Some(Entry::new(b"k", &big, Default::default(), None, None))
        });
        assert!(capture.take().is_none());
    }

    #[test]
    fn a_strict_run_strays_where_the_recorded_one_did_not_go() {
        let mut capture = Capture::default();
        assert!(capture.read(b"a", false, b"", || None));
        assert!(matches!(capture.cue(Question::Unwatch), Cue::Live));
        capture.imported(|| Imported::Unwatched(true));
        assert!(
            matches!(capture.cue(Question::Put), Cue::Live),
            "a put that went well"
        );
        assert!(matches!(capture.cue(Question::Put), Cue::Live));
        capture.imported(|| Imported::Refused(Fault::Quota));
        capture.property("x", Some("1"));
        let evidence = capture.take().unwrap();

        let script = |beyond| Script {
            evidence: evidence.clone(),
            beyond,
        };
        let mut strict = Capture::playing(script(Beyond::Nothing));
        assert!(strict.read(b"a", false, b"", || None));
        assert!(matches!(
            strict.cue(Question::Unwatch),
            Cue::Recorded(Imported::Unwatched(true))
        ));
        assert!(matches!(strict.cue(Question::Put), Cue::Live));
        assert!(matches!(
            strict.cue(Question::Put),
            Cue::Recorded(Imported::Refused(Fault::Quota))
        ));
        assert_eq!(strict.recorded_property("x"), Some(Some("1".to_owned())));
        assert!(!strict.strayed);
        assert!(
            !strict.read(b"a", true, b"", || None),
            "hidden is another key"
        );
        assert!(strict.strayed);
        assert!(matches!(strict.cue(Question::Watch), Cue::Unknown));
        assert_eq!(strict.recorded_property("y"), None);

        let mut lenient = Capture::playing(script(Beyond::State));
        assert!(lenient.read(b"b", false, b"", || None) && lenient.strayed);
        assert!(!lenient.guessed(), "the table knows");
        assert_eq!(lenient.recorded_property("y"), Some(None));
        assert!(lenient.guessed());
    }

    #[test]
    fn a_lenient_run_knows_when_it_guesses() {
        let lenient = |imports: &[(u32, Imported)]| {
            let evidence = Evidence {
                imports: imports.to_vec(),
                ..Evidence::default()
            };
            let beyond = Beyond::State;
            Capture::playing(Script { evidence, beyond })
        };
        // Keys are found in the table; a watch nowhere.
        let mut run = lenient(&[]);
        assert!(matches!(run.cue(Question::Keys), Cue::Live) && !run.guessed());
        assert!(matches!(run.cue(Question::Watch), Cue::Live) && run.guessed());
        // The answer to another question is none.
        let mut run = lenient(&[(1, Imported::Watched)]);
        assert!(matches!(run.cue(Question::Keys), Cue::Live) && !run.guessed());
        let mut run = lenient(&[(1, Imported::Watched)]);
        assert!(matches!(run.cue(Question::Watch), Cue::Recorded(_)) && !run.guessed());
        let mut run = lenient(&[(1, Imported::Watched)]);
        assert!(matches!(run.cue(Question::Unwatch), Cue::Live) && run.guessed());
        // A quota that refused the second put then refuses it now.
        let quota = [(2, Imported::Refused(Fault::Quota))];
        let mut run = lenient(&quota);
        assert!(matches!(run.cue(Question::Put), Cue::Live) && run.guessed());
        assert!(matches!(run.cue(Question::Put), Cue::Recorded(_)) && !run.guessed());
        // Whoever puts nothing asks no quota.
        let mut run = lenient(&quota);
        assert!(matches!(run.cue(Question::Keys), Cue::Live));
        assert!(matches!(run.cue(Question::Keys), Cue::Live) && !run.guessed());
        let mut run = lenient(&[]);
        assert!(run.recorded_seed().is_none() && run.guessed());
    }
}
