//! What clients may do: the rules of an operator, in the published model of Azure IoT Operations' BrokerAuthorization.
//!
//! What enters: the text of a file, then who connects. What leaves: [`Rules`], and for each client its [`Grants`]. Rules only
//! allow: what none of them allows is denied. They are evaluated once for each connection, and every question after that
//! is a look into an index. It does no I/O, and never asks who somebody is: that is known by then.

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

pub use file::{Mistake, RulesError};
pub use grants::Grants;
pub use principal::Principal;
pub use seal::Seal;
pub(super) use template::Template;
pub use topics::Filter;

use crate::limits;
use grants::Index;
use principal::Principals;
use statehouse_files::watch::read_file;

/// Something that a rule can allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// To connect.
    Connect,
    /// To publish to a topic.
    Publish,
    /// To subscribe to a topic filter.
    Subscribe,
    /// To read a key: GET, KEYNOTIFY, SCAN.
    Read,
    /// To change a key: SET, DEL, VDEL.
    Write,
}

/// One rule: who, and what they may do.
#[derive(Debug)]
pub(super) struct Rule {
    /// Where it begins, counted from one.
    pub(super) line: usize,
    pub(super) principals: Principals,
    pub(super) resources: Vec<Resource>,
}

/// What a rule allows: one action on some topics or keys.
#[derive(Debug)]
pub(super) struct Resource {
    pub(super) kind: Kind,
    /// Client ids that it is for, as patterns; all where there are none.
    pub(super) clients: Vec<Template>,
}

/// What is allowed.
#[derive(Debug)]
pub(super) enum Kind {
    Connect,
    Publish(Vec<Topic>),
    Subscribe(Vec<Topic>),
    Keys {
        read: bool,
        write: bool,
        keys: Vec<Key>,
    },
}

/// A topic or a topic filter of a rule.
#[derive(Debug)]
pub(super) struct Topic {
    pub(super) line: usize,
    pub(super) template: Template,
}

/// A key, or a pattern of keys.
#[derive(Debug)]
pub(super) struct Key {
    pub(super) line: usize,
    pub(super) is_pattern: bool,
    pub(super) template: Template,
}

/// All rules of a file.
#[derive(Debug)]
pub struct Rules {
    pub(super) all: Vec<Rule>,
    /// Rules by who they are for, so that one client's are found without looking at all.
    by_client: HashMap<Box<str>, Vec<usize>>,
    by_user: HashMap<Box<str>, Vec<usize>>,
    /// Those for somebody with certain attributes, for every client, and for every user.
    others: Vec<usize>,
    /// What was made of rules that hold for several clients in the same way.
    shared: Mutex<Shared>,
    seal: Arc<Seal>,
}

#[derive(Debug, Default)]
struct Shared {
    /// By the numbers of the rules and of their resources.
    indexes: HashMap<Box<[(usize, usize)]>, Weak<Index>>,
    /// When to look for those that nobody uses any more.
    look_at: usize,
}

impl Rules {
    /// Reads a file of rules.
    ///
    /// # Errors
    /// Where it is not TOML, names something that no rule has, or allows nobody anything: with the line.
    pub fn parse(text: &str) -> Result<Self, RulesError> {
        let all = file::read(text)?;
        let (mut by_client, mut by_user) =
            (HashMap::<_, Vec<_>>::new(), HashMap::<_, Vec<_>>::new());
        let mut others = Vec::new();
        for (number, rule) in all.iter().enumerate() {
            let Principals {
                clients,
                users,
                attributes,
                every_client,
                every_user,
            } = &rule.principals;
            for client in clients {
                by_client.entry(client.clone()).or_default().push(number);
            }
            for user in users {
                by_user.entry(user.clone()).or_default().push(number);
            }
            if *every_client || *every_user || !attributes.is_empty() {
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

    /// Reads the rules of a file.
    ///
    /// # Errors
    /// Those of [`parse`](Self::parse), with the file, and where it cannot be read.
    pub fn open(path: &Path) -> Result<Self, RulesError> {
        let bytes = read_file(path, limits::RULES_FILE_BYTES_MAX)?;
        let parsed = std::str::from_utf8(&bytes)
            .map_err(|_| RulesError::Encoding)
            .and_then(Self::parse);
        parsed.map_err(|error| RulesError::In(path.to_owned(), Box::new(error)))
    }

    /// The same rules with a secret that stays when they change, so that a SCAN that is under way can go on.
    #[must_use]
    pub fn sealed_by(self, seal: Arc<Seal>) -> Self {
        Self { seal, ..self }
    }

    /// How many rules there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// Never: a file without a rule is refused.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// What one client may do. Worked out once for each connection.
    #[must_use]
    pub fn grants(&self, who: Principal<'_>) -> Arc<Grants> {
        let mut numbers: Vec<usize> = (self.by_client.get(who.client).into_iter())
            .chain(who.user.and_then(|user| self.by_user.get(user)))
            .flatten()
            .copied()
            .collect();
        let others = self.others.iter().copied();
        numbers.extend(others.filter(|it| self.all[*it].principals.name(&who)));
        numbers.sort_unstable();
        numbers.dedup();
        let mut apply = Vec::new();
        for number in numbers {
            for (place, resource) in self.all[number].resources.iter().enumerate() {
                if resource.is_for(&who) {
                    apply.push((number, place));
                }
            }
        }
        let resource = |(number, place): &(usize, usize)| &self.all[*number].resources[*place];
        let may_connect = (apply.iter()).any(|it| matches!(resource(it).kind, Kind::Connect));
        let own = Index::new(apply.iter().map(resource), Some(&who));
        let shared = self.shared(&apply, || Index::new(apply.iter().map(resource), None));
        Arc::new(Grants::new(
            who,
            may_connect,
            shared,
            own,
            self.seal.clone(),
        ))
    }

    /// What the resources with these numbers allow whoever it is: made once, since many clients may be under the same rules.
    fn shared(&self, numbers: &[(usize, usize)], make: impl FnOnce() -> Index) -> Arc<Index> {
        // A panic in between leaves nothing half done.
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = shared.indexes.get(numbers).and_then(Weak::upgrade) {
            return index;
        }
        let index = Arc::new(make());
        if shared.indexes.len() >= shared.look_at {
            shared.indexes.retain(|_, index| index.strong_count() > 0);
            shared.look_at = 64.max(2 * shared.indexes.len());
        }
        shared
            .indexes
            .insert(numbers.into(), Arc::downgrade(&index));
        index
    }
}

impl Resource {
    /// Whether it is for this client id.
    pub(super) fn is_for(&self, who: &Principal<'_>) -> bool {
        self.clients.is_empty()
            || self.clients.iter().any(|template| {
                template.pattern(Some(who)).is_some_and(|pattern| {
                    statehouse_protocol::pattern::matches(&pattern, who.client.as_bytes())
                })
            })
    }
}

#[cfg(test)]
mod tests;
