//! Authenticates clients by user name and password.
//!
//! Passwords are checked on blocking threads, few at a time, since each check takes some megabytes.
//! After too many wrong passwords, no further ones are checked for a while. A client whose password
//! was right before must never wait for other checks.

use std::net::IpAddr;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use bytes::Bytes;
use statehouse_mqtt::{Identity, Proof, ReasonCode, network};
use tokio::sync::Semaphore;

use super::known_logins::KnownLogins;
use super::throttle::Throttle;
use super::users::Users;
use crate::limits;
use statehouse_files::blocking::{self, BlockingError};
use statehouse_files::watch::Watched;

/// Why a client is refused, with the text for the client.
pub(super) type Refusal = (ReasonCode, &'static str);

pub(super) struct Logins {
    users: Arc<Watched<Users>>,
    checks: Arc<Semaphore>,
    by_address: Throttle,
    by_user: Throttle,
    /// Limits guesses at a remembered password, by user.
    by_remembered: Throttle,
    /// Users, and the networks of their logins.
    known: KnownLogins,
}

impl Logins {
    pub(super) fn new(users: Arc<Watched<Users>>) -> Self {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        Self {
            users,
            checks: Arc::new(Semaphore::new(
                processors.min(limits::PASSWORD_CHECKS_AT_ONCE_MAX),
            )),
            by_address: Throttle::new(limits::LOGIN_BURST, limits::LOGIN_INTERVAL),
            by_user: Throttle::new(limits::LOGIN_BURST_USER, limits::LOGIN_INTERVAL),
            by_remembered: Throttle::new(limits::LOGIN_BURST_REMEMBERED, limits::LOGIN_INTERVAL),
            known: KnownLogins::new(),
        }
    }

    pub(super) fn users(&self) -> &Arc<Watched<Users>> {
        &self.users
    }

    /// The identity of a user with this password. A missing user name or password is passed as an
    /// empty one, which no user has.
    pub(super) async fn check(
        &self,
        name: &str,
        password: Bytes,
        address: IpAddr,
    ) -> Result<Identity, Refusal> {
        const WRONG: Refusal = (
            ReasonCode::BAD_USER_NAME_OR_PASSWORD,
            "there is no such user, or the password is another one",
        );
        let identity = |users: &Users| {
            let password = Password {
                number: users.credential(name).ok_or(WRONG)?,
                user: name.into(),
                users: self.users.clone(),
            };
            Ok(Identity {
                user: Some(name.into()),
                attributes: Vec::new(),
                proofs: vec![Arc::new(password)],
            })
        };
        let users = self.users.current();
        let (address, now) = (network(address), Instant::now());
        if self.is_remembered(&users, name, &password, address, now) {
            return identity(&users);
        }
        if !self.by_address.allows(address, now) {
            let text = "too many wrong passwords came from this address: try again later";
            return Err((ReasonCode::CONNECTION_RATE_EXCEEDED, text));
        }
        if !self.by_user.allows(name, now) {
            self.by_address.refund(address);
            let text = "too many wrong passwords came for this user: try again later";
            return Err((ReasonCode::CONNECTION_RATE_EXCEEDED, text));
        }
        // No user has a longer name or password, so this refusal need not wait for a thread.
        if name.len() > limits::USER_NAME_BYTES_MAX || password.len() > limits::PASSWORD_BYTES_MAX {
            return Err(WRONG);
        }
        let Ok(permit) = self.checks.clone().acquire_owned().await else {
            return Err((ReasonCode::SERVER_UNAVAILABLE, "passwords are not checked"));
        };
        // During the wait, the users may have changed, and another check may have remembered the
        // password.
        let users = self.users.current();
        let is_right = if users.remembers(name, &password) {
            true
        } else {
            let (users, user) = (users.clone(), name.to_owned());
            let checked = blocking::run("password", move || {
                let is_right = users.verify(&user, &password);
                // The permit is held until here even if the client has disconnected.
                drop(permit);
                is_right
            });
            match checked.await {
                Ok(is_right) => is_right,
                Err(error @ BlockingError::Thread(_)) => {
                    tracing::warn!(%error, "a password was not checked");
                    self.by_address.refund(address);
                    self.by_user.refund(name);
                    return Err((ReasonCode::SERVER_BUSY, "no password can be checked now"));
                }
                Err(error @ BlockingError::Panicked) => {
                    tracing::error!(%error, "a password was not checked");
                    false
                }
            }
        };
        if !is_right {
            return Err(WRONG);
        }
        self.by_address.refund(address);
        self.by_user.refund(name);
        self.known.insert((name, address));
        identity(&users)
    }

    /// Whether the password was right before. Never waits. A right password passes even if the
    /// address or the user is throttled.
    ///
    /// Guesses are limited, or a guesser could try as many as it opens connections. From an address
    /// where the user has logged in they are not limited, or a guesser at that address could lock
    /// the user out.
    fn is_remembered(
        &self,
        users: &Users,
        name: &str,
        password: &[u8],
        address: IpAddr,
        now: Instant,
    ) -> bool {
        if !users.knows(name) || password.len() > limits::PASSWORD_BYTES_MAX {
            return false;
        }
        let login = (name, address);
        let is_known = self.known.contains(login);
        if !is_known && !self.by_remembered.allows(name, now) {
            return false;
        }
        let is_right = users.remembers(name, password);
        if is_right && !is_known {
            self.by_remembered.refund(name);
            self.known.insert(login);
        }
        is_right
    }
}

/// A password that was right when the client connected.
struct Password {
    users: Arc<Watched<Users>>,
    user: Box<str>,
    number: u64,
}

impl Proof for Password {
    fn is_good(&self) -> bool {
        self.users.current().credential(&self.user) == Some(self.number)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::super::users;
    use super::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    /// Logins with one user, anna.
    fn logins() -> Logins {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("users");
        let hash = users::hash(b"right").unwrap();
        fs::write(&path, format!("anna:{hash}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        let users = Watched::open("users", vec![], move || Users::open(&path)).unwrap();
        Logins::new(users)
    }

    async fn code(logins: &Logins, name: &str, password: &'static str, from: IpAddr) -> u8 {
        let checked = logins
            .check(name, Bytes::from_static(password.as_bytes()), from)
            .await;
        checked.map_or_else(|(reason, _)| reason.0, |_| 0)
    }

    #[tokio::test]
    async fn remembered_password_passes_while_all_checks_are_busy() {
        let logins = logins();
        assert_eq!(code(&logins, "anna", "wrong", HERE).await, 0x86);
        assert_eq!(code(&logins, "nobody", "right", HERE).await, 0x86);
        assert_eq!(code(&logins, "", "", HERE).await, 0x86);
        assert_eq!(code(&logins, "anna", "right", HERE).await, 0);
        let while_all_are_busy = async {
            let all = logins.checks.clone();
            let all = all.acquire_many_owned(logins.checks.available_permits() as u32);
            let _all = all.await.unwrap();
            code(&logins, "anna", "right", HERE).await
        };
        assert_eq!(while_all_are_busy.await, 0);
        assert_eq!(code(&logins, "anna", "wrong", HERE).await, 0x86);
    }

    #[tokio::test]
    async fn guesses_from_one_address_do_not_block_another() {
        let logins = logins();
        for _ in 0..limits::LOGIN_BURST {
            // A password that is too long counts as a guess too.
            let long = Bytes::from(vec![b'x'; limits::PASSWORD_BYTES_MAX + 1]);
            assert!(logins.check("anna", long, HERE).await.is_err());
        }
        assert_eq!(code(&logins, "anna", "right", HERE).await, 0x9F);
        let elsewhere = "192.0.2.1".parse().unwrap();
        assert_eq!(code(&logins, "anna", "right", elsewhere).await, 0);
        // The password is remembered now, so the guesses do not lock out its owner even here.
        assert_eq!(code(&logins, "anna", "right", HERE).await, 0);
    }

    #[tokio::test]
    async fn known_user_passes_every_throttle_and_guesses_do_not() {
        let logins = logins();
        let elsewhere = |last| IpAddr::from([192, 0, 2, last]);
        assert_eq!(code(&logins, "anna", "right", HERE).await, 0);
        // Exceeds the limit of the user and, for `HERE`, of the address.
        for guess in 0..2 * limits::LOGIN_BURST_USER {
            let from = if guess < 100 {
                HERE
            } else {
                elsewhere(guess as u8)
            };
            let long = Bytes::from(vec![b'x'; limits::PASSWORD_BYTES_MAX + 1]);
            _ = logins.check("anna", long, from).await;
        }
        assert_eq!(code(&logins, "anna", "wrong", HERE).await, 0x9F);
        assert_eq!(code(&logins, "anna", "wrong", elsewhere(1)).await, 0x9F);
        assert_eq!(code(&logins, "anna", "right", HERE).await, 0);
        assert_eq!(code(&logins, "anna", "right", elsewhere(1)).await, 0);

        // After so many guesses even the right password is refused, so that a guesser does not
        // learn it. At its known addresses the user still passes.
        for _ in 0..2 * limits::LOGIN_BURST_REMEMBERED {
            assert_ne!(code(&logins, "anna", "wrong", elsewhere(2)).await, 0);
        }
        assert_eq!(code(&logins, "anna", "right", elsewhere(2)).await, 0x9F);
        for known in [HERE, elsewhere(1)] {
            assert_eq!(code(&logins, "anna", "right", known).await, 0);
        }
    }
}
