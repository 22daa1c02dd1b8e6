//! Which subscribers may receive the answer to a request.
//!
//! The access control decides; it is asked only about sessions other than the one that sent the request.

use crate::{Access, Token, router::SessionKey, session::Session};

/// Whose request a message answers.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) enum Answers {
    /// It is an ordinary message, or the answer to a request at QoS 0, which holds an error only.
    #[default]
    Nobody,
    /// A session that is there.
    Session(SessionKey),
    /// A session that has ended.
    Ended,
}

impl Answers {
    /// Whose request this token is of.
    pub(super) fn of(token: Option<&Token>, sessions: &[Option<Box<Session>>]) -> Self {
        let Some(token) = token else {
            return Self::Nobody;
        };
        let session = sessions.get(token.session as usize);
        let session = session.and_then(|it| it.as_deref());
        match session.is_some_and(|it| it.number == token.number) {
            true => Self::Session(token.session),
            false => Self::Ended,
        }
    }

    /// Whether the access control lets a session that subscribed to the topic have the message.
    pub(super) fn may_reach(
        self,
        key: SessionKey,
        topic: &[u8],
        sessions: &[Option<Box<Session>>],
        access: &dyn Access,
    ) -> bool {
        let client = |key: SessionKey| {
            let session = sessions.get(key as usize)?.as_deref()?;
            Some(&*session.client)
        };
        let asker = match self {
            Self::Nobody => return true,
            Self::Session(asker) if asker == key => return true,
            Self::Session(asker) => client(asker),
            Self::Ended => None,
        };
        client(key).is_some_and(|it| access.may_have_answer(it, asker, topic))
    }
}
