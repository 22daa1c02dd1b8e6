//! Parses the text of a rules file: TOML with the published names.
//!
//! The text is untrusted, and the caller must limit its length. The result is a list of rules, or
//! the line of the first error.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;
use toml::Spanned;

use super::principal::Principals;
use super::template::Template;
use super::{Kind, Resource, Rule, Text};
use crate::{base64, limits};
use statehouse_files::watch::FileError;

/// Why a rules file is refused. The text is a sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum RulesError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// The file is not UTF-8.
    #[error("it is not text in UTF-8")]
    Encoding,
    /// Another error, with the file.
    #[error("{0}: {1}")]
    In(PathBuf, #[source] Box<Self>),
    /// The text is not valid TOML, or has an unknown field.
    #[error("{text}", text = .0.to_string().trim_end())]
    Toml(#[from] Box<toml::de::Error>),
    /// A rule is invalid.
    #[error("line {line}: {error}")]
    Rule {
        /// The line number, from 1.
        line: usize,
        /// The error of the rule.
        error: RuleError,
    },
    /// The file has no rules, which would deny every action.
    #[error(
        "it holds no rule, so every action would be denied: write a [[rules]], or use no rules file to allow everything"
    )]
    Empty,
    /// The file has too many rules.
    #[error("it holds more than {max} rules", max = limits::RULES_MAX)]
    TooMany,
}

/// Why a rule is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuleError {
    /// The rule has no principals.
    #[error(
        "this rule names no principals: add clientIds, usernames or attributes; clientIds = [\"*\"] means all clients"
    )]
    NoPrincipals,
    /// The rule has no resources.
    #[error("this rule allows nothing: give it brokerResources or stateStoreResources")]
    NoResources,
    /// The list of client ids of a resource is empty.
    #[error(
        "this resource has no clientIds: remove the list, which allows every client id, or name ids"
    )]
    NoClients,
    /// Publish or Subscribe has no topics.
    #[error("this resource has no topics")]
    NoTopics,
    /// Connect has topics.
    #[error("Connect takes no topics: remove them, or change the method to Publish or Subscribe")]
    ConnectTopics,
    /// A resource of the store has no keys.
    #[error("this resource has no keys")]
    NoKeys,
    /// A key is empty.
    #[error("the key is empty")]
    EmptyKey,
    /// A set of attributes is empty.
    #[error("these attributes are empty, so every client would have them")]
    NoAttributes,
    /// A placeholder is unknown.
    #[error(
        "`{0}` is not a placeholder; these are {{principal.clientId}}, {{principal.username}} and {{principal.attributes.NAME}}"
    )]
    Placeholder(String),
    /// A `[` has no `]`.
    #[error("`{0}` has a `[` without its `]`; a literal one is written `\\[`")]
    Bracket(String),
    /// A placeholder is inside an element of a pattern.
    #[error(
        "in `{0}` the value of a placeholder would not be literal, because the placeholder follows a `\\` or is in brackets"
    )]
    Enclosed(String),
    /// A pattern is too long.
    #[error(
        "the pattern is longer than {bytes} bytes, or has more than {floating} between its first `*` and its last",
        bytes = limits::RULE_PATTERN_BYTES_MAX,
        floating = limits::RULE_FLOATING_BYTES_MAX
    )]
    LongPattern,
    /// A topic filter is invalid.
    #[error("`{0}` is not a topic filter: {1}")]
    Topic(String, &'static str),
    /// A key of the type Binary is not Base64.
    #[error("`{0}` is not Base64, which the keyType Binary requires")]
    Base64(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileText {
    #[serde(default)]
    rules: Vec<Spanned<RuleText>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RuleText {
    principals: PrincipalsText,
    #[serde(default)]
    broker_resources: Vec<Spanned<BrokerText>>,
    #[serde(default)]
    state_store_resources: Vec<Spanned<StoreText>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PrincipalsText {
    #[serde(default)]
    client_ids: Vec<Box<str>>,
    #[serde(default)]
    usernames: Vec<Box<str>>,
    #[serde(default)]
    attributes: Vec<BTreeMap<Box<str>, Box<str>>>,
}

#[derive(Clone, Copy, Deserialize)]
enum BrokerMethod {
    Connect,
    Publish,
    Subscribe,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct BrokerText {
    method: BrokerMethod,
    client_ids: Option<Vec<Spanned<String>>>,
    #[serde(default)]
    topics: Vec<Spanned<String>>,
}

#[derive(Clone, Copy, Deserialize)]
enum StoreMethod {
    Read,
    Write,
    ReadWrite,
}

#[derive(Clone, Copy, Deserialize)]
enum KeyType {
    Pattern,
    String,
    Binary,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct StoreText {
    method: StoreMethod,
    key_type: KeyType,
    #[serde(default)]
    keys: Vec<Spanned<String>>,
}

/// The ends of the lines of a text.
struct Lines(Vec<usize>);

impl Lines {
    fn of(text: &str) -> Self {
        Self(text.match_indices('\n').map(|(at, _)| at).collect())
    }

    /// The line of a byte offset, counted from one.
    fn at(&self, offset: usize) -> usize {
        self.0.partition_point(|end| *end < offset) + 1
    }

    fn refuse<T>(&self, of: &Spanned<T>, error: RuleError) -> RulesError {
        RulesError::Rule {
            line: self.at(of.span().start),
            error,
        }
    }

    /// Parses each of these texts, and adds its line.
    fn each(
        &self,
        texts: &[Spanned<String>],
        parse: impl Fn(&str) -> Result<Template, RuleError>,
    ) -> Result<Vec<Text>, RulesError> {
        let each = texts.iter().map(|text| match parse(text.get_ref()) {
            Ok(template) => Ok(Text {
                line: self.at(text.span().start),
                template,
            }),
            Err(error) => Err(self.refuse(text, error)),
        });
        each.collect()
    }
}

pub(super) fn read(text: &str) -> Result<Vec<Rule>, RulesError> {
    let file: FileText = toml::from_str(text).map_err(Box::new)?;
    if file.rules.is_empty() {
        return Err(RulesError::Empty);
    }
    if file.rules.len() > limits::RULES_MAX {
        return Err(RulesError::TooMany);
    }
    let lines = Lines::of(text);
    file.rules.into_iter().map(|it| rule(it, &lines)).collect()
}

fn rule(text: Spanned<RuleText>, lines: &Lines) -> Result<Rule, RulesError> {
    let it = text.get_ref();
    if it.broker_resources.is_empty() && it.state_store_resources.is_empty() {
        return Err(lines.refuse(&text, RuleError::NoResources));
    }
    let principals = principals(&it.principals).map_err(|error| lines.refuse(&text, error))?;
    let broker = (it.broker_resources.iter()).map(|resource| broker(resource, lines));
    let store = (it.state_store_resources.iter()).map(|resource| store(resource, lines));
    Ok(Rule {
        line: lines.at(text.span().start),
        principals,
        resources: broker.chain(store).collect::<Result<_, _>>()?,
    })
}

fn principals(text: &PrincipalsText) -> Result<Principals, RuleError> {
    /// The names without `*`, and whether there is a `*`, which means all.
    fn names(texts: &[Box<str>]) -> (Vec<Box<str>>, bool) {
        let (all, names): (Vec<_>, _) = texts.iter().cloned().partition(|it| **it == *"*");
        (names, !all.is_empty())
    }
    if text.client_ids.is_empty() && text.usernames.is_empty() && text.attributes.is_empty() {
        return Err(RuleError::NoPrincipals);
    }
    if text.attributes.iter().any(BTreeMap::is_empty) {
        return Err(RuleError::NoAttributes);
    }
    let (clients, every_client) = names(&text.client_ids);
    let (users, every_user) = names(&text.usernames);
    let attributes = (text.attributes.iter()).map(|all| all.clone().into_iter().collect());
    Ok(Principals {
        clients,
        users,
        attributes: attributes.collect(),
        every_client,
        every_user,
    })
}

fn broker(text: &Spanned<BrokerText>, lines: &Lines) -> Result<Resource, RulesError> {
    let it = text.get_ref();
    let topics = lines.each(&it.topics, Template::parse_topic)?;
    let kind = match (it.method, topics.is_empty()) {
        (BrokerMethod::Connect, true) => Kind::Connect,
        (BrokerMethod::Connect, false) => return Err(lines.refuse(text, RuleError::ConnectTopics)),
        (_, true) => return Err(lines.refuse(text, RuleError::NoTopics)),
        (BrokerMethod::Publish, false) => Kind::Publish(topics),
        (BrokerMethod::Subscribe, false) => Kind::Subscribe(topics),
    };
    let clients = match &it.client_ids {
        None => None,
        Some(ids) if ids.is_empty() => return Err(lines.refuse(text, RuleError::NoClients)),
        Some(ids) => Some(lines.each(ids, Template::parse_pattern)?),
    };
    Ok(Resource {
        kind,
        clients: clients.map(|all| all.into_iter().map(|it| it.template).collect()),
    })
}

fn store(text: &Spanned<StoreText>, lines: &Lines) -> Result<Resource, RulesError> {
    let it = text.get_ref();
    if it.keys.is_empty() {
        return Err(lines.refuse(text, RuleError::NoKeys));
    }
    let keys = lines.each(&it.keys, |key| match it.key_type {
        _ if key.is_empty() => Err(RuleError::EmptyKey),
        KeyType::Pattern => Template::parse_pattern(key),
        KeyType::String => Template::parse(key),
        KeyType::Binary => {
            let bytes = base64::decode(key).filter(|bytes| !bytes.is_empty());
            let bytes = bytes.ok_or_else(|| RuleError::Base64(key.to_owned()))?;
            Ok(Template::literal(key, bytes))
        }
    })?;
    Ok(Resource {
        kind: Kind::Keys {
            read: matches!(it.method, StoreMethod::Read | StoreMethod::ReadWrite),
            write: matches!(it.method, StoreMethod::Write | StoreMethod::ReadWrite),
            are_patterns: matches!(it.key_type, KeyType::Pattern),
            keys,
        },
        clients: None,
    })
}
