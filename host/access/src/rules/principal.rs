//! Who a rule is for, and who somebody is.

/// Somebody who connects, as far as it is known.
#[derive(Clone, Copy, Debug)]
pub struct Principal<'a> {
    /// The client id. Behind a foreign broker it is only what the client says.
    pub client: &'a str,
    /// The user name, where one was proven.
    pub user: Option<&'a str>,
    /// What a certificate or a token says of the client besides.
    pub attributes: &'a [(Box<str>, Box<str>)],
}

/// Who a rule is for: everybody whom one of these names. They are compared exactly and with regard to case.
#[derive(Debug, Default)]
pub(crate) struct Principals {
    pub(super) clients: Vec<Box<str>>,
    pub(super) users: Vec<Box<str>>,
    /// Of each, all have to be there.
    pub(super) attributes: Vec<Vec<(Box<str>, Box<str>)>>,
    pub(super) every_client: bool,
    /// Everybody who has proven to be some user.
    pub(super) every_user: bool,
}

impl Principals {
    /// Whether this is one of them.
    pub(crate) fn name(&self, who: &Principal<'_>) -> bool {
        let has = |wanted: &(Box<str>, Box<str>)| who.attributes.contains(wanted);
        self.every_client
            || self.clients.iter().any(|it| **it == *who.client)
            || who
                .user
                .is_some_and(|user| self.every_user || self.users.iter().any(|it| **it == *user))
            || (self.attributes.iter()).any(|wanted| wanted.iter().all(has))
    }

    /// Whether it is only for clients that are named one by one.
    pub(crate) fn are_known(&self) -> bool {
        !self.every_client
            && !self.every_user
            && self.users.is_empty()
            && self.attributes.is_empty()
    }

    /// The clients that are named.
    pub(crate) fn clients(&self) -> impl Iterator<Item = &str> {
        self.clients.iter().map(|it| &**it)
    }

    /// Names with a `*` in them, which is compared as any other character.
    pub(crate) fn with_wildcards(&self) -> impl Iterator<Item = &str> {
        let names = self.clients.iter().chain(&self.users);
        names.map(|it| &**it).filter(|it| it.contains('*'))
    }
}
