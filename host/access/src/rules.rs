//! Authorization rules, in the published model of Azure IoT Operations' BrokerAuthorization.
//!
//! [`Rules`] are parsed from a file and evaluated once for each connection. The result is
//! [`Grants`], which decide every later question by an index. Rules can only allow: an action that
//! no rule allows must be denied. The caller has authenticated the client before.

mod file;
mod grants;
mod keys;
mod principal;
mod seal;
mod template;
mod topics;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};

pub use file::{RuleError, RulesError};
pub use grants::Grants;
pub use principal::Principal;
pub use seal::Seal;
pub(super) use template::Template;
pub use topics::Filter;

use crate::limits;
use grants::Index;
use principal::Principals;
use statehouse_files::watch::read_file;

/// An action that a rule can allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Connecting.
    Connect,
    /// Publishing to a topic.
    Publish,
    /// Subscribing to a topic filter.
    Subscribe,
    /// Reading a key: GET, KEYNOTIFY, SCAN.
    Read,
    /// Changing a key: SET, DEL, VDEL.
    Write,
}

/// One rule: the principals, and the resources that they may access.
#[derive(Debug)]
pub(super) struct Rule {
    /// The first line of the rule, counted from one.
    pub(super) line: usize,
    pub(super) principals: Principals,
    pub(super) resources: Vec<Resource>,
}

/// One allowed action on some topics or keys.
#[derive(Debug)]
pub(super) struct Resource {
    pub(super) kind: Kind,
    /// Patterns of the client ids that the resource applies to. `None` for all client ids.
    pub(super) clients: Option<Vec<Template>>,
}

/// The allowed action and its topics or keys.
#[derive(Debug)]
pub(super) enum Kind {
    Connect,
    Publish(Vec<Text>),
    Subscribe(Vec<Text>),
    Keys {
        read: bool,
        write: bool,
        are_patterns: bool,
        keys: Vec<Text>,
    },
}

/// A topic, a topic filter, a key or a pattern of a rule.
#[derive(Debug)]
pub(super) struct Text {
    pub(super) line: usize,
    pub(super) template: Template,
}

/// All rules of a file.
#[derive(Debug)]
pub struct Rules {
    pub(super) all: Vec<Rule>,
    /// Rules that name a client id, so that evaluating a client does not visit all rules.
    by_client: HashMap<Box<str>, Vec<usize>>,
    /// Rules that name a user.
    by_user: HashMap<Box<str>, Vec<usize>>,
    /// Rules for certain attributes, for every client, or for every user.
    others: Vec<usize>,
    /// Indexes that several clients use.
    shared: Mutex<Shared>,
    seal: Arc<Seal>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Indexes by the numbers of their rules and resources.
    indexes: HashMap<Box<[(usize, usize)]>, Weak<Index>>,
    /// The number of entries at which unused ones are removed.
    sweep_at: usize,
}

impl Rules {
    /// Parses the text of a rules file. Fails if the text is not valid TOML, has an unknown field,
    /// or has an invalid rule; with the line.
    pub fn parse(text: &str) -> Result<Self, RulesError> {
        let all = file::read(text)?;
        let (mut by_client, mut by_user) =
            (HashMap::<_, Vec<_>>::new(), HashMap::<_, Vec<_>>::new());
        let mut others = Vec::new();
        for (number, rule) in all.iter().enumerate() {
            let it = &rule.principals;
            for client in &it.clients {
                by_client.entry(client.clone()).or_default().push(number);
            }
            for user in &it.users {
                by_user.entry(user.clone()).or_default().push(number);
            }
            if it.every_client || it.every_user || !it.attributes.is_empty() {
                others.push(number);
            }
        }
        Ok(Self {
            all,
            by_client,
            by_user,
            others,
            shared: Mutex::default(),
            seal: Arc::default(),
        })
    }

    /// Reads a rules file. Fails if the file cannot be read or parsed.
    pub fn open(path: &Path) -> Result<Self, RulesError> {
        let bytes = read_file(path, limits::RULES_FILE_BYTES_MAX)?;
        let parsed = std::str::from_utf8(&bytes)
            .map_err(|_| RulesError::Encoding)
            .and_then(Self::parse);
        parsed.map_err(|error| RulesError::In(path.to_owned(), Box::new(error)))
    }

    /// Uses this secret. A secret that is passed on from earlier rules lets a running SCAN continue
    /// after a change of the rules.
    #[must_use]
    pub fn sealed_by(self, seal: Arc<Seal>) -> Self {
        Self { seal, ..self }
    }

    /// The number of rules, which is at least 1.
    #[must_use]
    pub fn count(&self) -> usize {
        self.all.len()
    }

    /// Evaluates the rules for a client.
    #[must_use]
    pub fn grants(&self, principal: Principal<'_>) -> Arc<Grants> {
        let mut numbers: Vec<usize> = (self.by_client.get(principal.client).into_iter())
            .chain(principal.user.and_then(|user| self.by_user.get(user)))
            .flatten()
            .copied()
            .collect();
        let others = self.others.iter().copied();
        numbers.extend(others.filter(|it| self.all[*it].principals.matches(&principal)));
        numbers.sort_unstable();
        numbers.dedup();
        let mut apply = Vec::new();
        for number in numbers {
            for (place, resource) in self.all[number].resources.iter().enumerate() {
                if resource.applies_to(&principal) {
                    apply.push((number, place));
                }
            }
        }
        let resource = |(number, place): &(usize, usize)| &self.all[*number].resources[*place];
        let may_connect = (apply.iter()).any(|it| matches!(resource(it).kind, Kind::Connect));
        let own = Index::new(apply.iter().map(resource), Some(&principal));
        let shared = self.shared(&apply, || Index::new(apply.iter().map(resource), None));
        Arc::new(Grants::new(
            principal,
            may_connect,
            shared,
            own,
            self.seal.clone(),
        ))
    }

    /// The index of the resources with these numbers, without placeholders. Made once, because the
    /// same rules may apply to many clients.
    fn shared(&self, numbers: &[(usize, usize)], make: impl FnOnce() -> Index) -> Arc<Index> {
        // A panic under this lock leaves a valid table.
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = shared.indexes.get(numbers).and_then(Weak::upgrade) {
            return index;
        }
        let index = Arc::new(make());
        if shared.indexes.len() >= shared.sweep_at {
            shared.indexes.retain(|_, index| index.strong_count() > 0);
            shared.sweep_at = 64.max(2 * shared.indexes.len());
        }
        shared
            .indexes
            .insert(numbers.into(), Arc::downgrade(&index));
        index
    }
}

impl Resource {
    /// Whether the resource applies to the id of this client.
    pub(super) fn applies_to(&self, principal: &Principal<'_>) -> bool {
        self.clients.as_ref().is_none_or(|templates| {
            templates.iter().any(|template| {
                template.pattern(Some(principal)).is_some_and(|pattern| {
                    statehouse_protocol::pattern::matches(&pattern, principal.client.as_bytes())
                })
            })
        })
    }
}

#[cfg(test)]
mod tests;
