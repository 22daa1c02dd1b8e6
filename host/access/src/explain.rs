//! Which rule decides, and what rules can never decide anything.
//!
//! What enters: rules, somebody, and a question. What leaves: the first rule in the file that allows it, or where to look for
//! one that might. Rules are gone through one by one here, in their order: it is for people, not for requests.

use serde::{Deserialize, Serialize};

use super::rules::{Action, Grants, Kind, Principal, Resource, Rule, Rules};
use statehouse_protocol::pattern;
use statehouse_protocol::topics::NOTIFICATION_TOPICS;

/// What somebody may want to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question<'a> {
    /// The action.
    pub action: Action,
    /// The key, the topic or the topic filter; nothing where it is about connecting.
    pub on: &'a [u8],
}

/// What somebody may want to do, as they would ask for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[value(rename_all = "UPPER")]
#[serde(rename_all = "UPPERCASE")]
pub enum Wanted {
    /// Reads a key
    Get,
    /// Writes a key
    Set,
    /// Removes a key
    Del,
    /// Removes a key that has a certain value
    Vdel,
    /// Hears of changes of a key
    Keynotify,
    /// Lists a key
    Scan,
    /// Connects
    Connect,
    /// Publishes to a topic
    Publish,
    /// Subscribes to a topic filter
    Subscribe,
}

impl Wanted {
    /// What a rule has to allow.
    #[must_use]
    pub fn action(self) -> Action {
        match self {
            Self::Get | Self::Keynotify | Self::Scan => Action::Read,
            Self::Set | Self::Del | Self::Vdel => Action::Write,
            Self::Connect => Action::Connect,
            Self::Publish => Action::Publish,
            Self::Subscribe => Action::Subscribe,
        }
    }
}

impl<'a> Question<'a> {
    /// The question whether rules allow this.
    #[must_use]
    pub fn of(command: Wanted, on: &'a [u8]) -> Self {
        let on = match command {
            Wanted::Subscribe => topic_filter(on),
            _ => on,
        };
        Self {
            action: command.action(),
            on,
        }
    }
}

/// The topic filter of a shared subscription, `$share/GROUP/FILTER` (MQTT 5 section 4.8.2); of another one, itself.
fn topic_filter(filter: &[u8]) -> &[u8] {
    let group = filter.strip_prefix(b"$share/");
    let behind = group.and_then(|it| it.splitn(2, |byte| *byte == b'/').nth(1));
    behind.unwrap_or(filter)
}

/// Why it is allowed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// A rule says so.
    Rule(Place),
    /// It is a topic of the client's own, on which it hears of keys that it may touch.
    OwnTopic,
}

/// What decides, and what comes near.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explanation {
    /// Whether it is allowed.
    pub allowed: bool,
    /// By what; none where no rule allows it, and where there are no rules.
    pub why: Option<Why>,
    /// Whether there are rules.
    pub rules: bool,
    /// Rules for it that allow the same on something else, the first few.
    pub on_others: Vec<Place>,
    /// Rules for others that would allow it, the first few.
    pub for_others: Vec<Place>,
    /// Whether it may connect.
    pub may_connect: bool,
}

impl Explanation {
    /// Where there are no rules.
    pub(super) fn without_rules(allowed: bool) -> Self {
        Self {
            allowed,
            why: None,
            rules: false,
            on_others: Vec::new(),
            for_others: Vec::new(),
            may_connect: true,
        }
    }
}

/// Of rules that come near, how many are named.
const NEAR_MAX: usize = 5;

/// Explains what rules say.
#[must_use]
pub fn explain(rules: &Rules, who: &Principal<'_>, question: Question<'_>) -> Explanation {
    let connect = Question {
        action: Action::Connect,
        on: b"",
    };
    let found = why(rules, who, question);
    let (mut near, mut others) = (Vec::new(), Vec::new());
    if found.is_none() {
        near.extend(on_others(rules, who, question.action).take(NEAR_MAX));
        others.extend(for_others(rules, who, question).take(NEAR_MAX));
    }
    Explanation {
        allowed: found.is_some(),
        why: found,
        rules: true,
        on_others: near,
        for_others: others,
        may_connect: why(rules, who, connect).is_some(),
    }
}

/// Where in a file something is said.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The number of the rule, counted from one.
    pub rule: usize,
    /// The line of the key or topic, or of the rule where it is about connecting.
    pub line: usize,
    /// The key or topic as it is written there.
    pub text: Option<Box<str>>,
}

/// Why something is allowed; none where it is denied.
#[must_use]
pub fn why(rules: &Rules, who: &Principal<'_>, question: Question<'_>) -> Option<Why> {
    let mut found = places(rules, who, question, true);
    if let Some(place) = found.next() {
        return Some(Why::Rule(place));
    }
    let grants: &Grants = &rules.grants(*who);
    let is_own = question.action == Action::Subscribe && grants.may_subscribe(question.on);
    is_own.then_some(Why::OwnTopic)
}

/// Rules for somebody else that would allow it.
pub fn for_others(
    rules: &Rules,
    who: &Principal<'_>,
    question: Question<'_>,
) -> impl Iterator<Item = Place> {
    places(rules, who, question, false)
}

/// Rules that are for somebody and allow such an action, on other topics or keys.
pub fn on_others(
    rules: &Rules,
    who: &Principal<'_>,
    action: Action,
) -> impl Iterator<Item = Place> {
    let named = numbered(rules).filter(move |(_, rule)| rule.principals.name(who));
    named.flat_map(move |(number, rule)| {
        let all = rule.resources.iter().flat_map(move |it| it.texts(action));
        all.map(move |(line, text)| Place {
            rule: number,
            line,
            text: Some(text.into()),
        })
    })
}

/// What looks like a mistake although it is a rule, with its line.
#[must_use]
pub fn doubts(rules: &Rules) -> Vec<(usize, String)> {
    let mut doubts = Vec::new();
    let connects = |it: &Resource| matches!(it.kind, Kind::Connect);
    if !rules
        .all
        .iter()
        .any(|rule| rule.resources.iter().any(connects))
    {
        let what = "no rule has a resource with the method Connect, so nobody can connect";
        doubts.push((1, what.to_owned()));
    }
    for rule in &rules.all {
        for name in rule.principals.with_wildcards() {
            let what = format!(
                "`{name}` is compared as it is: only `*` alone means all. Patterns are for the clientIds of a resource"
            );
            doubts.push((rule.line, what));
        }
        for resource in &rule.resources {
            if rule.principals.are_known()
                && !rule.principals.clients().any(|it| resource.may_be_for(it))
            {
                let what = "none of the clients that the rule is for has one of the clientIds of this resource, so it allows nothing";
                doubts.push((rule.line, what.to_owned()));
            }
            for (line, text) in resource.open_places(rule.line) {
                let what = format!(
                    "`{text}` also matches names that only begin or end like the client's, such as `press-10` for `press-1`: put a separator that no name holds next to the place, such as `{{principal.username}}:*`"
                );
                doubts.push((line, what));
            }
            for (line, text) in resource.texts(Action::Publish) {
                if text.starts_with(NOTIFICATION_TOPICS) {
                    let what = format!("only the store publishes to `{text}`, whatever rules say");
                    doubts.push((line, what));
                }
            }
            for action in [Action::Publish, Action::Subscribe] {
                for (line, text) in resource
                    .texts(action)
                    .filter(|(_, it)| it.starts_with("$share/"))
                {
                    let what = format!(
                        "`{text}` matches nothing: of a shared subscription the filter behind the group's name is compared"
                    );
                    doubts.push((line, what));
                }
            }
        }
    }
    doubts
}

fn numbered(rules: &Rules) -> impl Iterator<Item = (usize, &Rule)> {
    (1..).zip(&rules.all)
}

/// Rules that allow something, of those that are for somebody, or of the others.
fn places(
    rules: &Rules,
    who: &Principal<'_>,
    question: Question<'_>,
    for_it: bool,
) -> impl Iterator<Item = Place> {
    let meant = numbered(rules).filter(move |(_, rule)| rule.principals.name(who) == for_it);
    meant.flat_map(move |(number, rule)| {
        let apply = rule.resources.iter().filter(|it| it.is_for(who));
        let allowed = apply.filter_map(|it| it.allows(rule, who, question));
        // One place of a rule is enough.
        let first = allowed.into_iter().next();
        first.map(|(line, text)| Place {
            rule: number,
            line,
            text: text.map(Into::into),
        })
    })
}

impl Resource {
    /// Where it allows this, if it does.
    fn allows(
        &self,
        rule: &Rule,
        who: &Principal<'_>,
        question: Question<'_>,
    ) -> Option<(usize, Option<&str>)> {
        let on = question.on;
        match (&self.kind, question.action) {
            (Kind::Connect, Action::Connect) => Some((rule.line, None)),
            (Kind::Publish(topics), Action::Publish)
            | (Kind::Subscribe(topics), Action::Subscribe) => {
                let covers = topics.iter().find(|it| {
                    let filter = it.template.filter(Some(who));
                    filter.is_some_and(|filter| filter.covers(on))
                });
                covers.map(|it| (it.line, Some(it.template.text())))
            }
            (Kind::Keys { read, write, keys }, action @ (Action::Read | Action::Write)) => {
                let is_meant = match action {
                    Action::Read => *read,
                    _ => *write,
                };
                let mut keys = keys.iter().filter(|_| is_meant);
                let names = keys.find(|it| match it.is_pattern {
                    true => (it.template.pattern(Some(who)))
                        .is_some_and(|pattern| pattern::matches(&pattern, on)),
                    false => it.template.exact(Some(who)).is_some_and(|key| key == on),
                });
                names.map(|it| (it.line, Some(it.template.text())))
            }
            _ => None,
        }
    }

    /// The topics or keys of an action, as they are written, each with its line.
    fn texts(&self, action: Action) -> impl Iterator<Item = (usize, &str)> {
        let (topics, keys) = match (&self.kind, action) {
            (Kind::Publish(topics), Action::Publish)
            | (Kind::Subscribe(topics), Action::Subscribe) => (&topics[..], &[][..]),
            (
                Kind::Keys {
                    read: true, keys, ..
                },
                Action::Read,
            )
            | (
                Kind::Keys {
                    write: true, keys, ..
                },
                Action::Write,
            ) => (&[][..], &keys[..]),
            _ => (&[][..], &[][..]),
        };
        let topics = topics.iter().map(|it| (it.line, it.template.text()));
        topics.chain(keys.iter().map(|it| (it.line, it.template.text())))
    }

    /// Patterns of client ids and keys in which nothing separates a place from a wildcard, each with its line.
    fn open_places(&self, line: usize) -> impl Iterator<Item = (usize, &str)> {
        let keys = match &self.kind {
            Kind::Keys { keys, .. } => &keys[..],
            _ => &[],
        };
        let keys = keys.iter().filter(|it| it.is_pattern);
        let keys = keys.map(|it| (it.line, &it.template));
        let clients = self.clients.iter().map(move |it| (line, it));
        let open = clients.chain(keys).filter(|(_, it)| it.has_open_place());
        open.map(|(line, it)| (line, it.text()))
    }

    /// Whether it may be for a client of which nothing but the id is known.
    fn may_be_for(&self, client: &str) -> bool {
        let who = Principal {
            client,
            user: None,
            attributes: &[],
        };
        self.clients.iter().any(|it| !it.is_static()) || self.is_for(&who)
    }
}
