//! The login of a user at etcd.
//!
//! A server answers the login with a token. It forgets the token when it restarts, when the token
//! was not used for five minutes, and when the password or the rights of the user change. A request
//! with such a token is refused and has no effect, so it can be sent again after another login.

use std::fmt;
use std::sync::Arc;

use tokio::sync::Mutex;
use tokio::task::JoinError;
use tokio::time::timeout;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;

use super::connection::call;
use super::messages::{AuthenticateRequest, AuthenticateResponse};
use crate::engine::EngineError;
use crate::limits;

const AUTHENTICATE: &str = "/etcdserverpb.Auth/Authenticate";

/// What proves the login in a request. None if etcd does not ask for one.
pub(super) type Token = Option<MetadataValue<Ascii>>;

/// The name and password of a user of etcd.
#[derive(Clone)]
pub struct Login {
    /// The name.
    pub user: String,
    /// Reads the password before each login, because it may have changed. An error is a text for
    /// the operator.
    pub password: Arc<dyn Fn() -> Result<String, String> + Send + Sync>,
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Login");
        debug.field("user", &self.user).finish_non_exhaustive()
    }
}

#[derive(Clone, Debug)]
pub(super) struct Session {
    login: Login,
    /// None before the first login, and after the server has forgotten the token. A login in
    /// progress holds the lock.
    token: Arc<Mutex<Option<Token>>>,
}

impl Session {
    pub(super) fn new(login: Login) -> Self {
        Self {
            login,
            token: Arc::default(),
        }
    }

    /// The token of this login. Requests at the same time wait for one login.
    ///
    /// A server computes the hash of the password to the end, on a small machine for longer than a
    /// request waits. So a request that gives up must not end the login: each later one would begin
    /// another, and none would finish.
    pub(super) async fn token(&self, channel: &Channel) -> Result<Token, EngineError> {
        let mut known = self.token.clone().lock_owned().await;
        if let Some(token) = &*known {
            return Ok(token.clone());
        }
        let (login, channel) = (self.login.clone(), channel.clone());
        let logging_in = tokio::spawn(async move {
            let limit = limits::LOGIN_TIMEOUT;
            let token = timeout(limit, login.authenticate(&channel)).await;
            let late = |_| EngineError::NotApplied(format!("etcd took {limit:?} for a login"));
            Ok(known.insert(token.map_err(late)??).clone())
        });
        let ended = |error: JoinError| EngineError::NotApplied(error.to_string());
        logging_in.await.map_err(ended)?
    }

    /// Logs in again before the next request, unless another request did so already.
    pub(super) async fn forget(&self, token: &Token) {
        self.token.lock().await.take_if(|known| known == token);
    }

    /// Logs in again before the next request. The token of a login in progress is new enough.
    pub(super) fn expire(&self) {
        if let Ok(mut known) = self.token.try_lock() {
            *known = None;
        }
    }
}

impl Login {
    async fn authenticate(&self, channel: &Channel) -> Result<Token, EngineError> {
        let user = &self.user;
        let request = AuthenticateRequest {
            name: user.clone(),
            password: (self.password)().map_err(EngineError::Refused)?,
        };
        let answer = call(channel.clone(), AUTHENTICATE, request, None).await;
        let response: AuthenticateResponse = match answer {
            Ok(response) => response,
            Err(EngineError::Refused(error)) if error.contains("authentication is not enabled") => {
                tracing::warn!(
                    "etcd serves every client without a login: `etcdctl auth enable` changes that, and the user {user} is used from then on"
                );
                return Ok(None);
            }
            Err(EngineError::Refused(error)) => {
                return Err(EngineError::Refused(format!(
                    "{NOT_LET} {user} log in ({error}): check --cluster-user and its password"
                )));
            }
            // The request that needs the login was not sent.
            Err(EngineError::Unknown(error)) => return Err(EngineError::NotApplied(error)),
            Err(error) => return Err(error),
        };
        let token = response.token.parse();
        let invalid = |_| EngineError::Refused("etcd sent an invalid token".into());
        Ok(Some(token.map_err(invalid)?))
    }
}

/// The refusal of a request without a login.
const NO_LOGIN: &str = "user name is empty";

/// The refusal of a request that the user may not send.
const DENIED: &str = "permission denied";

/// Whether etcd refused a request because it has forgotten the token, or began to ask for one. From
/// a client with a certificate, etcd takes a request without a token as one of the user that the
/// certificate names, and denies it.
pub(super) fn has_expired(refusal: &str, token: Option<&MetadataValue<Ascii>>) -> bool {
    let is_denied = token.is_none() && refusal.contains(DENIED);
    let expired = ["invalid auth token", "revision of auth store", NO_LOGIN];
    is_denied || expired.iter().any(|it| refusal.contains(it))
}

/// How the refusal of a login begins.
const NOT_LET: &str = "etcd does not let the user";

/// Whether etcd refused a login, or a request for want of a login or of its rights.
pub(super) fn is_refused(refusal: &str) -> bool {
    [NO_LOGIN, DENIED, NOT_LET]
        .iter()
        .any(|it| refusal.contains(it))
}

/// A refusal of a request with this token, and what to do about it.
pub(super) fn explained(error: EngineError, token: Option<&MetadataValue<Ascii>>) -> EngineError {
    let EngineError::Refused(refusal) = error else {
        return error;
    };
    EngineError::Refused(if refusal.contains(NO_LOGIN) {
        format!("etcd asks for a login ({refusal}): set --cluster-user and --cluster-password-file")
    } else if refusal.contains(DENIED) && token.is_none() {
        format!(
            "etcd denies a request ({refusal}), because it took the common name of --cluster-cert as the user: set --cluster-user and --cluster-password-file"
        )
    } else if refusal.contains(DENIED) {
        format!("etcd denies its user a request ({refusal}): grant the user the role root")
    } else {
        refusal
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERMISSION: &str = "etcdserver: permission denied";

    fn token() -> MetadataValue<Ascii> {
        "token".parse().unwrap()
    }

    #[test]
    fn denied_request_without_a_token_needs_a_login() {
        assert!(has_expired(PERMISSION, None));
        assert!(!has_expired(PERMISSION, Some(&token())));
        for token in [None, Some(&token())] {
            assert!(has_expired("etcdserver: user name is empty", token));
            assert!(has_expired("etcdserver: invalid auth token", token));
            assert!(!has_expired("etcdserver: duplicate key given", token));
        }
    }

    #[test]
    fn denied_request_names_the_setting_to_change() {
        let said = |token| explained(EngineError::Refused(PERMISSION.into()), token).to_string();
        let (without, with) = (said(None), said(Some(&token())));
        assert!(
            without.contains("common name of --cluster-cert"),
            "{without}"
        );
        assert!(without.contains("set --cluster-user"), "{without}");
        assert!(with.contains("grant the user the role root"), "{with}");
        for text in [without, with] {
            assert!(is_refused(&text), "{text}");
        }
    }
}
