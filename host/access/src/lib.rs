//! Who connects: users, owners of certificates, bearers of tokens, or anybody; and what they may do there.
//!
//! In comes what a client shows; out goes who it is, or a refusal that says what is missing. It opens no connection, and says
//! to nobody whether a user exists.

#![forbid(unsafe_code)]

pub mod audit;
mod authorizer;
pub mod certificates;
pub mod explain;
pub mod limits;
mod logins;
mod own_topics;
mod places;
pub mod rules;
pub mod settings;
mod throttle;
pub mod tokens;
pub mod users;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use statehouse_mqtt::{
    Access, Admission, Attempt, Deciding, Enhanced, Identity, Origin, ReasonCode,
    Refusal as BrokerRefusal, Verdict,
};

pub use self::authorizer::{Authorizer, Found, NoRule};
use self::certificates::{CertificatesError, Owners};
use self::explain::{Explanation, Question};
use self::logins::{Logins, Refusal};
use self::rules::{Action, Grants, Principal, Rules, RulesError, Seal};
use self::tokens::{KeySet, Token, TokenKeysError, TokenVerifier};
use self::users::{Users, UsersError};
use crate::audit::{Audit, Refused};
use crate::settings::{AccessConfig, CertificateUsers, TokenConfig};
use statehouse_files::watch::{Reloads, Watched};

/// Why a store does not start. Its text is a sentence for the operator.
#[derive(Debug, thiserror::Error)]
pub enum AccessError {
    /// The users file.
    #[error("users: {0}")]
    Users(#[from] UsersError),
    /// The owners of certificates.
    #[error("certificate_users: {0}")]
    Certificates(#[from] CertificatesError),
    /// The keys of tokens.
    #[error("token_keys: {0}")]
    Tokens(#[from] TokenKeysError),
    /// The rules.
    #[error("rules: {0}")]
    Rules(#[from] RulesError),
}

/// Decides who is let in.
pub struct AccessControl(Arc<Doors>);

/// The ways in.
struct Doors {
    logins: Option<Logins>,
    owners: Option<Arc<Watched<Owners>>>,
    tokens: Option<Arc<Watched<KeySet>>>,
    /// Whether a client may come in that shows nothing.
    anonymous: bool,
    /// Whether a client's answers are its own, where no rules say more.
    own_topics: bool,
    /// What clients may do; everything without.
    rules: Option<Arc<Authorizer>>,
    audit: Arc<Audit>,
}

impl AccessControl {
    /// Reads the files for the first time.
    ///
    /// # Errors
    /// [`AccessError`], where a file cannot be taken.
    pub fn open(config: &AccessConfig, audit: Arc<Audit>) -> Result<Self, AccessError> {
        let users = config.users.as_deref().map(watch_users).transpose()?;
        let owners = match &config.certificate_users {
            None => None,
            Some(from) => Some(watch_owners(from)?),
        };
        let tokens = config.tokens.clone().map(watch_keys).transpose()?;
        let rules = config.rules.as_deref().map(watch_rules).transpose()?;
        if rules.is_some() && !config.authenticates() {
            tracing::warn!(
                "clients do not show this store who they are, so its rules go by client ids that anybody can take"
            );
        }
        Ok(Self(Arc::new(Doors {
            anonymous: config.allow_anonymous || !config.authenticates(),
            own_topics: config.authenticates() && rules.is_none(),
            rules: rules.map(Authorizer::new),
            logins: users.map(Logins::new),
            owners,
            tokens,
            audit,
        })))
    }

    /// Adds the files to those that are read again. `then` is called when one has changed, to look at who is connected.
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
                    rules.tell();
                }
            });
            rules.tell();
        }
    }

    /// What clients may do, where there are rules.
    pub fn rules(&self) -> Option<&Arc<Authorizer>> {
        self.0.rules.as_ref()
    }

    /// The file that they are in.
    pub fn rules_file(&self) -> Option<PathBuf> {
        self.rules()?.rules().files().first().cloned()
    }

    /// What decides a question by now. Nobody is refused anything by it.
    pub fn explain(&self, who: &Principal<'_>, question: Question<'_>) -> Explanation {
        let subscribes = question.action == Action::Subscribe;
        match self.rules() {
            Some(rules) => explain::explain(&rules.rules().current(), who, question),
            None if self.0.own_topics
                && subscribes
                && own_topics::is_of_another(who.client, question.on) =>
            {
                Explanation::without_rules(false)
            }
            None => Explanation::without_rules(true),
        }
    }
}

fn watch_users(path: &Path) -> Result<Arc<Watched<Users>>, UsersError> {
    let read = {
        let path = path.to_owned();
        move || {
            let users = Users::open(&path)?;
            if users.is_empty() {
                tracing::warn!("{} names no user: nobody can log in", path.display());
            }
            Ok(users)
        }
    };
    Watched::open("users", vec![path.to_owned()], read)
}

fn watch_rules(path: &Path) -> Result<Arc<Watched<Rules>>, RulesError> {
    let read = {
        let (path, seal) = (path.to_owned(), Arc::new(Seal::default()));
        move || {
            let rules = Rules::open(&path)?.sealed_by(seal.clone());
            for (line, doubt) in explain::doubts(&rules) {
                tracing::warn!("{}, line {line}: {doubt}", path.display());
            }
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
                move || Owners::open(&path)
            };
            Watched::open(WHAT, vec![path.clone()], read)
        }
    }
}

fn watch_keys(config: TokenConfig) -> Result<Arc<Watched<KeySet>>, TokenKeysError> {
    let files = vec![config.keys.clone()];
    Watched::open("token keys", files, move || KeySet::open(&config))
}

impl Doors {
    async fn admit(&self, attempt: &Attempt) -> Result<Admission, Refusal> {
        let (mut identity, expires) = match &attempt.enhanced {
            Some(enhanced) => self.bearer(enhanced)?,
            None => (self.visitor(attempt).await?, None),
        };
        // Whoever it is came over a connection that a certificate has opened.
        identity.proofs.extend(attempt.door.proof.clone());
        let is_nobody = identity == *Identity::anonymous() && identity.proofs.is_empty();
        Ok(Admission {
            // Which one is enough of, for as many as come.
            identity: match is_nobody {
                true => Identity::anonymous(),
                false => Arc::new(identity),
            },
            expires,
        })
    }

    /// Who this is by a password, a certificate, or nothing.
    async fn visitor(&self, attempt: &Attempt) -> Result<Identity, Refusal> {
        let owner = self.owner(attempt)?;
        match &self.logins {
            Some(logins) if attempt.user.is_some() || attempt.password.is_some() => {
                let name = attempt.user.as_deref().unwrap_or_default();
                let password = attempt.password.clone().unwrap_or_default();
                let user = logins.check(name, password, attempt.door.peer.ip()).await?;
                // Who logs in over a connection with a certificate is both: the user, with the certificate's attributes.
                let attributes = owner.map(|owner| owner.attributes).unwrap_or_default();
                Ok(Identity { attributes, ..user })
            }
            _ => match owner {
                Some(owner) => Ok(owner),
                None if self.anonymous => Ok(Identity::default()),
                None => Err((
                    ReasonCode::NOT_AUTHORIZED,
                    "anonymous clients are not let in: show a user name and a password, a client certificate or a token",
                )),
            },
        }
    }

    /// Whose token this is, and when it expires.
    fn bearer(&self, shown: &Enhanced) -> Result<(Identity, Option<Instant>), Refusal> {
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

    /// Whether rules allow something to a client. A refusal is told.
    fn allows(
        &self,
        who: &Origin,
        what: &'static str,
        on: &[u8],
        may: impl FnOnce(&Grants) -> bool,
    ) -> bool {
        let Some(rules) = &self.rules else {
            return true;
        };
        let allowed = may(&rules.grants(who));
        if !allowed {
            self.audit.refused(&Refused {
                what,
                peer: None,
                client: &who.client,
                user: who.identity.user.as_deref(),
                why: &NoRule(what, on),
            });
        }
        allowed
    }

    /// Who the certificate says that this is, where one was shown.
    fn owner(&self, attempt: &Attempt) -> Result<Option<Identity>, Refusal> {
        if attempt.door.certificates.is_empty() {
            return Ok(None);
        }
        match &self.owners {
            // The listener has verified it, so this is somebody, though without a name.
            None => Ok(Some(Identity::default())),
            Some(owners) => owners
                .current()
                .identify(&attempt.door.certificates)
                .map(Some)
                .ok_or((
                    ReasonCode::NOT_AUTHORIZED,
                    "the client certificate has no subject that names a user",
                )),
        }
    }
}

/// What a client was told by the broker.
struct Said<'a>(&'a BrokerRefusal<'a>);

impl fmt::Display for Said<'_> {
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
        let doors = self.0.clone();
        Box::pin(async move {
            match doors.admit(&attempt).await {
                Ok(admission) => {
                    // Without an id of its own it gets one from the broker, which only then is known.
                    if let Some(rules) = doors.rules.as_ref().filter(|_| !attempt.client.is_empty())
                    {
                        rules.expect(&attempt.client, &admission.identity);
                    }
                    Verdict::Admit(admission)
                }
                Err((reason, why)) => {
                    doors.audit.refused(&Refused {
                        what: "authenticate",
                        peer: Some(attempt.door.peer),
                        client: &attempt.client,
                        user: attempt.user.as_deref(),
                        why: &why,
                    });
                    Verdict::Refuse(reason, why)
                }
            }
        })
    }

    fn may_connect(&self, who: &Origin) -> bool {
        if !who.identity.is_proven() {
            self.0.audit.refused(&Refused {
                what: "authenticate",
                peer: None,
                client: &who.client,
                user: who.identity.user.as_deref(),
                why: &"the password, the token or the certificate that it has shown is no longer good",
            });
            return false;
        }
        self.0.allows(who, "connect", b"", Grants::may_connect)
    }

    fn may_publish(&self, who: &Origin, topic: &[u8]) -> bool {
        let may = |grants: &Grants| grants.may_publish(topic);
        self.0.allows(who, "publish", topic, may)
    }

    fn may_subscribe(&self, who: &Origin, filter: &[u8]) -> bool {
        if self.0.own_topics && own_topics::is_of_another(&who.client, filter) {
            self.0.audit.refused(&Refused {
                what: "subscribe",
                peer: None,
                client: &who.client,
                user: who.identity.user.as_deref(),
                why: &"its filter matches topics of other clients, which need a rule",
            });
            return false;
        }
        let may = |grants: &Grants| grants.may_subscribe(filter);
        self.0.allows(who, "subscribe", filter, may)
    }

    fn may_have_answer(&self, client: &str, asker: Option<&str>, topic: &[u8]) -> bool {
        // Without either, everybody may receive everything.
        let is_bound = self.0.own_topics || self.0.rules.is_some();
        !is_bound || own_topics::may_have_answer(client, asker, topic)
    }

    fn refused(&self, refusal: &BrokerRefusal<'_>) {
        self.0.audit.refused_by_broker(&Refused {
            what: refusal.what.name(),
            peer: refusal.peer,
            client: refusal.client,
            user: refusal.user,
            why: &Said(refusal),
        });
    }
}
