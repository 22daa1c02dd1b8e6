//! Parses the payload of a request into a command.
//!
//! The order of checks is that of the protocol (section 4): form of the whole payload, verb, count
//! and options, key. The table is not accessible from here.

use statehouse_policy::hlc;
use statehouse_policy::resp::{self, Arguments};
use statehouse_policy::{Dialect, Scope, Span, Stamp};

use crate::reply::Refusal;

/// The verbs of requests. Their order is that of [`Verb::NAMES`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verb {
    Set,
    Get,
    Del,
    Vdel,
    KeyNotify,
    Scan,
    Meta,
}

impl Verb {
    /// The names in metrics.
    pub(crate) const NAMES: [&'static str; 7] =
        ["SET", "GET", "DEL", "VDEL", "KEYNOTIFY", "SCAN", "META"];

    const ALL: [Self; 7] = [
        Self::Set,
        Self::Get,
        Self::Del,
        Self::Vdel,
        Self::KeyNotify,
        Self::Scan,
        Self::Meta,
    ];

    /// In any ASCII case: four examples of the published article are in lower case.
    fn read(word: &[u8]) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|&verb| word.eq_ignore_ascii_case(Self::NAMES[verb as usize].as_bytes()))
    }

    /// Whether the protocol of 2023 has the command.
    fn is_in_preview(self) -> bool {
        !matches!(self, Self::KeyNotify | Self::Meta)
    }
}

/// The condition of a SET.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Condition {
    /// Unconditional.
    Always,
    /// NX.
    Absent,
    /// NEX, with the value to compare with.
    AbsentOrEqual(Span),
    /// IFVERSION, an extension of this store: the key has this version.
    Version(Stamp),
}

/// A well-formed request, as spans of its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// SET.
    Set(Set),
    /// GET.
    Get {
        /// The key to read.
        key: Span,
    },
    /// DEL.
    Del {
        /// The key to delete.
        key: Span,
    },
    /// VDEL.
    Vdel {
        /// The key to delete.
        key: Span,
        /// The value that it must have.
        value: Span,
    },
    /// KEYNOTIFY.
    KeyNotify {
        /// The key to watch.
        key: Span,
        /// Whether to end the watch.
        stop: bool,
    },
    /// KEYNOTIFY with options of this store.
    Follow(Follow),
    /// SCAN, an extension of this store.
    Scan {
        /// The pattern of the keys.
        pattern: Span,
        /// The token of the next page.
        token: Option<Span>,
    },
    /// META, an extension of this store: describes a key without its value.
    Meta {
        /// The key to describe.
        key: Span,
    },
}

/// A SET with its options.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Set {
    /// The key to set.
    pub key: Span,
    /// The new value.
    pub value: Span,
    /// The condition.
    pub condition: Condition,
    /// PX: the time until the key expires, in milliseconds.
    pub expiry_ms: Option<u64>,
}

/// A KEYNOTIFY with PREFIX or FROM, an extension of this store.
///
/// A rule that keeps clients from reading keys must decide about these, too: a watch of a prefix
/// reports the values of all its keys that the client has the right to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Follow {
    /// What to watch.
    pub scope: Scope,
    /// The key or prefix.
    pub key: Span,
    /// FROM: the version after which changes are sent first, as the client wrote it.
    pub since: Option<Span>,
    /// Whether to end the watch.
    pub stop: bool,
}

impl Command {
    pub(crate) fn verb(&self) -> Verb {
        match self {
            Self::Set(_) => Verb::Set,
            Self::Get { .. } => Verb::Get,
            Self::Del { .. } => Verb::Del,
            Self::Vdel { .. } => Verb::Vdel,
            Self::KeyNotify { .. } | Self::Follow(_) => Verb::KeyNotify,
            Self::Scan { .. } => Verb::Scan,
            Self::Meta { .. } => Verb::Meta,
        }
    }

    /// The name of the command, in upper case.
    #[must_use]
    pub fn name(&self) -> &'static str {
        Verb::NAMES[self.verb() as usize]
    }

    /// The index of the command in the list that [`Standard`](crate::Standard) describes.
    #[must_use]
    pub fn index(&self) -> u16 {
        self.verb() as u16
    }

    /// The key that the command concerns; none for SCAN and for a watch of a prefix.
    #[must_use]
    pub fn key(&self) -> Option<Span> {
        match *self {
            Self::Set(Set { key, .. })
            | Self::Get { key }
            | Self::Del { key }
            | Self::Vdel { key, .. }
            | Self::KeyNotify { key, .. }
            | Self::Meta { key } => Some(key),
            Self::Follow(Follow { scope, key, .. }) => (scope == Scope::Key).then_some(key),
            Self::Scan { .. } => None,
        }
    }

    /// The key that the command changes, if any.
    #[must_use]
    pub fn written(&self) -> Option<Span> {
        match *self {
            Self::Set(Set { key, .. }) | Self::Del { key } | Self::Vdel { key, .. } => Some(key),
            Self::Get { .. }
            | Self::KeyNotify { .. }
            | Self::Follow(_)
            | Self::Scan { .. }
            | Self::Meta { .. } => None,
        }
    }
}

/// An error in the form of a request, and the verb if it was recognized.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unreadable {
    pub(crate) verb: Option<Verb>,
    pub(crate) refusal: Refusal,
}

pub(crate) fn parse(payload: &[u8], dialect: Dialect) -> Result<Command, Unreadable> {
    let no_verb = |refusal| Unreadable {
        verb: None,
        refusal,
    };
    // A reference, since the struct is too large to move cheaply.
    let arguments = &resp::parse(payload);
    let Ok(arguments) = arguments else {
        return Err(no_verb(Refusal::Syntax));
    };
    let verb = Verb::read(arguments.get(0))
        .filter(|&verb| verb.is_in_preview() || dialect != Dialect::Preview)
        .ok_or_else(|| no_verb(Refusal::UnknownCommand))?;
    let command = match verb {
        Verb::Set => set(arguments),
        Verb::Get => counted(arguments, 2).map(|[_, key]| Command::Get { key }),
        Verb::Del => counted(arguments, 2).map(|[_, key]| Command::Del { key }),
        Verb::Vdel => counted(arguments, 3).map(|[_, key, value]| Command::Vdel { key, value }),
        Verb::KeyNotify => key_notify(arguments),
        Verb::Scan => scan(arguments),
        Verb::Meta => counted(arguments, 2).map(|[_, key]| Command::Meta { key }),
    };
    command.and_then(named).map_err(|refusal| Unreadable {
        verb: Some(verb),
        refusal,
    })
}

/// The last check of form: the key or pattern is not empty. A prefix may be.
fn named(command: Command) -> Result<Command, Refusal> {
    let name = match command {
        Command::Scan { pattern, .. } => Some(pattern),
        _ => command.key(),
    };
    match name {
        Some(Span { len: 0, .. }) => Err(Refusal::EmptyKey),
        _ => Ok(command),
    }
}

/// All spans of a command with a fixed count.
fn counted<const N: usize>(arguments: &Arguments<'_>, count: usize) -> Result<[Span; N], Refusal> {
    if arguments.count() != count {
        return Err(Refusal::WrongCount);
    }
    leading(arguments)
}

/// The first spans of a command.
fn leading<const N: usize>(arguments: &Arguments<'_>) -> Result<[Span; N], Refusal> {
    let mut spans = [Span { at: 0, len: 0 }; N];
    for (index, span) in spans.iter_mut().enumerate() {
        *span = arguments.span(index).ok_or(Refusal::WrongCount)?;
    }
    Ok(spans)
}

/// The option words of SET.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Word {
    Nx,
    Nex,
    Px,
}

fn word(bytes: &[u8]) -> Option<Word> {
    if bytes.eq_ignore_ascii_case(b"NX") {
        Some(Word::Nx)
    } else if bytes.eq_ignore_ascii_case(b"NEX") {
        Some(Word::Nex)
    } else if bytes.eq_ignore_ascii_case(b"PX") {
        Some(Word::Px)
    } else {
        None
    }
}

/// `SET key value [NX | NEX [expected] | IFVERSION version] [PX ms]`: at most seven. A longer
/// request holds a repeated or an unknown option, so the error is not a wrong count.
const SET_COUNT_MAX: usize = 7;

fn set(arguments: &Arguments<'_>) -> Result<Command, Refusal> {
    let [_, key, value] = leading(arguments)?;
    if arguments.count() > SET_COUNT_MAX {
        return Err(Refusal::Syntax);
    }
    let mut condition = None;
    let mut expiry_ms = None;
    let mut at = 3;
    while at < arguments.count() {
        match word(arguments.get(at)) {
            Some(Word::Nx) if condition.is_none() => {
                condition = Some(Condition::Absent);
                at += 1;
            }
            Some(Word::Nex) if condition.is_none() => {
                let expected = expected(arguments, at + 1)?;
                condition = Some(Condition::AbsentOrEqual(expected.unwrap_or(value)));
                at += if expected.is_some() { 2 } else { 1 };
            }
            Some(Word::Px) if expiry_ms.is_none() => {
                expiry_ms = Some(milliseconds(arguments.get(at + 1)).ok_or(Refusal::Syntax)?);
                at += 2;
            }
            // Not a `Word`: it may be the argument of a NEX.
            None if condition.is_none() && is_if_version(arguments.get(at)) => {
                let version = version(arguments.get(at + 1)).ok_or(Refusal::Syntax)?;
                condition = Some(Condition::Version(version));
                at += 2;
            }
            _ => return Err(Refusal::Syntax),
        }
    }
    let condition = condition.unwrap_or(Condition::Always);
    Ok(Command::Set(Set {
        key,
        value,
        condition,
        expiry_ms,
    }))
}

/// The argument of a NEX, where `at` is the next position. Real clients send no argument and mean
/// the value that is being set; the article also uses one. Only the count distinguishes the two.
fn expected(arguments: &Arguments<'_>, at: usize) -> Result<Option<Span>, Refusal> {
    let is = |index, expected| word(arguments.get(index)) == Some(expected);
    match arguments.count() - at {
        0 => Ok(None),
        2 if is(at, Word::Px) => Ok(None),
        // `NEX NX` or `NEX PX` is a mistake, not a comparison.
        1 if word(arguments.get(at)).is_none() => Ok(arguments.span(at)),
        3 if is(at + 1, Word::Px) => Ok(arguments.span(at)),
        _ => Err(Refusal::Syntax),
    }
}

fn is_if_version(word: &[u8]) -> bool {
    word.eq_ignore_ascii_case(b"IFVERSION")
}

/// A version as the store writes it. Its node is always the store, so it is not compared.
fn version(text: &[u8]) -> Option<Stamp> {
    let text = std::str::from_utf8(text).ok()?;
    Some(hlc::parse(text).ok()?.stamp())
}

/// 1 to 2^63-1, in digits: an expiry of zero would be a deletion, and clients use signed numbers.
fn milliseconds(digits: &[u8]) -> Option<u64> {
    let value = resp::decimal(digits)?;
    (value > 0 && i64::try_from(value).is_ok()).then_some(value)
}

/// `KEYNOTIFY key [PREFIX] [FROM version | STOP] [GET]`. GET asks for the value, which is always
/// sent.
const KEYNOTIFY_COUNT_MAX: usize = 6;

fn key_notify(arguments: &Arguments<'_>) -> Result<Command, Refusal> {
    let [_, key] = leading(arguments)?;
    if arguments.count() > KEYNOTIFY_COUNT_MAX {
        return Err(Refusal::Syntax);
    }
    let mut stop = false;
    let mut get = false;
    let mut prefix = false;
    let mut since = None;
    let mut index = 2;
    while index < arguments.count() {
        let option = arguments.get(index);
        index += 1;
        if option.eq_ignore_ascii_case(b"FROM") && since.is_none() {
            since = Some(arguments.span(index).ok_or(Refusal::Syntax)?);
            index += 1;
            continue;
        }
        let seen = if option.eq_ignore_ascii_case(b"STOP") {
            &mut stop
        } else if option.eq_ignore_ascii_case(b"GET") {
            &mut get
        } else if option.eq_ignore_ascii_case(b"PREFIX") {
            &mut prefix
        } else {
            return Err(Refusal::Syntax);
        };
        if std::mem::replace(seen, true) {
            return Err(Refusal::Syntax);
        }
    }
    if stop && since.is_some() {
        return Err(Refusal::Syntax);
    }
    let scope = if prefix { Scope::Prefix } else { Scope::Key };
    Ok(match (scope, since) {
        (Scope::Key, None) => Command::KeyNotify { key, stop },
        _ => Command::Follow(Follow {
            scope,
            key,
            since,
            stop,
        }),
    })
}

fn scan(arguments: &Arguments<'_>) -> Result<Command, Refusal> {
    let [_, pattern] = leading(arguments)?;
    match arguments.count() {
        2 | 3 => Ok(Command::Scan {
            pattern,
            token: arguments.span(2),
        }),
        _ => Err(Refusal::WrongCount),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(words: &[&[u8]]) -> Result<Command, Refusal> {
        parse(&resp::request(words), Dialect::Sdk).map_err(|unreadable| unreadable.refusal)
    }

    /// The condition and expiry of a SET with these options.
    fn options(options: &[&[u8]]) -> Result<(Condition, Option<u64>), Refusal> {
        let words = [&[b"SET" as &[u8], b"key", b"value"], options].concat();
        match read(&words)? {
            Command::Set(set) => Ok((set.condition, set.expiry_ms)),
            other => panic!("{other:?} is no SET"),
        }
    }

    #[test]
    fn nex_recognizes_its_argument_by_the_count() {
        let value = Span { at: 26, len: 5 };
        let expected = |at, len| Condition::AbsentOrEqual(Span { at, len });
        let payload = resp::request(&[b"SET", b"key", b"value"]);
        assert_eq!(&payload[resp::range(value)], b"value");
        let own = Condition::AbsentOrEqual(value);
        assert_eq!(options(&[b"NEX"]), Ok((own, None)));
        assert_eq!(options(&[b"NEX", b"PX", b"5"]), Ok((own, Some(5))));
        assert_eq!(options(&[b"PX", b"5", b"NEX"]), Ok((own, Some(5))));
        assert_eq!(options(&[b"NEX", b"x"]), Ok((expected(46, 1), None)));
        let before = options(&[b"NEX", b"x", b"PX", b"5"]);
        assert_eq!(before, Ok((expected(46, 1), Some(5))));
        let behind = options(&[b"PX", b"5", b"NEX", b"x"]);
        assert_eq!(behind, Ok((expected(61, 1), Some(5))));
        assert_eq!(options(&[b"NEX", b"NX"]), Err(Refusal::Syntax));
        assert_eq!(options(&[b"NEX", b"x", b"y"]), Err(Refusal::Syntax));
    }

    #[test]
    fn px_counts_from_one_to_the_largest_signed_number() {
        let px = |digits: &str| options(&[b"PX", digits.as_bytes()]).map(|(_, ms)| ms);
        assert_eq!(px("1"), Ok(Some(1)));
        assert_eq!(px("9223372036854775807"), Ok(Some(i64::MAX as u64)));
        for digits in [
            "",
            "0",
            "-1",
            "+1",
            "1.5",
            "9223372036854775808",
            "18446744073709551617",
        ] {
            assert_eq!(px(digits), Err(Refusal::Syntax), "{digits:?}");
        }
    }

    #[test]
    fn the_preview_has_no_notifications() {
        let payload = resp::request(&[b"KEYNOTIFY", b"k"]);
        assert!(parse(&payload, Dialect::Documents).is_ok());
        let unreadable = Unreadable {
            verb: None,
            refusal: Refusal::UnknownCommand,
        };
        assert_eq!(parse(&payload, Dialect::Preview), Err(unreadable));
    }

    /// Words of commands, and some others.
    fn words() -> impl Strategy<Value = Vec<Vec<u8>>> {
        let verb = prop::sample::select(
            &["SET", "set", "GET", "DEL", "VDEL", "KEYNOTIFY", "SCAN", "X"][..],
        );
        let word =
            prop::sample::select(&["", "k", "NX", "nex", "PX", "10", "0", "STOP", "GET"][..]);
        (verb, proptest::collection::vec(word, 0..9)).prop_map(|(verb, words)| {
            std::iter::once(verb)
                .chain(words)
                .map(|word| word.as_bytes().to_vec())
                .collect()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn a_command_is_made_of_what_was_sent(words in words()) {
            let words: Vec<&[u8]> = words.iter().map(Vec::as_slice).collect();
            let payload = resp::request(&words);
            if let Ok(command) = parse(&payload, Dialect::Sdk) {
                let name = Verb::NAMES[command.verb() as usize];
                prop_assert!(words[0].eq_ignore_ascii_case(name.as_bytes()));
                if let Some(key) = command.key() {
                    prop_assert_eq!(&payload[resp::range(key)], words[1]);
                    prop_assert!(!words[1].is_empty());
                }
                if let Command::Set(set) = command {
                    let has = |name: &[u8]| words[3..].iter().any(|word| word.eq_ignore_ascii_case(name));
                    prop_assert_eq!(&payload[resp::range(set.value)], words[2]);
                    prop_assert!(set.condition == Condition::Always || has(b"NX") || has(b"NEX"));
                    prop_assert!(set.expiry_ms.is_none() || (has(b"PX") && set.expiry_ms == Some(10)));
                }
            }
        }

        #[test]
        fn no_bytes_panic(payload in proptest::collection::vec(any::<u8>(), 0..100)) {
            prop_assert!(parse(&payload, Dialect::Sdk).is_err());
        }
    }
}
