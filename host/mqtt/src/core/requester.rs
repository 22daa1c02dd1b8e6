//! Decides which subscribers may receive the answer to a request.
//!
//! The access control is asked only about sessions other than the one that sent the request.

use crate::{Access, Token, router::SessionKey, session::Session};

/// The session whose request a message answers.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) enum Requester {
    /// The message is ordinary, or answers a QoS 0 request. Such an answer holds only an error.
    #[default]
    None,
    /// A session that still exists.
    Session(SessionKey),
    /// A session that has ended.
    Ended,
    /// Unknown, like a session that has ended. The rules have changed, and not all subscriptions
    /// were checked yet.
    UnderNewRules,
}

impl Requester {
    /// The requester of a token.
    pub(super) fn of(token: Option<&Token>, sessions: &[Option<Box<Session>>]) -> Self {
        let Some(token) = token else {
            return Self::None;
        };
        let session = sessions.get(token.session as usize);
        let session = session.and_then(|it| it.as_deref());
        match session.is_some_and(|it| it.number == token.number) {
            true => Self::Session(token.session),
            false => Self::Ended,
        }
    }

    /// Whether the access control allows the message for a session that subscribed to its topic.
    pub(super) fn may_reach(
        self,
        key: SessionKey,
        topic: &[u8],
        sessions: &[Option<Box<Session>>],
        access: &dyn Access,
    ) -> bool {
        let session = |key: SessionKey| sessions.get(key as usize)?.as_deref();
        let client = |key: SessionKey| Some(&*session(key)?.client);
        let requester = match self {
            Self::None => return true,
            Self::Session(requester) if requester == key => return true,
            Self::Session(requester) => client(requester),
            Self::UnderNewRules => {
                let origin = session(key).and_then(Session::origin);
                if origin.is_some_and(|origin| !access.may_keep(&origin, topic)) {
                    return false;
                }
                None
            }
            Self::Ended => None,
        };
        client(key).is_some_and(|it| access.may_have_answer(it, requester, topic))
    }
}
