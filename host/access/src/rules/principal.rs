//! The clients that a rule applies to, and the client that is compared with them.

/// A client, as far as the store knows it.
#[derive(Clone, Copy, Debug)]
pub struct Principal<'a> {
    /// The client id. Behind a foreign broker, it is only a claim of the client.
    pub client: &'a str,
    /// The user name, if the client has authenticated as a user.
    pub user: Option<&'a str>,
    /// The attributes from the client's certificate or token.
    pub attributes: &'a [(Box<str>, Box<str>)],
}

/// The principals of a rule. It applies to a client that matches any of them. Comparison is exact
/// and case-sensitive.
#[derive(Debug, Default)]
pub(crate) struct Principals {
    pub(super) clients: Vec<Box<str>>,
    pub(super) users: Vec<Box<str>>,
    /// Sets of attributes. A client matches a set if it has all of its attributes.
    pub(super) attributes: Vec<Vec<(Box<str>, Box<str>)>>,
    pub(super) every_client: bool,
    /// Whether every client with a user name matches.
    pub(super) every_user: bool,
}

impl Principals {
    /// Whether this client is one of them.
    pub(crate) fn matches(&self, client: &Principal<'_>) -> bool {
        let has = |wanted: &(Box<str>, Box<str>)| client.attributes.contains(wanted);
        self.every_client
            || self.clients.iter().any(|it| **it == *client.client)
            || client
                .user
                .is_some_and(|user| self.every_user || self.users.iter().any(|it| **it == *user))
            || (self.attributes.iter()).any(|wanted| wanted.iter().all(has))
    }

    /// Whether only single client ids match.
    pub(crate) fn are_client_ids_only(&self) -> bool {
        !self.every_client
            && !self.every_user
            && self.users.is_empty()
            && self.attributes.is_empty()
    }

    /// The single client ids.
    pub(crate) fn clients(&self) -> impl Iterator<Item = &str> {
        self.clients.iter().map(|it| &**it)
    }

    /// The single client ids and user names. A `*` in one is compared like any other character.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        let names = self.clients.iter().chain(&self.users);
        names.map(|it| &**it)
    }
}
