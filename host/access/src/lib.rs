//! Authenticates clients by password, certificate or token, and authorizes their actions by rules.
//!
//! A client's credentials give an [`Identity`], or a refusal with a reason. A refusal must never
//! reveal whether a user exists. This crate opens no connection.

#![forbid(unsafe_code)]

pub mod audit;
mod authorizer;
pub mod base64;
pub mod certificates;
pub mod explain;
mod known_logins;
pub mod limits;
mod logins;
mod own_topics;
pub mod roles;
pub mod rules;
pub mod settings;
mod throttle;
pub mod tokens;
pub mod users;

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use bytes::Bytes;
use statehouse_mqtt::{
    Access, Admission, Attempt, Deciding, Enhanced, Identity, Origin, ReasonCode,
    Refusal as BrokerRefusal, TopicCheck, Verdict,
};

pub use self::authorizer::{Authorizer, CachedGrants, NoRule};
use self::certificates::{CertificatesError, Owners};
use self::explain::{Explanation, Question};
use self::logins::{Logins, Refusal};
use self::roles::Role;
use self::rules::{Action, Grants, Principal, Rules, RulesError, Seal};
use self::tokens::{KeySet, Token, TokenKeysError};
use self::users::{Users, UsersError};
use crate::audit::{Audit, Refused};
use crate::settings::{AccessConfig, CertificateUsers, TokenConfig};
use statehouse_files::modes;
use statehouse_files::watch::{Reloads, Watched};
use statehouse_protocol::OPERATOR_CLIENT;
use statehouse_protocol::topics::notified_key;

/// Why a file of the access settings is refused. The text is a sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The users file.
    #[error("users: {0}")]
    Users(#[from] UsersError),
    /// The file that maps certificates to users.
    #[error("certificate_users: {0}")]
    Certificates(#[from] CertificatesError),
    /// The keys that verify tokens.
    #[error("token_keys: {0}")]
    Tokens(#[from] TokenKeysError),
    /// The rules.
    #[error("rules: {0}")]
    Rules(#[from] RulesError),
}

/// The access control of the embedded broker.
pub struct AccessControl(Arc<Inner>);

/// The configured authentication methods and rules.
struct Inner {
    logins: Option<Logins>,
    owners: Option<Arc<Watched<Owners>>>,
    tokens: Option<Arc<Watched<KeySet>>>,
    /// Whether clients without credentials are accepted.
    anonymous: bool,
    /// Whether a client may not subscribe to the own topics of other clients. With rules, the rules
    /// decide this.
    own_topics: bool,
    /// What clients may do. Without rules, clients may do everything.
    rules: Option<Arc<Authorizer>>,
    audit: Arc<Audit>,
}

impl AccessControl {
    /// Reads the files for the first time. Fails if a file is refused.
    pub fn open(config: &AccessConfig, audit: Arc<Audit>) -> Result<Self, AccessError> {
        let (files, wrong) = AccessFiles::read(config);
        match wrong.into_iter().next() {
            None => Ok(Self::of(config, files, audit)),
            Some(first) => Err(first),
        }
    }

    /// What is wrong with the files: [`AccessControl::open`] returns the first of these errors.
    #[must_use]
    pub fn check(config: &AccessConfig) -> Vec<AccessError> {
        AccessFiles::read(config).1
    }

    fn of(config: &AccessConfig, files: AccessFiles, audit: Arc<Audit>) -> Self {
        Self(Arc::new(Inner {
            anonymous: config.allow_anonymous || !config.authenticates(),
            own_topics: config.authenticates() && files.rules.is_none(),
            rules: files.rules.map(Authorizer::new),
            logins: files.users.map(Logins::new),
            owners: files.owners,
            tokens: files.tokens,
            audit,
        }))
    }

    /// Reloads the files when they change. `then` is called after each change, to recheck the
    /// connected clients.
    pub fn watch(&self, reloads: &mut Reloads, then: impl Fn() + Clone + Send + Sync + 'static) {
        if let Some(logins) = &self.0.logins {
            reloads.add(logins.users(), then.clone());
        }
        if let Some(owners) = &self.0.owners {
            reloads.add(owners, then.clone());
        }
        if let Some(tokens) = &self.0.tokens {
            reloads.add(tokens, then.clone());
        }
        if let Some(rules) = self.rules() {
            reloads.add(rules.rules(), {
                let rules = rules.clone();
                move || {
                    rules.changed();
                    then();
                    rules.log_count();
                }
            });
            rules.log_count();
        }
    }

    /// Authenticates a user of the admin API, by the same check and with the same limits as a
    /// client. A refusal is logged and counted. Fails if the password is wrong, or was not checked.
    pub async fn operator(
        &self,
        user: &str,
        password: Bytes,
        peer: SocketAddr,
    ) -> Result<Identity, (ReasonCode, &'static str)> {
        let checked = match &self.0.logins {
            None => {
                let text = "there is no such user: this store has no users file";
                Err((ReasonCode::BAD_USER_NAME_OR_PASSWORD, text))
            }
            Some(logins) => logins.check(user, password, peer.ip()).await,
        };
        checked.inspect_err(|(_, why)| {
            self.0.audit.refused(&Refused {
                user: Some(user),
                ..Refused::of_peer("authenticate", peer, why)
            });
        })
    }

    /// What a user may do through the admin API at present, if anything.
    #[must_use]
    pub fn role(&self, user: &str) -> Option<Role> {
        self.0.logins.as_ref()?.users().current().role(user)
    }

    /// What clients may do, if rules are configured.
    pub fn rules(&self) -> Option<&Arc<Authorizer>> {
        self.0.rules.as_ref()
    }

    /// The rules file.
    pub fn rules_file(&self) -> Option<PathBuf> {
        self.rules()?.rules().files().first().cloned()
    }

    /// What currently decides a question. Explaining has no effect on the client.
    pub fn explain(&self, principal: &Principal<'_>, question: Question<'_>) -> Explanation {
        let subscribes = question.action == Action::Subscribe;
        match self.rules() {
            Some(rules) => explain::explain(&rules.rules().current(), principal, question),
            None if self.0.own_topics
                && subscribes
                && own_topics::reaches_other_clients(principal.client, question.on) =>
            {
                Explanation::without_rules(false)
            }
            None => Explanation::without_rules(true),
        }
    }
}

struct AccessFiles {
    users: Option<Arc<Watched<Users>>>,
    owners: Option<Arc<Watched<Owners>>>,
    tokens: Option<Arc<Watched<KeySet>>>,
    rules: Option<Arc<Watched<Rules>>>,
}

impl AccessFiles {
    /// Reads the files, without the wrong ones, and returns what is wrong.
    fn read(config: &AccessConfig) -> (Self, Vec<AccessError>) {
        fn or_wrong<T, E>(read: Option<Result<T, E>>, wrong: &mut Vec<AccessError>) -> Option<T>
        where
            AccessError: From<E>,
        {
            read?.map_err(|error| wrong.push(error.into())).ok()
        }
        let mut wrong = Vec::new();
        let users = config.users.as_deref().map(watch_users);
        let users = or_wrong(users, &mut wrong);
        let owners = config.certificate_users.as_ref().map(watch_owners);
        let owners = or_wrong(owners, &mut wrong);
        let tokens = or_wrong(config.tokens.clone().map(watch_keys), &mut wrong);
        let rules = config.rules.as_deref();
        let rules = rules.map(|path| watch_rules(path, config.behind_broker));
        let rules = or_wrong(rules, &mut wrong);
        if config.rules.is_some() && config.behind_broker {
            tracing::warn!(
                "behind a foreign broker only the client id counts in the rules, and any client that may publish requests can claim any"
            );
        } else if config.rules.is_some() && !config.authenticates() {
            tracing::warn!(
                "no authentication method is configured, so the rules rely on client ids, which any client can choose"
            );
        }
        let files = Self {
            users,
            owners,
            tokens,
            rules,
        };
        (files, wrong)
    }
}

fn watch_users(path: &Path) -> Result<Arc<Watched<Users>>, UsersError> {
    let read = {
        let path = path.to_owned();
        move || {
            let users = Users::open(&path)?;
            if users.is_empty() {
                tracing::warn!("{} names no user, so no client can log in", path.display());
            }
            Ok(users)
        }
    };
    Watched::open("users", vec![path.to_owned()], read)
}

/// Logs a warning if other accounts can write a file that was read. `effect` says what they could
/// do.
fn warn_if_writable(path: &Path, effect: &str) {
    if let Some(warning) = modes::writable(path, effect) {
        tracing::warn!("{warning}");
    }
}

fn watch_rules(path: &Path, behind_broker: bool) -> Result<Arc<Watched<Rules>>, RulesError> {
    let read = {
        let (path, seal) = (path.to_owned(), Arc::new(Seal::default()));
        move || {
            let rules = Rules::open(&path)?.sealed_by(seal.clone());
            // Clients do not connect to a store behind a foreign broker.
            let connect = explain::connect_warning(&rules).filter(|_| !behind_broker);
            for (line, warning) in connect.into_iter().chain(explain::warnings(&rules)) {
                tracing::warn!("{}, line {line}: {warning}", path.display());
            }
            warn_if_writable(&path, "allow themselves everything");
            Ok(rules)
        }
    };
    Watched::open("rules", vec![path.to_owned()], read)
}

fn watch_owners(from: &CertificateUsers) -> Result<Arc<Watched<Owners>>, CertificatesError> {
    const WHAT: &str = "owners of certificates";
    match from {
        CertificateUsers::CommonName => Watched::open(WHAT, Vec::new(), || Ok(Owners::CommonName)),
        CertificateUsers::File(path) => {
            let read = {
                let path = path.clone();
                move || {
                    let owners = Owners::open(&path)?;
                    warn_if_writable(&path, "give a certificate another user");
                    Ok(owners)
                }
            };
            Watched::open(WHAT, vec![path.clone()], read)
        }
    }
}

fn watch_keys(config: TokenConfig) -> Result<Arc<Watched<KeySet>>, TokenKeysError> {
    let files = vec![config.keys.clone()];
    Watched::open("token keys", files, move || {
        let keys = KeySet::open(&config)?;
        warn_if_writable(&config.keys, "add a key that verifies tokens");
        Ok(keys)
    })
}

impl Inner {
    async fn admit(&self, attempt: &Attempt) -> Result<Admission, Refusal> {
        let (mut identity, expires) = match &attempt.enhanced {
            Some(enhanced) => self.token_identity(enhanced)?,
            None => (self.password_identity(attempt).await?, None),
        };
        // The certificate opened the connection, so it must stay valid for every identity.
        identity.proofs.extend(attempt.door.proof.clone());
        let is_anonymous = identity == *Identity::anonymous() && identity.proofs.is_empty();
        Ok(Admission {
            // All anonymous clients share one object.
            identity: match is_anonymous {
                true => Identity::anonymous(),
                false => Arc::new(identity),
            },
            expires,
        })
    }

    /// The identity by a password, or by a certificate alone, or by no credentials.
    async fn password_identity(&self, attempt: &Attempt) -> Result<Identity, Refusal> {
        let owner = self.certificate_identity(attempt)?;
        match &self.logins {
            Some(logins) if has_login(attempt) => {
                let name = attempt.user.as_deref().unwrap_or_default();
                let password = attempt.password.clone().unwrap_or_default();
                let mut user = logins.check(name, password, attempt.door.peer.ip()).await?;
                // With both a password and a certificate, the user comes from the password and the
                // attributes from the certificate.
                if let Some(owner) = owner {
                    user.attributes = owner.attributes;
                    user.proofs.extend(owner.proofs);
                }
                Ok(user)
            }
            _ => match owner {
                Some(owner) => Ok(owner),
                None if self.anonymous => Ok(Identity::default()),
                None => Err((
                    ReasonCode::NOT_AUTHORIZED,
                    "anonymous clients are not let in: send a user name and a password, a client certificate or a token",
                )),
            },
        }
    }

    /// The identity by a token, and when the token expires.
    fn token_identity(&self, shown: &Enhanced) -> Result<(Identity, Option<Instant>), Refusal> {
        let Some(tokens) = self
            .tokens
            .as_ref()
            .filter(|_| *shown.method == *tokens::METHOD)
        else {
            let text = "this authentication method is not served here";
            return Err((ReasonCode::BAD_AUTHENTICATION_METHOD, text));
        };
        let verified = tokens.current().verify(&shown.data, SystemTime::now());
        let bearer = verified.map_err(|why| (ReasonCode::NOT_AUTHORIZED, why))?;
        let mut identity = bearer.identity;
        identity.proofs.push(Arc::new(Token {
            keys: tokens.clone(),
            key: bearer.key,
        }));
        Ok((identity, Instant::now().checked_add(bearer.remaining)))
    }

    /// Whether a client may be connected. `peer` is its address, if it is not connected yet. A
    /// refusal is logged and counted.
    fn may_connect(&self, origin: &Origin, peer: Option<SocketAddr>) -> bool {
        if *origin.client == *OPERATOR_CLIENT {
            self.refuse("connect", origin, peer, &explain::OPERATORS_ONLY);
            return false;
        }
        if !origin.identity.is_proven() {
            let why = "the password, the token or the certificate of this client is no longer valid, or stands for another user";
            self.refuse("authenticate", origin, peer, &why);
            return false;
        }
        self.allows(origin, peer, "connect", b"", Grants::may_connect)
    }

    /// Logs and counts a refusal of an authenticated client.
    fn refuse(
        &self,
        what: &'static str,
        origin: &Origin,
        peer: Option<SocketAddr>,
        why: &dyn fmt::Display,
    ) {
        let refused = Refused {
            peer,
            ..Refused::of_client(what, origin, why)
        };
        self.audit.refused_with_proof(&refused, true);
    }

    /// Whether the rules allow an action to a client. `peer` is its address, if it is not connected
    /// yet. A refusal is logged and counted.
    fn allows(
        &self,
        origin: &Origin,
        peer: Option<SocketAddr>,
        what: &'static str,
        on: &[u8],
        may: impl FnOnce(&Grants) -> bool,
    ) -> bool {
        let Some(rules) = &self.rules else {
            return true;
        };
        let allowed = may(&rules.grants(origin));
        if !allowed {
            self.refuse(what, origin, peer, &NoRule(what, on));
        }
        allowed
    }

    /// The identity by the client certificate; `None` if the client sent no certificate.
    fn certificate_identity(&self, attempt: &Attempt) -> Result<Option<Identity>, Refusal> {
        if attempt.door.certificates.is_empty() {
            return Ok(None);
        }
        // With a password, only the attributes are those of the certificate.
        let names_user = !(has_login(attempt) && self.logins.is_some());
        match &self.owners {
            // The listener has verified the certificate, so the client is authenticated although it
            // has no user name.
            None => Ok(Some(Identity::default())),
            Some(owners) => certificates::identify(owners, &attempt.door.certificates, names_user)
                .map(Some)
                .ok_or((
                    ReasonCode::NOT_AUTHORIZED,
                    "the client certificate has no subject that names a user",
                )),
        }
    }
}

/// Whether a client logs in by a password. Some programs send a user name beside a certificate, and
/// no password.
fn has_login(attempt: &Attempt) -> bool {
    let has_certificate = !attempt.door.certificates.is_empty();
    attempt.password.is_some() || (attempt.user.is_some() && !has_certificate)
}

/// The reason that the broker gave a client for a refusal.
struct BrokerReason<'a>(&'a BrokerRefusal<'a>);

impl fmt::Display for BrokerReason<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(refusal) = self;
        match refusal.text {
            Some(text) => write!(f, "{}: {text}", refusal.reason),
            None => write!(f, "{}", refusal.reason),
        }
    }
}

impl Access for AccessControl {
    fn admit(&self, attempt: Attempt) -> Deciding {
        let inner = self.0.clone();
        Box::pin(async move {
            match inner.admit(&attempt).await {
                Ok(admission) => {
                    // The broker assigns a missing client id later.
                    if let Some(rules) = inner.rules.as_ref().filter(|_| !attempt.client.is_empty())
                    {
                        rules.prepare(&attempt.client, &admission.identity);
                    }
                    Verdict::Admit(admission)
                }
                Err((reason, why)) => {
                    inner.audit.refused(&Refused {
                        client: &attempt.client,
                        user: attempt.user.as_deref(),
                        ..Refused::of_peer("authenticate", attempt.door.peer, &why)
                    });
                    Verdict::Refuse(reason, why)
                }
            }
        })
    }

    fn may_connect(&self, origin: &Origin) -> bool {
        self.0.may_connect(origin, None)
    }

    fn may_connect_from(&self, origin: &Origin, peer: SocketAddr) -> bool {
        self.0.may_connect(origin, Some(peer))
    }

    fn may_publish(&self, origin: &Origin, topic: &[u8]) -> bool {
        let may = |grants: &Grants| grants.may_publish(topic);
        self.0.allows(origin, None, "publish", topic, may)
    }

    fn may_publish_will(&self, origin: &Origin, peer: SocketAddr, topic: &[u8]) -> bool {
        let may = |grants: &Grants| grants.may_publish(topic);
        self.0.allows(origin, Some(peer), "publish", topic, may)
    }

    fn may_subscribe(&self, origin: &Origin, filter: &[u8]) -> bool {
        if self.0.own_topics && own_topics::reaches_other_clients(&origin.client, filter) {
            let why = "its filter matches topics of other clients, which need a rule";
            self.0.refuse("subscribe", origin, None, &why);
            return false;
        }
        let may = |grants: &Grants| grants.may_subscribe(filter);
        self.0.allows(origin, None, "subscribe", filter, may)
    }

    fn may_resume(&self, origin: &Origin, filter: &[u8]) -> bool {
        // Not audited: the refusal was logged when the subscription was suspended.
        match &self.0.rules {
            Some(rules) => rules.grants(origin).may_subscribe(filter),
            None if self.0.own_topics => !own_topics::reaches_other_clients(&origin.client, filter),
            None => true,
        }
    }

    fn may_have_answer(&self, client: &str, asker: Option<&str>, topic: &[u8]) -> bool {
        // Without own topics and rules, every client may receive every response.
        let is_restricted = self.0.own_topics || self.0.rules.is_some();
        !is_restricted || own_topics::may_have_answer(client, asker, topic)
    }

    fn may_receive(&self, origin: &Origin, topic: &[u8]) -> bool {
        // Not audited: the client asked for it while it was allowed.
        let Some((rules, key)) = self.0.rules.as_ref().zip(notified_key(topic)) else {
            return true;
        };
        rules.grants(origin).may_read(&key)
    }

    fn may_keep(&self, origin: &Origin, topic: &[u8]) -> bool {
        (self.topics_to_keep(origin)).is_none_or(|may_keep| may_keep(topic))
    }

    fn topics_to_keep<'a>(&'a self, origin: &'a Origin) -> Option<TopicCheck<'a>> {
        // Not audited either.
        if let Some(rules) = &self.0.rules {
            let grants = rules.grants(origin);
            return Some(Box::new(move |topic: &[u8]| {
                let may_read = |key: Vec<u8>| grants.may_read(&key);
                grants.may_subscribe(topic) && notified_key(topic).is_none_or(may_read)
            }));
        }
        if !self.0.own_topics {
            return None;
        }
        Some(Box::new(move |topic: &[u8]| {
            !own_topics::reaches_other_clients(&origin.client, topic)
        }))
    }

    fn refused(&self, refusal: &BrokerRefusal<'_>) {
        if refusal.is_of_credentials() {
            self.0.audit.count("authenticate");
        }
        let refused = Refused {
            what: refusal.what.name(),
            peer: refusal.peer,
            client: refusal.client,
            user: refusal.user,
            why: &BrokerReason(refusal),
        };
        self.0
            .audit
            .refused_by_broker(&refused, refusal.is_admitted);
    }
}

#[cfg(test)]
mod tests;
