//! Who may connect, and what each client may publish and subscribe to: the embedder's answers.
//!
//! In comes what a CONNECT shows, and what is known of the stream that it came over; out go an identity or a refusal, and
//! a yes or no for each topic. The broker enforces the answers, and knows no user, no key and no rule itself.

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

/// Something that a client has shown to be let in, such as a password, and that may be taken back while it is connected.
pub trait Proof: Send + Sync {
    /// Whether it is still good. The first answer after a change may take some time; later ones are as quick as those of
    /// [`Access`].
    fn is_good(&self) -> bool;
}

/// What is known of a stream before its first byte.
#[derive(Clone)]
pub struct Door {
    /// The other end.
    pub peer: SocketAddr,
    /// The certificates that the client has shown, in DER, its own first. The listener has verified them; none where
    /// it did not ask.
    pub certificates: Arc<[Vec<u8>]>,
    /// Whether the listener would still take them.
    pub proof: Option<Arc<dyn Proof>>,
}

impl Door {
    /// That of a stream over which nobody has shown a certificate.
    #[must_use]
    pub fn open(peer: SocketAddr) -> Self {
        Self {
            peer,
            certificates: Arc::default(),
            proof: None,
        }
    }
}

impl fmt::Debug for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Door")
            .field("peer", &self.peer)
            .field("certificates", &self.certificates.len())
            .finish_non_exhaustive()
    }
}

/// Who is at the other end of a connection, as [`Access::admit`] found.
#[derive(Clone, Default)]
pub struct Identity {
    /// The name of the user; none where the client is anonymous.
    pub user: Option<Box<str>>,
    /// What else is known of it, as names and values.
    pub attributes: Vec<(Box<str>, Box<str>)>,
    /// What proved it; none where it needs no proof. Who proves to be the same in another way is the same, so these have no
    /// part in comparisons.
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
    /// Nobody in particular.
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

    /// Whether all that proved it is still good.
    #[must_use]
    pub fn is_proven(&self) -> bool {
        self.proofs.iter().all(|proof| proof.is_good())
    }
}

/// A client that asks to be let in, or to stay (section 4.12.1).
#[derive(Clone)]
pub struct Attempt {
    /// The client identifier; empty where the broker is to choose one.
    pub client: Box<str>,
    /// The user name of CONNECT. Any UTF-8 without U+0000, of up to 65 535 bytes.
    pub user: Option<Box<str>>,
    /// The password of CONNECT; may come without a user name (section 3.1.2.9).
    pub password: Option<Bytes>,
    /// The Authentication Method and Data, where the client asks for enhanced authentication.
    pub enhanced: Option<Enhanced>,
    /// The stream it came over.
    pub door: Door,
}

/// Enhanced authentication as a client asks for it (section 4.12). Methods of more than one message are not served.
#[derive(Clone, PartialEq, Eq)]
pub struct Enhanced {
    /// The Authentication Method.
    pub method: Box<str>,
    /// The Authentication Data; empty where there is none.
    pub data: Bytes,
}

/// Without what is secret.
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

/// Without what is secret.
impl fmt::Debug for Enhanced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Enhanced")
            .field("method", &self.method)
            .finish_non_exhaustive()
    }
}

/// What becomes of an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It is this client.
    Admit(Admission),
    /// Refused with this code, which has to be one of CONNACK (section 3.2.2.2), and Reason String.
    Refuse(ReasonCode, &'static str),
}

/// A client that is let in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Admission {
    /// Who it is.
    pub identity: Arc<Identity>,
    /// When what it has shown is no longer good. The connection ends then with DISCONNECT 0x87, unless the client has
    /// authenticated again.
    pub expires: Option<Instant>,
}

impl Verdict {
    /// Lets this client in, for as long as it likes.
    #[must_use]
    pub fn admit(identity: Arc<Identity>) -> Self {
        Self::Admit(Admission {
            identity,
            expires: None,
        })
    }
}

/// An answer that may take its time.
pub type Deciding = Pin<Box<dyn Future<Output = Verdict> + Send>>;

/// Decides who may connect, publish and subscribe. All methods but [`admit`](Self::admit) are called for many packets, most of them
/// with a lock of the broker held: they have to be quick, and may not call the broker.
pub trait Access: Send + Sync + 'static {
    /// Who is this? Asked before the broker knows of the client, and again where it authenticates anew; dropped where the
    /// time for a CONNECT is over. An answer that is ready when it is first polled is taken at once. A bounded number of the
    /// others is undecided at a time ([`Limits::admissions_max`](crate::Limits::admissions_max)); one more is dropped.
    fn admit(&self, attempt: Attempt) -> Deciding;

    /// Whether this client may be connected, as things are by now. Asked for every new connection, for one whose client has
    /// authenticated anew, and without a lock for all of them by [`Broker::recheck`](crate::Broker::recheck). The session
    /// number is 0: it has none yet, or may be gone by then. The [proofs](Identity::proofs) are to be looked at here.
    fn may_connect(&self, who: &Origin) -> bool {
        _ = who;
        true
    }

    /// Whether this client may publish an ordinary message to this topic, its will included. Not asked for what the
    /// service takes.
    fn may_publish(&self, who: &Origin, topic: &[u8]) -> bool;

    /// Whether this client may subscribe to this filter, which is well formed: of a shared subscription the one behind
    /// `$share/NAME/`. A session that may not have it any more asks the same of the topics of its messages.
    fn may_subscribe(&self, who: &Origin, filter: &[u8]) -> bool;

    /// Whether this client may receive the answer to a request of another client at this topic. Only asked about clients that
    /// subscribed to the topic; `asker` is none if the session of the request has ended.
    fn may_have_answer(&self, client: &str, asker: Option<&str>, topic: &[u8]) -> bool {
        _ = (client, asker, topic);
        true
    }

    /// The broker has refused something that this access control was not asked about, or ends a connection: for a log. As
    /// many come as hostile clients care to provoke.
    fn refused(&self, refusal: &Refusal<'_>) {
        _ = refusal;
    }
}

/// Lets everybody do everything, anonymously. User names and passwords are not looked at.
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
}
