//! The state store protocol over a plain map, written from its text and from nobody's code.
//!
//! It is told of a request as words and clock readings, and says what must be answered and who must hear of what.
//! Versions it does not predict but bounds: that is all the protocol promises of them.

use std::collections::BTreeMap;

use statehouse_core::clock::Stamp;
use statehouse_core::request::Dialect;

/// A clock reading as a client writes it, or something that is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Reading {
    Clock(u64, u32, &'static str),
    Nonsense(&'static str),
}

impl Reading {
    pub(crate) fn text(&self) -> String {
        match self {
            Self::Clock(wall, counter, node) => format!("{wall:015}:{counter:05}:{node}"),
            Self::Nonsense(text) => (*text).to_owned(),
        }
    }
}

/// A fencing token: ordered by wall, counter, node.
type Token = (u64, u32, &'static str);

#[derive(Clone, Debug)]
pub(crate) struct Held {
    /// Who wrote it.
    pub(crate) owner: usize,
    pub(crate) value: Vec<u8>,
    pub(crate) version: Stamp,
    pub(crate) fence: Option<Token>,
    pub(crate) expires_ms: Option<u64>,
}

/// A request, as far as the protocol looks at it.
pub(crate) struct Asked<'a> {
    pub(crate) client: usize,
    pub(crate) dialect: Dialect,
    pub(crate) words: &'a [Vec<u8>],
    pub(crate) timestamp: Option<&'a Reading>,
    pub(crate) token: Option<&'a Reading>,
    pub(crate) now_ms: u64,
}

/// The version that an answer must carry.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Version {
    None,
    Is(Stamp),
    /// A new one, above the reading.
    Above(u64, u32),
}

/// What must come of a request.
#[derive(Debug)]
pub(crate) struct Due {
    pub(crate) payload: Vec<u8>,
    pub(crate) version: Version,
    /// Whether a redelivery is owed this answer.
    pub(crate) owed: bool,
    pub(crate) told: Vec<Told>,
    change: Change,
}

/// Who hears of what.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Told {
    pub(crate) client: usize,
    pub(crate) key: Vec<u8>,
    pub(crate) payload: Vec<u8>,
}

#[derive(Debug)]
enum Change {
    Nothing,
    Put(Vec<u8>, Held),
    Remove(Vec<u8>),
    Watch(Vec<u8>, usize, Dialect),
    Unwatch(Vec<u8>, usize),
}

#[derive(Default)]
pub(crate) struct Oracle {
    pub(crate) keys: BTreeMap<Vec<u8>, Held>,
    watches: BTreeMap<Vec<u8>, BTreeMap<usize, Dialect>>,
    keys_max: usize,
    client_keys_max: usize,
}

const AHEAD_MS: u64 = 60_000;

impl Oracle {
    /// An empty store that may hold so many keys, and so many of one client.
    pub(crate) fn new(keys_max: usize, client_keys_max: usize) -> Self {
        Self {
            keys_max,
            client_keys_max,
            ..Self::default()
        }
    }

    /// What has expired is gone, and its watchers hear of it.
    pub(crate) fn expire(&mut self, now_ms: u64) -> Vec<Told> {
        let gone = |held: &Held| held.expires_ms.is_some_and(|ms| ms <= now_ms);
        let due = self.keys.iter().filter(|(_, held)| gone(held));
        let due: Vec<Vec<u8>> = due.map(|(key, _)| key.clone()).collect();
        let mut told = Vec::new();
        for key in due {
            self.keys.remove(&key);
            told.extend(self.watchers(&key, None));
        }
        told
    }

    /// A connection ended, and its watches with it.
    pub(crate) fn gone(&mut self, client: usize) {
        for watchers in self.watches.values_mut() {
            watchers.remove(&client);
        }
    }

    /// Nobody took a notification for this key.
    pub(crate) fn unheard(&mut self, client: usize, key: &[u8]) {
        if let Some(watchers) = self.watches.get_mut(key) {
            watchers.remove(&client);
        }
    }

    /// Who watches what, in order.
    pub(crate) fn watched(&self) -> Vec<(Vec<u8>, usize, Dialect)> {
        let of = |(key, watchers): (&Vec<u8>, &BTreeMap<usize, Dialect>)| {
            let watchers = watchers.iter();
            let watched = watchers.map(|(client, dialect)| (key.clone(), *client, *dialect));
            watched.collect::<Vec<_>>()
        };
        self.watches.iter().flat_map(of).collect()
    }

    pub(crate) fn is_watched(&self) -> bool {
        self.watches.values().any(|watchers| !watchers.is_empty())
    }

    /// Who hears that a key has this value from now on, or is gone.
    pub(crate) fn watchers(&self, key: &[u8], value: Option<&[u8]>) -> Vec<Told> {
        let watchers = self.watches.get(key).into_iter().flatten();
        let told = |(client, dialect): (&usize, &Dialect)| Told {
            client: *client,
            key: key.to_vec(),
            payload: match (value, dialect) {
                (Some(value), _) => [
                    b"*4\r\n$6\r\nNOTIFY\r\n$3\r\nSET\r\n$5\r\nVALUE\r\n$",
                    value.len().to_string().as_bytes(),
                    b"\r\n",
                    value,
                    b"\r\n",
                ]
                .concat(),
                (None, Dialect::Sdk) => b"*2\r\n$6\r\nNOTIFY\r\n$6\r\nDELETE\r\n".to_vec(),
                (None, _) => b"*2\r\n$6\r\nNOTIFY\r\n$3\r\nDEL\r\n".to_vec(),
            },
        };
        watchers.map(told).collect()
    }

    /// What must come of a request. Nothing is changed yet: its version is not known.
    pub(crate) fn ask(&self, asked: &Asked<'_>) -> Due {
        self.decide(asked).unwrap_or_else(|refusal| {
            let (text, owed) = refusal;
            Due {
                payload: format!("-ERR {text}\r\n").into_bytes(),
                version: Version::None,
                owed,
                told: Vec::new(),
                change: Change::Nothing,
            }
        })
    }

    /// The version is known, and it happens.
    pub(crate) fn apply(&mut self, due: Due, version: Option<Stamp>) {
        match due.change {
            Change::Nothing => {}
            Change::Put(key, held) => {
                let version = version.expect("a SET that is done has a version");
                self.keys.insert(key, Held { version, ..held });
            }
            Change::Remove(key) => drop(self.keys.remove(&key)),
            Change::Watch(key, client, dialect) => {
                self.watches.entry(key).or_default().insert(client, dialect);
            }
            Change::Unwatch(key, client) => {
                self.watches.entry(key).or_default().remove(&client);
            }
        }
    }

    fn decide(&self, asked: &Asked<'_>) -> Result<Due, (&'static str, bool)> {
        // An error of form is not owed to a redelivery, and a read is not either.
        let form = |text| Err((text, false));
        let verb = asked.words[0].to_ascii_uppercase();
        let words: Vec<&[u8]> = asked.words[1..].iter().map(Vec::as_slice).collect();
        let preview = asked.dialect == Dialect::Preview;
        let (least, most) = match &verb[..] {
            b"SET" => (2, usize::MAX),
            b"GET" | b"DEL" => (1, 1),
            b"VDEL" => (2, 2),
            b"KEYNOTIFY" if !preview => (1, 3),
            b"SCAN" => (1, 2),
            _ => return form("unknown command"),
        };
        if words.len() < least {
            return form("wrong number of arguments");
        }
        if words.len() > most {
            // One option too many is an unknown or a repeated one.
            let options = verb == b"KEYNOTIFY";
            return form(if options {
                "syntax error"
            } else {
                "wrong number of arguments"
            });
        }
        let options = match &verb[..] {
            b"SET" => Some(set_options(&words[2..]).ok_or(("syntax error", false))?),
            _ => None,
        };
        let stop = match &verb[..] {
            b"KEYNOTIFY" => keynotify_options(&words[1..]).ok_or(("syntax error", false))?,
            _ => false,
        };
        let key = words[0];
        if key.is_empty() {
            return form("the key length is zero");
        }
        match (&verb[..], options) {
            (b"SET", Some(options)) => self.set(asked, key, words[1], &options),
            (b"GET", _) => Ok(self.get(key)),
            (b"DEL", _) => self.delete(asked, key, None),
            (b"VDEL", _) => self.delete(asked, key, Some(words[1])),
            (b"SCAN", _) => Ok(self.scan(key)),
            _ => Ok(self.keynotify(asked, key, stop)),
        }
    }

    fn set(
        &self,
        asked: &Asked<'_>,
        key: &[u8],
        value: &[u8],
        options: &Options<'_>,
    ) -> Result<Due, (&'static str, bool)> {
        let (wall, counter) = match asked.timestamp {
            None => return Err(("missing timestamp", false)),
            Some(Reading::Nonsense(_)) => return Err(("malformed timestamp", false)),
            Some(Reading::Clock(wall, counter, _)) => (*wall, *counter),
        };
        if wall > asked.now_ms + AHEAD_MS {
            return Err((
                "the request timestamp is too far in the future; ensure that the client and broker system clocks are synchronized",
                true,
            ));
        }
        let token = token(asked)?;
        let held = self.keys.get(key);
        let fence = fenced(asked, held, token)?;
        let expected = match options.condition {
            Condition::Always => None,
            Condition::Absent => Some(None),
            Condition::AbsentOrEqual(expected) => Some(Some(expected.unwrap_or(value))),
        };
        if let (Some(expected), Some(held)) = (expected, held)
            && expected != Some(&held.value[..])
        {
            let payload: &[u8] = match asked.dialect {
                Dialect::Documents => b"-1\r\n",
                _ => b":-1\r\n",
            };
            return Ok(Due::new(payload, Version::Is(held.version)).owed());
        }
        let is_its_own = |held: &Held| held.owner == asked.client;
        let owned = self.keys.values().filter(|it| is_its_own(it)).count();
        let full = held.is_none() && self.keys.len() >= self.keys_max;
        if full || (!held.is_some_and(is_its_own) && owned >= self.client_keys_max) {
            return Err(("the quota has been exceeded", true));
        }
        let held = Held {
            owner: asked.client,
            value: value.to_vec(),
            version: Stamp::default(),
            fence,
            expires_ms: options.px_ms.map(|ms| asked.now_ms.saturating_add(ms)),
        };
        Ok(Due {
            told: self.watchers(key, Some(value)),
            change: Change::Put(key.to_vec(), held),
            ..Due::new(b"+OK\r\n", Version::Above(wall, counter)).owed()
        })
    }

    fn get(&self, key: &[u8]) -> Due {
        match self.keys.get(key) {
            Some(held) => {
                let mut payload = Vec::new();
                push_bulk(&mut payload, &held.value);
                Due::new(&payload, Version::Is(held.version))
            }
            None => Due::new(b"$-1\r\n", Version::None),
        }
    }

    fn delete(
        &self,
        asked: &Asked<'_>,
        key: &[u8],
        expected: Option<&[u8]>,
    ) -> Result<Due, (&'static str, bool)> {
        let token = token(asked)?;
        let Some(held) = self.keys.get(key) else {
            return Ok(Due::new(b":0\r\n", Version::None).owed());
        };
        fenced(asked, Some(held), token)?;
        if expected.is_some_and(|expected| expected != held.value) {
            let payload: &[u8] = match asked.dialect {
                Dialect::Sdk => b":-1\r\n",
                Dialect::Documents => b"-1\r\n",
                Dialect::Preview => b":0\r\n",
            };
            return Ok(Due::new(payload, Version::Is(held.version)).owed());
        }
        Ok(Due {
            told: self.watchers(key, None),
            change: Change::Remove(key.to_vec()),
            ..Due::new(b":1\r\n", Version::Is(held.version)).owed()
        })
    }

    fn keynotify(&self, asked: &Asked<'_>, key: &[u8], stop: bool) -> Due {
        let watched = self.watches.get(key);
        let watched = watched.is_some_and(|watchers| watchers.contains_key(&asked.client));
        let key = key.to_vec();
        match (stop, watched) {
            (false, _) => Due {
                change: Change::Watch(key, asked.client, asked.dialect),
                ..Due::new(b"+OK\r\n", Version::None)
            },
            (true, true) => Due {
                change: Change::Unwatch(key, asked.client),
                ..Due::new(b"+OK\r\n", Version::None).owed()
            },
            (true, false) => Due::new(b":0\r\n", Version::None).owed(),
        }
    }

    /// One page: there are few keys here.
    fn scan(&self, pattern: &[u8]) -> Due {
        let found = self.keys.keys().filter(|key| matches(pattern, key));
        let found: Vec<&Vec<u8>> = found.collect();
        let mut payload = format!("*1\r\n*{}\r\n", found.len()).into_bytes();
        for key in found {
            push_bulk(&mut payload, key);
        }
        Due::new(&payload, Version::None)
    }
}

impl Due {
    /// The key that changes, and the value that it holds from then on.
    pub(crate) fn changed(&self) -> Option<(Vec<u8>, Option<Vec<u8>>)> {
        match &self.change {
            Change::Put(key, held) => Some((key.clone(), Some(held.value.clone()))),
            Change::Remove(key) => Some((key.clone(), None)),
            Change::Nothing | Change::Watch(..) | Change::Unwatch(..) => None,
        }
    }

    fn new(payload: &[u8], version: Version) -> Self {
        Self {
            payload: payload.to_vec(),
            version,
            owed: false,
            told: Vec::new(),
            change: Change::Nothing,
        }
    }

    fn owed(self) -> Self {
        Self { owed: true, ..self }
    }
}

/// The fencing token of a request: its form, then its skew.
fn token(asked: &Asked<'_>) -> Result<Option<Token>, (&'static str, bool)> {
    match asked.token {
        None => Ok(None),
        Some(Reading::Nonsense(_)) => Err(("malformed timestamp", false)),
        Some(Reading::Clock(wall, ..)) if *wall > asked.now_ms + AHEAD_MS => Err((
            "the request fencing token timestamp is too far in the future; ensure that the client and broker system clocks are synchronized",
            true,
        )),
        Some(Reading::Clock(wall, counter, node)) => Ok(Some((*wall, *counter, node))),
    }
}

/// Whether the key's fence lets a request through, and the fence that a SET leaves behind.
fn fenced(
    asked: &Asked<'_>,
    held: Option<&Held>,
    token: Option<Token>,
) -> Result<Option<Token>, (&'static str, bool)> {
    match (held.and_then(|held| held.fence), token) {
        (None, token) => Ok(token),
        (Some(_), None) => Err(("a fencing token is required for this request", true)),
        (Some(fence), Some(token)) if token < fence => Err((
            match asked.dialect {
                Dialect::Sdk => {
                    "the request fencing token is a lower version than the fencing token protecting the resource"
                }
                _ => {
                    "the request fencing token is a lower version that the fencing token protecting the resource"
                }
            },
            true,
        )),
        (Some(_), Some(token)) => Ok(Some(token)),
    }
}

enum Condition<'a> {
    Always,
    Absent,
    AbsentOrEqual(Option<&'a [u8]>),
}

struct Options<'a> {
    condition: Condition<'a>,
    px_ms: Option<u64>,
}

/// `[NX | NEX [expected]] [PX ms]` in any order; none where it is something else.
fn set_options<'a>(words: &[&'a [u8]]) -> Option<Options<'a>> {
    let is = |word: &[u8], option: &[u8]| word.eq_ignore_ascii_case(option);
    let option = |word: &[u8]| [&b"NX"[..], b"NEX", b"PX"].iter().any(|it| is(word, it));
    let (mut condition, mut px_ms) = (Condition::Always, None);
    let mut rest = words;
    while let [word, others @ ..] = rest {
        let first = matches!(condition, Condition::Always);
        rest = if is(word, b"PX") && px_ms.is_none() {
            let digits = std::str::from_utf8(others.first()?).ok()?;
            let plain = digits.bytes().all(|digit| digit.is_ascii_digit());
            let ms: i64 = digits.parse().ok().filter(|ms| plain && *ms > 0)?;
            px_ms = Some(ms.unsigned_abs());
            &others[1..]
        } else if is(word, b"NX") && first {
            condition = Condition::Absent;
            others
        } else if is(word, b"NEX") && first {
            let (expected, behind) = match others {
                [] => (None, others),
                [px, _] if is(px, b"PX") => (None, others),
                [expected] if !option(expected) => (Some(*expected), &others[1..]),
                [expected, px, _] if is(px, b"PX") => (Some(*expected), &others[1..]),
                _ => return None,
            };
            condition = Condition::AbsentOrEqual(expected);
            behind
        } else {
            return None;
        };
    }
    Some(Options { condition, px_ms })
}

/// Whether it is a STOP; none where it is something else.
fn keynotify_options(words: &[&[u8]]) -> Option<bool> {
    let stops = words
        .iter()
        .filter(|word| word.eq_ignore_ascii_case(b"STOP"));
    let gets = words
        .iter()
        .filter(|word| word.eq_ignore_ascii_case(b"GET"));
    let (stops, gets) = (stops.count(), gets.count());
    (stops <= 1 && gets <= 1 && stops + gets == words.len()).then_some(stops == 1)
}

/// A glob by its definition: tries every way to cut the key.
pub(crate) fn matches(pattern: &[u8], key: &[u8]) -> bool {
    match (pattern, key) {
        ([], _) => key.is_empty(),
        ([b'*', rest @ ..], _) => (0..=key.len()).any(|at| matches(rest, &key[at..])),
        (_, []) => false,
        (_, [byte, behind @ ..]) => {
            let (named, width) = first_element(pattern, *byte);
            named && matches(&pattern[width..], behind)
        }
    }
}

/// Whether the first element of a pattern names a byte, and how much of the pattern it takes.
fn first_element(pattern: &[u8], byte: u8) -> (bool, usize) {
    match pattern {
        [b'?', ..] => (true, 1),
        [b'[', members @ ..] => class(members, byte).unwrap_or((byte == b'[', 1)),
        [b'\\', escaped, ..] => (*escaped == byte, 2),
        _ => (pattern.first() == Some(&byte), 1),
    }
}

/// The same for a class; `members` follow its `[`. None if no `]` follows that has no `\` before it.
fn class(members: &[u8], byte: u8) -> Option<(bool, usize)> {
    // Each member, and whether it is escaped.
    let mut found = Vec::new();
    let mut at = 0;
    while !members[at..].starts_with(b"]") {
        let escape = usize::from(matches!(members[at..], [b'\\', _, ..]));
        found.push((*members.get(at + escape)?, escape == 1));
        at += escape + 1;
    }
    let is_negated = found.first() == Some(&(b'!', false));
    let mut left = &found[usize::from(is_negated)..];
    let mut named = false;
    while let [(first, _), rest @ ..] = left {
        let (last, rest) = match rest {
            [(b'-', false), (last, _), rest @ ..] => (last, rest),
            rest => (first, rest),
        };
        named |= (first.min(last)..=first.max(last)).contains(&&byte);
        left = rest;
    }
    Some((named != is_negated, at + 2))
}

fn push_bulk(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(format!("${}\r\n", bytes.len()).as_bytes());
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
}
