//! Which rule decides, and what rules can never decide anything.
//!
//! What enters: rules, somebody, and a question. What leaves: the first rule in the file that allows it, or where to look for
//! one that might. Rules are gone through one by one here, in their order: it is for people, not for requests.

use super::rules::{Action, Grants, Kind, Principal, Resource, Rule, Rules};
use crate::glob;
use crate::request::NOTIFICATION_TOPICS;

/// What somebody may want to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question<'a> {
    /// The action.
    pub action: Action,
    /// The key, the topic or the topic filter; nothing where it is about connecting.
    pub on: &'a [u8],
}

/// Why it is allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    /// A rule says so.
    Rule(Place),
    /// It is a topic of the client's own, on which it hears of keys that it may touch.
    OwnTopic,
}

/// Where in a file something is said.
#[derive(Clone, Debug, PartialEq, Eq)]
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
                        .is_some_and(|pattern| glob::matches(&pattern, on)),
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
