//! Access control: the embedder decides who may connect and what each client may publish and
//! subscribe to.
//!
//! [`Access::admit`] gets the credentials of a CONNECT and what the listener knows of its stream,
//! and returns an identity or a refusal. The other methods allow or deny single topics. The broker
//! enforces these decisions and must not know any user, key or rule itself.

use std::{
    fmt,
    future::{self, Future},
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, LazyLock},
    time::Instant,
};

use bytes::Bytes;

use crate::{Origin, ReasonCode, Refusal};

/// A credential of a client, such as a password, that may be revoked while the client is connected.
pub trait Proof: Send + Sync {
    /// Whether the credential is still valid. The first call after a change may take some time;
    /// later calls are as fast as those of [`Access`].
    fn is_good(&self) -> bool;
}

/// What a listener knows of a stream before its first byte.
#[derive(Clone)]
pub struct Door {
    /// The address of the remote end.
    pub peer: SocketAddr,
    /// The client's certificate chain in DER, its own certificate first, verified by the listener.
    /// Empty if the listener did not request a certificate.
    pub certificates: Arc<[Vec<u8>]>,
    /// Whether the listener would still accept these certificates.
    pub proof: Option<Arc<dyn Proof>>,
}

impl Door {
    /// A stream without client certificates.
    #[must_use]
    pub fn open(peer: SocketAddr) -> Self {
        Self {
            peer,
            certificates: Arc::default(),
            proof: None,
        }
    }
}

/// The identity of a connected client, as [`Access::admit`] determined it.
#[derive(Clone, Default)]
pub struct Identity {
    /// The name of the user; none if the client is anonymous.
    pub user: Option<Box<str>>,
    /// Further attributes of the client, as names and values.
    pub attributes: Vec<(Box<str>, Box<str>)>,
    /// The credentials that prove this identity; empty if it needs no proof. Comparisons ignore
    /// them: two proofs of the same user and attributes are the same identity.
    pub proofs: Vec<Arc<dyn Proof>>,
}

impl PartialEq for Identity {
    fn eq(&self, other: &Self) -> bool {
        (&self.user, &self.attributes) == (&other.user, &other.attributes)
    }
}

impl Eq for Identity {}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity")
            .field("user", &self.user)
            .field("attributes", &self.attributes)
            .finish_non_exhaustive()
    }
}

impl Identity {
    /// The identity of a client without a user name and attributes.
    #[must_use]
    pub fn anonymous() -> Arc<Self> {
        static ANONYMOUS: LazyLock<Arc<Identity>> = LazyLock::new(Arc::default);
        ANONYMOUS.clone()
    }

    /// The value of an attribute.
    #[must_use]
    pub fn attribute(&self, name: &str) -> Option<&str> {
        let mut named = self.attributes.iter().filter(|(it, _)| **it == *name);
        named.next().map(|(_, value)| &**value)
    }

    /// Whether all credentials of this identity are still valid.
    #[must_use]
    pub fn is_proven(&self) -> bool {
        self.proofs.iter().all(|proof| proof.is_good())
    }
}

/// A client that connects, or that authenticates again (section 4.12.1).
#[derive(Clone)]
pub struct Attempt {
    /// The client identifier; empty if the broker must choose one.
    pub client: Box<str>,
    /// The user name of CONNECT. Any UTF-8 without U+0000, of up to 65 535 bytes.
    pub user: Option<Box<str>>,
    /// The password of CONNECT; may come without a user name (section 3.1.2.9).
    pub password: Option<Bytes>,
    /// The Authentication Method and Data, if the client uses enhanced authentication.
    pub enhanced: Option<Enhanced>,
    /// The stream of the connection.
    pub door: Door,
}

/// Enhanced authentication as a client requests it (section 4.12). Methods that need more than one
/// message are not supported.
#[derive(Clone, PartialEq, Eq)]
pub struct Enhanced {
    /// The Authentication Method.
    pub method: Box<str>,
    /// The Authentication Data; empty if the packet had none.
    pub data: Bytes,
}

/// Omits secrets.
impl fmt::Debug for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attempt")
            .field("client", &self.client)
            .field("user", &self.user)
            .field("password", &self.password.is_some())
            .field("enhanced", &self.enhanced)
            .field("peer", &self.door.peer)
            .finish_non_exhaustive()
    }
}

/// Omits secrets.
impl fmt::Debug for Enhanced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Enhanced")
            .field("method", &self.method)
            .finish_non_exhaustive()
    }
}

/// The decision about an [`Attempt`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The client is admitted.
    Admit(Admission),
    /// Refused with this code, which must be one of CONNACK (section 3.2.2.2), and Reason String.
    Refuse(ReasonCode, &'static str),
}

/// An admitted client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admission {
    /// The identity of the client.
    pub identity: Arc<Identity>,
    /// When the credentials expire. The broker then ends the connection with DISCONNECT 0x87,
    /// unless the client has authenticated again before.
    pub expires: Option<Instant>,
}

impl Verdict {
    /// Admits the client without an expiry time.
    #[must_use]
    pub fn admit(identity: Arc<Identity>) -> Self {
        Self::Admit(Admission {
            identity,
            expires: None,
        })
    }
}

/// A decision that may take some time.
pub type Deciding = Pin<Box<dyn Future<Output = Verdict> + Send>>;

/// Whether something is allowed for a topic.
pub type TopicCheck<'a> = Box<dyn Fn(&[u8]) -> bool + 'a>;

/// Decides who may connect, publish and subscribe.
///
/// All methods but [`admit`](Self::admit) are called for many packets, most of them with a lock of
/// the broker held. They must be fast and must never call the broker.
pub trait Access: Send + Sync + 'static {
    /// Authenticates a client: before the broker knows of it, and again if it re-authenticates.
    ///
    /// A decision that is ready when first polled is used at once. Of the others,
    /// [`Limits::admissions_max`](crate::Limits::admissions_max) may be pending at a time; the
    /// broker drops further ones. It also drops a decision when the time for the CONNECT is over.
    fn admit(&self, attempt: Attempt) -> Deciding;

    /// Whether this client may be connected under the rules in force now. Must check the
    /// [proofs](Identity::proofs).
    ///
    /// Called for every new connection and after a re-authentication.
    /// [`Broker::recheck`](crate::Broker::recheck) calls it for all connections without holding a
    /// lock. The session number is 0, because the session may not exist yet or may have ended.
    fn may_connect(&self, origin: &Origin) -> bool {
        _ = origin;
        true
    }

    /// [`may_connect`](Self::may_connect) for a new connection, with the address that it comes from:
    /// a log of refusals needs it, because the client does not become a connected one.
    fn may_connect_from(&self, origin: &Origin, peer: SocketAddr) -> bool {
        _ = peer;
        self.may_connect(origin)
    }

    /// Whether this client may publish an ordinary message, or a will, to this topic. Not called
    /// for topics that the service claims.
    fn may_publish(&self, origin: &Origin, topic: &[u8]) -> bool;

    /// [`may_publish`](Self::may_publish) for the will of a new connection, with the address that
    /// the connection comes from.
    fn may_publish_will(&self, origin: &Origin, peer: SocketAddr, topic: &[u8]) -> bool {
        _ = peer;
        self.may_publish(origin, topic)
    }

    /// Whether this client may subscribe to this well-formed filter. For a shared subscription it
    /// is the filter after `$share/NAME/`.
    fn may_subscribe(&self, origin: &Origin, filter: &[u8]) -> bool;

    /// [`may_subscribe`](Self::may_subscribe) for a suspended subscription. Called after each
    /// change of rules, and when a session is resumed. A refusal is no news: the client asks for
    /// nothing.
    fn may_resume(&self, origin: &Origin, filter: &[u8]) -> bool {
        self.may_subscribe(origin, filter)
    }

    /// Whether a message to this topic may wait for this client. Called for each queued message
    /// after a change of rules. A refusal is no news: the client may have asked long ago.
    fn may_keep(&self, origin: &Origin, topic: &[u8]) -> bool {
        self.may_receive(origin, topic) && self.may_subscribe(origin, topic)
    }

    /// [`may_keep`](Self::may_keep) for many topics, under the rules in force now. `None` if it is
    /// true for every topic, so that no queued message needs to be examined. Called when a session
    /// is resumed and after a change of rules, with the lock held that a later
    /// [`Broker::recheck`](crate::Broker::recheck) takes.
    fn topics_to_keep<'a>(&'a self, origin: &'a Origin) -> Option<TopicCheck<'a>> {
        Some(Box::new(move |topic: &[u8]| self.may_keep(origin, topic)))
    }

    /// Whether this client may receive the answer to a request of another client at this topic.
    /// Only called for clients that subscribed to the topic; `asker` is none if the session of the
    /// request has ended.
    fn may_have_answer(&self, client: &str, asker: Option<&str>, topic: &[u8]) -> bool {
        _ = (client, asker, topic);
        true
    }

    /// Whether this client may still be sent a queued message of the service at this topic. Called
    /// for every queued message after a change of the rules, and when a session is resumed.
    fn may_receive(&self, origin: &Origin, topic: &[u8]) -> bool {
        _ = (origin, topic);
        true
    }

    /// Reports, for a log, that the broker refused something without asking this access control, or
    /// ends a connection. Hostile clients can provoke any number of these calls.
    fn refused(&self, refusal: &Refusal<'_>) {
        _ = refusal;
    }
}

/// Admits every client anonymously and allows everything. Ignores user names and passwords.
#[derive(Debug, Clone, Copy, Default)]
pub struct Anyone;

impl Access for Anyone {
    fn admit(&self, attempt: Attempt) -> Deciding {
        let verdict = match attempt.enhanced {
            None => Verdict::admit(Identity::anonymous()),
            Some(_) => Verdict::Refuse(
                ReasonCode::BAD_AUTHENTICATION_METHOD,
                "enhanced authentication is not available",
            ),
        };
        Box::pin(future::ready(verdict))
    }

    fn may_publish(&self, _: &Origin, _: &[u8]) -> bool {
        true
    }

    fn may_subscribe(&self, _: &Origin, _: &[u8]) -> bool {
        true
    }

    fn topics_to_keep<'a>(&'a self, _: &'a Origin) -> Option<TopicCheck<'a>> {
        None
    }
}
