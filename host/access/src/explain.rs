//! Explains decisions of the rules to operators: which rule allows an action, which rules nearly
//! allow it, and which rules can never have an effect.
//!
//! Rules are visited one by one in the order of the file, so this must not be used for requests.
//! Its decision must be the same as that of [`Grants`].

use serde::{Deserialize, Serialize};

use super::rules::{Action, Grants, Kind, Principal, Resource, Rule, Rules, Text};
use statehouse_mqtt::{check_topic_filter, check_topic_name};
use statehouse_protocol::OPERATOR_CLIENT;
use statehouse_protocol::pattern;
use statehouse_protocol::topics::{
    ADMIN_TOPICS, NOTIFICATION_TOPICS, PREVIEW_TOPIC, REQUEST_TOPIC, is_kept_for_brokers, is_order,
};

/// Why no client may connect as [`OPERATOR_CLIENT`].
pub(super) const OPERATORS_ONLY: &str =
    "this client identifier is that of operators at the admin API";

/// A question: whether a client may do this.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question<'a> {
    /// The action.
    pub action: Action,
    /// The key, the topic or the topic filter; empty for [`Action::Connect`].
    pub on: &'a [u8],
}

/// The command that a client may want to send.
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
    /// Watches a key for changes
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
    /// The action that a rule must allow.
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
    /// The question whether the rules allow this command.
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

/// Why the client may not do this, whatever the rules say.
#[must_use]
pub fn reservation(client: &str, question: Question<'_>) -> Option<&'static str> {
    if client == OPERATOR_CLIENT {
        return Some(OPERATORS_ONLY);
    }
    if question.action != Action::Publish {
        return None;
    }
    if is_kept_for_brokers(question.on) {
        return Some("topics below $SYS/ are reserved for the broker");
    }
    let begins = |prefix: &&str| question.on.starts_with(prefix.as_bytes());
    let is_reserved = [NOTIFICATION_TOPICS, ADMIN_TOPICS].iter().any(begins);
    is_reserved.then_some("only the state store publishes there")
}

/// Why there is nothing to decide: the topic or the filter is not valid, or it is a topic of
/// requests or signed orders, which need no right to publish. Fails with the reason, for the
/// operator who asks.
pub fn check(command: Wanted, on: &[u8]) -> Result<(), &'static str> {
    let requests = [REQUEST_TOPIC, PREVIEW_TOPIC];
    match command {
        Wanted::Subscribe => check_topic_filter(on),
        Wanted::Publish if requests.iter().any(|topic| topic.as_bytes() == on) => Err(
            "the store takes requests from each client and checks their keys: ask about a key, such as SET KEY",
        ),
        Wanted::Publish if is_order(on) => {
            Err("the store takes orders from each client: the signature decides, and no rule")
        }
        Wanted::Publish => check_topic_name(on),
        _ => Ok(()),
    }
}

/// The filter of a shared subscription, `$share/GROUP/FILTER` (MQTT 5 section 4.8.2). Returns any
/// other filter unchanged.
fn topic_filter(filter: &[u8]) -> &[u8] {
    let group = filter.strip_prefix(b"$share/");
    let behind = group.and_then(|it| it.splitn(2, |byte| *byte == b'/').nth(1));
    behind.unwrap_or(filter)
}

/// Why an action is allowed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// A rule allows it.
    Rule(Place),
    /// It is a subscription to the client's own topics or notification topics, and the client may
    /// access keys.
    OwnTopic,
}

/// A decision, and the rules that nearly allow the action.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Explanation {
    /// Whether the action is allowed.
    pub allowed: bool,
    /// Why it is allowed. `None` if it is denied, or if there are no rules.
    pub why: Option<Why>,
    /// Whether there are rules.
    pub rules: bool,
    /// The first few rules for this client that allow the same action on other keys or topics.
    pub on_others: Vec<Place>,
    /// The first few rules for other clients that would allow the action.
    pub for_others: Vec<Place>,
    /// Whether the client may connect.
    pub may_connect: bool,
}

impl Explanation {
    /// The decision of a store without rules.
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

/// How many rules of each kind that nearly allow an action are listed.
const NEAR_MAX: usize = 5;

/// Explains the decision of rules about a question.
#[must_use]
pub fn explain(rules: &Rules, principal: &Principal<'_>, question: Question<'_>) -> Explanation {
    let connect = Question {
        action: Action::Connect,
        on: b"",
    };
    let why_allowed = why(rules, principal, question);
    let (mut on, mut others) = (Vec::new(), Vec::new());
    if why_allowed.is_none() {
        on.extend(on_others(rules, principal, question.action).take(NEAR_MAX));
        let near = allowing_rules(rules, principal, question, false);
        others.extend(near.take(NEAR_MAX));
    }
    Explanation {
        allowed: why_allowed.is_some(),
        why: why_allowed,
        rules: true,
        on_others: on,
        for_others: others,
        may_connect: why(rules, principal, connect).is_some(),
    }
}

/// The place of a rule in its file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The number of the rule, counted from one.
    pub rule: usize,
    /// The line of the key or topic; for [`Action::Connect`] the line of the rule.
    pub line: usize,
    /// The key or topic as written in the file.
    pub text: Option<Box<str>>,
}

/// Why an action is allowed. `None` if it is denied.
#[must_use]
pub fn why(rules: &Rules, principal: &Principal<'_>, question: Question<'_>) -> Option<Why> {
    let mut allowing = allowing_rules(rules, principal, question, true);
    if let Some(place) = allowing.next() {
        return Some(Why::Rule(place));
    }
    let grants: &Grants = &rules.grants(*principal);
    let is_own = question.action == Action::Subscribe && grants.may_subscribe(question.on);
    is_own.then_some(Why::OwnTopic)
}

/// Rules for this client that allow such an action on some topics or keys.
fn on_others(
    rules: &Rules,
    principal: &Principal<'_>,
    action: Action,
) -> impl Iterator<Item = Place> {
    let matching = numbered(rules).filter(move |(_, rule)| rule.principals.matches(principal));
    matching.flat_map(move |(number, rule)| {
        let all = rule.resources.iter().flat_map(move |it| it.texts(action));
        all.map(move |it| Place {
            rule: number,
            line: it.line,
            text: Some(it.template.text().into()),
        })
    })
}

/// A warning, with its line, if the rules let no client connect to the store's own broker.
#[must_use]
pub fn connect_warning(rules: &Rules) -> Option<(usize, String)> {
    let connects = |it: &Resource| matches!(it.kind, Kind::Connect);
    let mut resources = rules.all.iter().flat_map(|rule| &rule.resources);
    let text = "no rule has a resource with the method Connect, so no client can connect to the store's own broker";
    (!resources.any(connects)).then(|| (1, text.to_owned()))
}

/// Warnings about valid rules that probably do not mean what the operator intends, with their
/// lines. [`connect_warning`] is another one.
#[must_use]
pub fn warnings(rules: &Rules) -> Vec<(usize, String)> {
    let mut warnings = Vec::new();
    for rule in &rules.all {
        for name in rule.principals.names() {
            if name.is_empty() {
                let warning = "an empty client id or user name matches no client";
                warnings.push((rule.line, warning.to_owned()));
            }
            if name.contains('*') {
                let warning = format!(
                    "`{name}` is compared literally: only `*` alone matches all. Use patterns in the clientIds of a resource"
                );
                warnings.push((rule.line, warning));
            }
        }
        for resource in &rule.resources {
            if rule.principals.are_client_ids_only()
                && !(rule.principals.clients()).any(|it| resource.may_apply_to(it))
            {
                let warning = "no client of this rule matches the clientIds of this resource, so it allows nothing";
                warnings.push((rule.line, warning.to_owned()));
            }
            warnings.extend(resource.doubtful_texts(rule.line));
            for action in [Action::Publish, Action::Subscribe] {
                for Text { line, template } in resource.texts(action) {
                    let warning = without_effect(action, template.text());
                    warnings.extend(warning.map(|it| (*line, it)));
                }
            }
        }
    }
    warnings
}

/// The warning about a topic or filter for which a rule has no effect; none if it has one.
fn without_effect(action: Action, text: &str) -> Option<String> {
    let publishes = |prefix: &str| action == Action::Publish && text.starts_with(prefix);
    let only_the_store = format!("only the store publishes to `{text}`");
    if publishes(NOTIFICATION_TOPICS) {
        Some(format!(
            "{only_the_store}, so no rule can allow it to a client"
        ))
    } else if publishes(ADMIN_TOPICS) {
        Some(format!(
            "{only_the_store}, and takes orders there by their signatures, so no rule counts"
        ))
    } else if text.starts_with("$share/") {
        Some(format!(
            "`{text}` matches nothing: rules apply to the filter after the group name of a shared subscription"
        ))
    } else {
        None
    }
}

fn numbered(rules: &Rules) -> impl Iterator<Item = (usize, &Rule)> {
    (1..).zip(&rules.all)
}

/// The rules that allow the action: those for this client if `for_client`, otherwise all others.
fn allowing_rules(
    rules: &Rules,
    principal: &Principal<'_>,
    question: Question<'_>,
    for_client: bool,
) -> impl Iterator<Item = Place> {
    let matching =
        numbered(rules).filter(move |(_, rule)| rule.principals.matches(principal) == for_client);
    matching.flat_map(move |(number, rule)| {
        let apply = rule.resources.iter().filter(|it| it.applies_to(principal));
        let allowed = apply.filter_map(|it| it.allows(rule, principal, question));
        // One place per rule is enough.
        let first = allowed.into_iter().next();
        first.map(|(line, text)| Place {
            rule: number,
            line,
            text: text.map(Into::into),
        })
    })
}

impl Resource {
    /// The line and the text that allow the action, if the resource allows it.
    fn allows(
        &self,
        rule: &Rule,
        principal: &Principal<'_>,
        question: Question<'_>,
    ) -> Option<(usize, Option<&str>)> {
        let on = question.on;
        match (&self.kind, question.action) {
            (Kind::Connect, Action::Connect) => Some((rule.line, None)),
            (Kind::Publish(topics), Action::Publish)
            | (Kind::Subscribe(topics), Action::Subscribe) => {
                let covers = topics.iter().find(|it| {
                    let filter = it.template.filter(Some(principal));
                    filter.is_some_and(|filter| filter.covers(on))
                });
                covers.map(|it| (it.line, Some(it.template.text())))
            }
            (Kind::Keys { are_patterns, .. }, Action::Read | Action::Write) => {
                let names = self.texts(question.action).iter().find(|it| {
                    let named = it.template.bytes(*are_patterns, Some(principal));
                    named.is_some_and(|named| match are_patterns {
                        true => pattern::matches(&named, on),
                        false => named == on,
                    })
                });
                names.map(|it| (it.line, Some(it.template.text())))
            }
            _ => None,
        }
    }

    /// The topics or keys of an action.
    fn texts(&self, action: Action) -> &[Text] {
        match (&self.kind, action) {
            (Kind::Publish(topics), Action::Publish)
            | (Kind::Subscribe(topics), Action::Subscribe) => topics,
            (Kind::Keys { read, keys, .. }, Action::Read) if *read => keys,
            (Kind::Keys { write, keys, .. }, Action::Write) if *write => keys,
            _ => &[],
        }
    }

    /// Warnings about texts of which a part probably does not mean what the operator intends: a
    /// placeholder that touches another one or a wildcard, or that is none, or a pattern that
    /// matches nothing.
    fn doubtful_texts(&self, line: usize) -> Vec<(usize, String)> {
        let (texts, are_patterns) = match &self.kind {
            Kind::Publish(topics) | Kind::Subscribe(topics) => (&topics[..], false),
            Kind::Keys {
                keys, are_patterns, ..
            } => (&keys[..], *are_patterns),
            Kind::Connect => (&[][..], false),
        };
        let texts = (texts.iter()).map(move |it| (it.line, &it.template, are_patterns));
        let clients = self.clients.iter().flatten();
        let clients = clients.map(move |it| (line, it, true));
        let mut warnings = Vec::new();
        for (line, template, is_pattern) in clients.chain(texts) {
            let text = template.text();
            if template.has_open_placeholder(is_pattern) {
                let warning = format!(
                    "`{text}` also matches names that only begin or end with the client's name, such as `press-10` for `press-1`: put a separator that no name contains next to the placeholder, such as the colon of `{{principal.username}}:*`"
                );
                warnings.push((line, warning));
            }
            if let Some(literal) = template.misspelt_placeholder() {
                let warning = format!(
                    "`{literal}` in `{text}` is no placeholder but literal text: placeholders are {{principal.clientId}}, {{principal.username}} and {{principal.attributes.NAME}}"
                );
                warnings.push((line, warning));
            }
            if is_pattern && template.has_empty_brackets() {
                let warning = format!(
                    "`{text}` matches nothing, because `[]` matches no character: literal brackets are written `\\[]`"
                );
                warnings.push((line, warning));
            }
        }
        warnings
    }

    /// Whether the resource may apply to a client of which only the id is known.
    fn may_apply_to(&self, client: &str) -> bool {
        let principal = Principal {
            client,
            user: None,
            attributes: &[],
        };
        let mut clients = self.clients.iter().flatten();
        clients.any(|it| !it.is_static()) || self.applies_to(&principal)
    }
}
