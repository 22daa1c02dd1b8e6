//! The text of a file of rules: TOML with the published names.
//!
//! What enters: text of anybody's making, bounded by whoever read it. What leaves: rules, or the line of the first mistake.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;
use toml::Spanned;

use super::principal::Principals;
use super::template::Template;
use super::{Key, Kind, Resource, Rule, Topic};
use crate::limits;
use data_encoding::{BASE64, BASE64_NOPAD};
use statehouse_files::watch::FileError;

/// Why a file of rules is none.
#[derive(Debug, thiserror::Error)]
pub enum RulesError {
    /// The file cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
    /// It holds something else than text.
    #[error("it is not text in UTF-8")]
    Encoding,
    /// What is wrong in which file.
    #[error("{0}: {1}")]
    In(PathBuf, #[source] Box<Self>),
    /// It is no TOML, or has other fields than rules have.
    #[error("{text}", text = .0.to_string().trim_end())]
    Toml(#[from] Box<toml::de::Error>),
    /// A rule says what no rule can.
    #[error("line {line}: {mistake}")]
    Mistake {
        /// Counted from one.
        line: usize,
        /// What is wrong there.
        mistake: Mistake,
    },
    /// There are none, which would deny everything to everybody.
    #[error(
        "it holds no rule, and where there are rules all is denied that none allows: write a [[rules]], or leave the file away so that everything is allowed"
    )]
    Empty,
    /// More than are evaluated.
    #[error("it holds more than {max} rules", max = limits::RULES_MAX)]
    TooMany,
}

/// What is wrong with a rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Mistake {
    /// Nobody.
    #[error(
        "this rule is for nobody: name clientIds, usernames or attributes in its principals; clientIds = [\"*\"] are all clients"
    )]
    Nobody,
    /// Nothing.
    #[error("this rule allows nothing: give it brokerResources or stateStoreResources")]
    Nothing,
    /// Publish or Subscribe of nothing.
    #[error("this resource has no topics")]
    NoTopics,
    /// Connect with topics.
    #[error("Connect is not about topics: take them away, or make it Publish or Subscribe")]
    ConnectTopics,
    /// No keys.
    #[error("this resource has no keys")]
    NoKeys,
    /// A key of no length.
    #[error("the key is empty")]
    EmptyKey,
    /// Attributes without one.
    #[error("these attributes are empty, so that everybody would have them")]
    NoAttributes,
    /// A place that nothing is put into.
    #[error(
        "`{0}` stands for nothing: there are {{principal.clientId}}, {{principal.username}} and {{principal.attributes.NAME}}"
    )]
    Place(String),
    /// A `[` alone.
    #[error("`{0}` has a `[` without its `]`; one that means itself is written `\\[`")]
    Bracket(String),
    /// More of a pattern than is compared.
    #[error(
        "the pattern is longer than {bytes} bytes, or has more than {floating} between its first `*` and its last",
        bytes = limits::RULE_PATTERN_BYTES_MAX,
        floating = limits::RULE_FLOATING_BYTES_MAX
    )]
    LongPattern,
    /// No topic filter.
    #[error("`{0}` is no topic filter: {1}")]
    Topic(String, &'static str),
    /// Something else than Base64.
    #[error("`{0}` is not Base64, which a key of the type Binary is written in")]
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
    #[serde(default)]
    client_ids: Vec<Spanned<String>>,
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

/// Where the lines of a text begin.
struct Lines(Vec<usize>);

impl Lines {
    fn of(text: &str) -> Self {
        Self(text.match_indices('\n').map(|(at, _)| at).collect())
    }

    /// Counted from one.
    fn at(&self, place: usize) -> usize {
        self.0.partition_point(|end| *end < place) + 1
    }

    fn refuse<T>(&self, of: &Spanned<T>, mistake: Mistake) -> RulesError {
        RulesError::Mistake {
            line: self.at(of.span().start),
            mistake,
        }
    }

    /// Reads each of these.
    fn each(
        &self,
        texts: &[Spanned<String>],
        read: impl Fn(&str) -> Result<Template, Mistake>,
    ) -> Result<Vec<(usize, Template)>, RulesError> {
        let each = texts.iter().map(|text| match read(text.get_ref()) {
            Ok(template) => Ok((self.at(text.span().start), template)),
            Err(mistake) => Err(self.refuse(text, mistake)),
        });
        each.collect()
    }
}

/// The rules of a text.
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
        return Err(lines.refuse(&text, Mistake::Nothing));
    }
    let named = principals(&it.principals).map_err(|mistake| lines.refuse(&text, mistake))?;
    let broker = (it.broker_resources.iter()).map(|resource| broker(resource, lines));
    let store = (it.state_store_resources.iter()).map(|resource| store(resource, lines));
    Ok(Rule {
        line: lines.at(text.span().start),
        principals: named,
        resources: broker.chain(store).collect::<Result<_, _>>()?,
    })
}

fn principals(text: &PrincipalsText) -> Result<Principals, Mistake> {
    /// Names, and whether a `*` among them means all.
    fn names(texts: &[Box<str>]) -> (Vec<Box<str>>, bool) {
        let (all, names): (Vec<_>, _) = texts.iter().cloned().partition(|it| **it == *"*");
        (names, !all.is_empty())
    }
    if text.client_ids.is_empty() && text.usernames.is_empty() && text.attributes.is_empty() {
        return Err(Mistake::Nobody);
    }
    if text.attributes.iter().any(BTreeMap::is_empty) {
        return Err(Mistake::NoAttributes);
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
    let topics: Vec<Topic> = (topics.into_iter())
        .map(|(line, template)| Topic { line, template })
        .collect();
    let kind = match (it.method, topics.is_empty()) {
        (BrokerMethod::Connect, true) => Kind::Connect,
        (BrokerMethod::Connect, false) => return Err(lines.refuse(text, Mistake::ConnectTopics)),
        (_, true) => return Err(lines.refuse(text, Mistake::NoTopics)),
        (BrokerMethod::Publish, false) => Kind::Publish(topics),
        (BrokerMethod::Subscribe, false) => Kind::Subscribe(topics),
    };
    let clients = lines.each(&it.client_ids, Template::parse_pattern)?;
    Ok(Resource {
        kind,
        clients: clients.into_iter().map(|(_, template)| template).collect(),
    })
}

fn store(text: &Spanned<StoreText>, lines: &Lines) -> Result<Resource, RulesError> {
    let it = text.get_ref();
    if it.keys.is_empty() {
        return Err(lines.refuse(text, Mistake::NoKeys));
    }
    let keys = lines.each(&it.keys, |key| match it.key_type {
        _ if key.is_empty() => Err(Mistake::EmptyKey),
        KeyType::Pattern => Template::parse_pattern(key),
        KeyType::String => Template::parse(key),
        KeyType::Binary => {
            let bytes = decode_base64(key).filter(|bytes| !bytes.is_empty());
            let bytes = bytes.ok_or_else(|| Mistake::Base64(key.to_owned()))?;
            Ok(Template::literal(key, bytes))
        }
    })?;
    let is_pattern = matches!(it.key_type, KeyType::Pattern);
    let keys = keys.into_iter().map(|(line, template)| Key {
        line,
        is_pattern,
        template,
    });
    Ok(Resource {
        kind: Kind::Keys {
            read: matches!(it.method, StoreMethod::Read | StoreMethod::ReadWrite),
            write: matches!(it.method, StoreMethod::Write | StoreMethod::ReadWrite),
            keys: keys.collect(),
        },
        clients: Vec::new(),
    })
}

/// Base64, with or without padding.
fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let bytes = text.as_bytes();
    BASE64
        .decode(bytes)
        .or_else(|_| BASE64_NOPAD.decode(bytes))
        .ok()
}
