//! The typed commands: each sends a request and converts the response to types. Values are never
//! interpreted.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use statehouse_link::limits::CLOSE_WAIT;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use crate::error::Error;
use crate::inbox::Inbox;
use crate::limits;
use crate::options::Options;
use crate::request::{Answer, Registered};
use crate::resp::{self, RespValue};
use crate::scan::Scan;
use crate::session::{Registration, Session};
use crate::version::Version;
use crate::watch::{GapCause, Watch, Watched};

/// A value and its version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value {
    /// The bytes of the value.
    pub bytes: Bytes,
    /// The version that the SET assigned.
    pub version: Version,
}

/// When a SET applies.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Condition {
    /// Always.
    #[default]
    Always,
    /// NX: only if the key does not exist.
    IfAbsent,
    /// NEX: only if the key does not exist or has exactly this value.
    IfAbsentOrEqual,
    /// IFVERSION, an extension of this store: only if the key has this version.
    IfVersion(Version),
}

/// The options of a SET.
#[derive(Debug, Clone, Default)]
pub struct SetOptions {
    /// The condition; default [`Condition::Always`].
    pub condition: Condition,
    /// PX: how long the key lives, in whole milliseconds from 1 ms. Default: no expiry.
    pub expiry: Option<Duration>,
    /// The fencing token, for a key that requires one.
    pub fencing_token: Option<Version>,
}

/// The result of a SET.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetResult {
    /// False if the condition did not hold, so that nothing changed.
    pub applied: bool,
    /// The new version, or the version of the stored value if nothing changed. `None` only if the
    /// condition was [`Condition::IfVersion`] and the key does not exist.
    pub version: Option<Version>,
}

/// The result of a VDEL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VdelResult {
    /// The key had this value and was deleted. The version is that of the deleted value.
    Deleted(Version),
    /// The key has another value with this version and was not deleted.
    Different(Version),
    /// The key does not exist.
    Missing,
}

/// The response to [`Client::invoke`].
#[derive(Debug, Clone, PartialEq)]
pub struct Response {
    /// The value in the payload.
    pub value: RespValue,
    /// The version property, if the response has one.
    pub version: Option<Version>,
}

/// A connection to a state store. Clones share it; dropping the last one closes it.
#[derive(Debug, Clone)]
pub struct Client {
    connection: Arc<Handle>,
    traceparent: Option<Arc<str>>,
}

#[derive(Debug)]
struct Handle {
    session: Arc<Session>,
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.session.stopping.notify_one();
    }
}

impl Client {
    /// Connects and subscribes to the responses. If the broker stops or has no leader at present
    /// (CONNACK 0x88, DISCONNECT 0x8B, or a connection that it closes without a reason), this tries
    /// again until the timeout. All other errors are final at once.
    ///
    /// # Errors
    /// [`Error::Transport`] if the broker cannot be reached, [`Error::Denied`] if it refuses the
    /// client, [`Error::Rejected`] if it does not grant the subscription, [`Error::Closed`] if
    /// another client takes over the session meanwhile, [`Error::Invalid`] if the client id, a
    /// certificate or the path of the WebSocket is invalid.
    pub async fn connect(options: Options) -> Result<Self, Error> {
        let client_id = options.resolve_client_id()?;
        let (ready, connected) = oneshot::channel();
        let link = options.link(&client_id)?;
        let address = link.place.address();
        let refresh = options.watch_refresh.max(limits::WATCH_REFRESH_MIN);
        let times = (options.timeout, refresh);
        let session = Arc::new(Session::new(client_id, address, times, ready));
        let task = tokio::spawn(statehouse_link::run(Arc::clone(&session), link));
        let client = Self {
            connection: Arc::new(Handle {
                session,
                task: Mutex::new(Some(task)),
            }),
            traceparent: None,
        };
        let session = client.session();
        match timeout(options.timeout, connected).await {
            Ok(Ok(result)) => result.map(|()| client),
            // The timeout expired, or the task ended without a result.
            _ => Err(session.not_in_time()),
        }
    }

    /// This client, with a trace context (W3C Trace Context) in the user property `traceparent` of
    /// each request. The store then reports its part of the trace. Watches do not carry it.
    ///
    /// ```no_run
    /// # use statehouse_client::{Client, Error};
    /// # async fn example(client: Client) -> Result<(), Error> {
    /// let traced = client.traced("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")?;
    /// traced.get("room/temperature").await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if this is not the text of a trace context.
    pub fn traced(&self, traceparent: &str) -> Result<Self, Error> {
        let length = limits::TRACEPARENT_BYTES_MIN..=limits::TRACEPARENT_BYTES_MAX;
        let is_text = |it: u8| it.is_ascii_hexdigit() && !it.is_ascii_uppercase() || it == b'-';
        if !length.contains(&traceparent.len()) || !traceparent.bytes().all(is_text) {
            return Err(Error::Invalid(
                "a trace context is of the form 00-TRACE-SPAN-FLAGS, with 32, 16 and 2 lower-case hexadecimal digits".into(),
            ));
        }
        Ok(Self {
            connection: Arc::clone(&self.connection),
            traceparent: Some(traceparent.into()),
        })
    }

    /// The client id, configured or generated.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.session().names.client_id
    }

    /// The timeout of a request.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.session().timeout
    }

    /// Why there is no connection; `None` if there is one. The client tries to connect again, but
    /// not after [`Error::Closed`], or after [`Error::Rejected`]: the broker no longer grants the
    /// subscription to the responses. It is [`Error::Denied`] if the broker refuses the client:
    /// each attempt fails until the broker is changed.
    #[must_use]
    pub fn disconnected(&self) -> Option<Error> {
        self.session().disconnected()
    }

    /// Sends DISCONNECT and waits until it has been sent. This closes all clones.
    pub async fn close(self) {
        let task = {
            let mut task = self.connection.task.lock();
            task.as_mut().unwrap_or_else(|e| e.get_mut()).take()
        };
        self.session().stopping.notify_one();
        if let Some(task) = task {
            // Allow a second for the DISCONNECT and another one for a busy machine.
            let _ = timeout(2 * CLOSE_WAIT, task).await;
        }
    }

    /// GET: returns the value of a key, if it exists.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn get(&self, key: impl AsRef<[u8]>) -> Result<Option<Value>, Error> {
        let answer = self.request(&[b"GET", key.as_ref()], None).await?;
        match answer.reply()? {
            RespValue::Null => Ok(None),
            RespValue::Bulk(bytes) => Ok(Some(Value {
                bytes,
                version: answer.version()?,
            })),
            _ => Err(unexpected("GET")),
        }
    }

    /// SET: sets the value of a key.
    ///
    /// # Errors
    /// See [`Error`]. A condition that does not hold is not an error.
    pub async fn set(
        &self,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
        options: SetOptions,
    ) -> Result<SetResult, Error> {
        let mut arguments: Vec<&[u8]> = vec![b"SET", key.as_ref(), value.as_ref()];
        let expected;
        match &options.condition {
            Condition::Always => {}
            Condition::IfAbsent => arguments.push(b"NX"),
            Condition::IfAbsentOrEqual => arguments.push(b"NEX"),
            Condition::IfVersion(version) => {
                expected = version.to_string();
                arguments.extend([b"IFVERSION", expected.as_bytes()]);
            }
        }
        let expiry_ms = options.expiry.map(expiry_ms).transpose()?;
        if let Some(expiry_ms) = &expiry_ms {
            arguments.extend([b"PX", expiry_ms.as_bytes()]);
        }
        let answer = self
            .request(&arguments, options.fencing_token.as_ref())
            .await?;
        let applied = match answer.reply()? {
            RespValue::Simple(text) if text == "OK" => true,
            RespValue::Integer(-1) => false,
            _ => return Err(unexpected("SET")),
        };
        let may_be_absent = !applied && matches!(options.condition, Condition::IfVersion(_));
        Ok(SetResult {
            applied,
            version: match &answer.version {
                None if may_be_absent => None,
                _ => Some(answer.version()?),
            },
        })
    }

    /// DEL: deletes a key and returns the version of the deleted value, if it existed.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn del(
        &self,
        key: impl AsRef<[u8]>,
        fencing_token: Option<&Version>,
    ) -> Result<Option<Version>, Error> {
        let answer = self.request(&[b"DEL", key.as_ref()], fencing_token).await?;
        match answer.reply()? {
            RespValue::Integer(1) => answer.version().map(Some),
            RespValue::Integer(0) => Ok(None),
            _ => Err(unexpected("DEL")),
        }
    }

    /// VDEL: deletes a key if it has this value.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn vdel(
        &self,
        key: impl AsRef<[u8]>,
        value: impl AsRef<[u8]>,
        fencing_token: Option<&Version>,
    ) -> Result<VdelResult, Error> {
        let arguments: [&[u8]; 3] = [b"VDEL", key.as_ref(), value.as_ref()];
        let answer = self.request(&arguments, fencing_token).await?;
        match answer.reply()? {
            RespValue::Integer(1) => answer.version().map(VdelResult::Deleted),
            RespValue::Integer(-1) => answer.version().map(VdelResult::Different),
            RespValue::Integer(0) => Ok(VdelResult::Missing),
            _ => Err(unexpected("VDEL")),
        }
    }

    /// Sends any command, such as one that a policy of the store adds.
    ///
    /// ```no_run
    /// # async fn example(client: statehouse_client::Client) -> Result<(), statehouse_client::Error> {
    /// let counted = client.invoke(["INCR", "visits"], None).await?;
    /// println!("{:?}", counted.value);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Refused`] for an error response, [`Error::Protocol`] for a payload that is not one
    /// value of RESP3; otherwise see [`Error`].
    pub async fn invoke(
        &self,
        arguments: impl IntoIterator<Item = impl AsRef<[u8]>>,
        fencing_token: Option<&Version>,
    ) -> Result<Response, Error> {
        let arguments: Vec<_> = arguments.into_iter().collect();
        let arguments: Vec<&[u8]> = arguments.iter().map(AsRef::as_ref).collect();
        if arguments.is_empty() {
            return Err(Error::Invalid("a command has at least one word".into()));
        }
        let answer = self.request(&arguments, fencing_token).await?;
        match resp::parse(&answer.payload) {
            Ok(RespValue::Error(text)) => Err(Error::Refused(
                text.strip_prefix("ERR ").unwrap_or(&text).to_owned(),
            )),
            Ok(value) => Ok(Response {
                value,
                version: answer.version,
            }),
            Err(malformed) => Err(Error::Protocol(malformed.0.into())),
        }
    }

    /// SCAN: returns the keys that match a glob of `*`, `?`, `[a-z]`, `[!a-z]` and `\` escapes,
    /// page by page. No request is sent before the first call of [`Scan::next_page`].
    #[must_use]
    pub fn scan(&self, pattern: impl AsRef<[u8]>) -> Scan {
        Scan::new(self.clone(), Bytes::copy_from_slice(pattern.as_ref()))
    }

    /// KEYNOTIFY: watches a key. The watch is registered when this returns.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn watch(&self, key: impl AsRef<[u8]>) -> Result<Watch, Error> {
        let key = Bytes::copy_from_slice(key.as_ref());
        self.watch_many([Watched::Key(key)], None).await
    }

    /// KEYNOTIFY with PREFIX: watches all keys that start with `prefix`; all keys of the store if
    /// it is empty. Only changes of keys that this client may read are reported. The watch is
    /// registered when this returns. This is an extension of Statehouse.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn watch_prefix(&self, prefix: impl AsRef<[u8]>) -> Result<Watch, Error> {
        let prefix = Bytes::copy_from_slice(prefix.as_ref());
        self.watch_many([Watched::Prefix(prefix)], None).await
    }

    /// KEYNOTIFY with FROM: watches a key, and reports the changes after `version` first. No change
    /// is missing between these and the later ones. This is an extension of Statehouse.
    ///
    /// It returns before all of these changes have arrived: the store sends more of them when the
    /// reader has taken those that are buffered. If the store forgets some before that, or if the
    /// connection is lost meanwhile, the watch can report a gap. An earlier watch of this client
    /// that began without a version may report older changes then, if it has reported none or is of
    /// several keys.
    ///
    /// # Errors
    /// [`Error::Refused`] if the store does not know all changes after this version; see also
    /// [`Error`].
    pub async fn watch_from(
        &self,
        key: impl AsRef<[u8]>,
        version: &Version,
    ) -> Result<Watch, Error> {
        let key = Bytes::copy_from_slice(key.as_ref());
        self.watch_many([Watched::Key(key)], Some(version)).await
    }

    /// As [`watch_from`](Self::watch_from), of all keys that start with `prefix`.
    ///
    /// # Errors
    /// As [`watch_from`](Self::watch_from).
    pub async fn watch_prefix_from(
        &self,
        prefix: impl AsRef<[u8]>,
        version: &Version,
    ) -> Result<Watch, Error> {
        let prefix = Bytes::copy_from_slice(prefix.as_ref());
        self.watch_many([Watched::Prefix(prefix)], Some(version))
            .await
    }

    /// Watches several keys and prefixes as one [`Watch`]. It reports each change once, however
    /// many of them cover the key. At a Statehouse store, it reports all changes in the order of
    /// their versions, so the version of the last reported change is the one to continue `from`.
    /// Without `from`, this is as [`watch`](Self::watch), else as [`watch_from`](Self::watch_from),
    /// where an earlier watch may report older changes. One of several keys that began without
    /// `from` may also report a change again, or late, if another watch of this client covers the
    /// key.
    ///
    /// Each key and prefix is registered by a request of its own, one after the other, also after
    /// each reconnect. Use a prefix for many keys.
    ///
    /// ```no_run
    /// # use statehouse_client::{Client, Error, Watched};
    /// # async fn example(client: Client) -> Result<(), Error> {
    /// let watched = [Watched::Key("mode".into()), Watched::Prefix("room/".into())];
    /// let mut changes = client.watch_many(watched, None).await?;
    /// println!("{:?}", changes.next().await?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is no key and no prefix, or if a key is too long; see also
    /// [`watch_from`](Self::watch_from).
    pub async fn watch_many(
        &self,
        watched: impl IntoIterator<Item = Watched>,
        from: Option<&Version>,
    ) -> Result<Watch, Error> {
        let watched = Watched::without_covered(watched);
        if watched.is_empty() {
            return Err(Error::Invalid("there is no key to watch".into()));
        }
        let key_bytes_max = self.session().names.watched_key_bytes_max();
        let is_too_long =
            |it: &&Watched| matches!(it, Watched::Key(key) if key.len() > key_bytes_max);
        if let Some(key) = watched.iter().find(is_too_long) {
            return Err(Error::Invalid(format!(
                "the key is too long: it has {} bytes, and a watched key has at most {key_bytes_max}",
                key.bytes().len()
            )));
        }
        if let Some(why) = &self.session().state().notifications_refused {
            return Err(Error::Rejected(why.clone()));
        }
        let requests = watched.len();
        let inbox = Inbox::new(watched);
        if let Some(version) = from {
            inbox.resume_from(version.clone());
        }
        // The inbox is added before a request is sent, so that no notification is missed.
        let (watch, epoch) = Watch::new(self.clone(), inbox);
        // The cause of a gap if the store forgets changes before the reader has room for them.
        let cause = from.map(|_| GapCause::Overflow);
        let mut registration =
            Registration::new(self.session(), watch.inbox(), epoch, from.cloned(), cause);
        for _ in 0..requests {
            if registration.ask().await? {
                return Ok(watch);
            }
        }
        tokio::spawn(registration.run());
        Ok(watch)
    }

    pub(crate) fn session(&self) -> &Arc<Session> {
        &self.connection.session
    }

    pub(crate) async fn request(
        &self,
        arguments: &[&[u8]],
        fencing_token: Option<&Version>,
    ) -> Result<Answer, Error> {
        self.session()
            .request(
                resp::command(arguments),
                fencing_token,
                self.traceparent.as_deref(),
            )
            .await
    }
}

impl Answer {
    /// The reply, or an error if the store refused the request.
    pub(crate) fn reply(&self) -> Result<RespValue, Error> {
        match resp::parse(&self.payload) {
            Ok(RespValue::Error(text)) => Err(match text.strip_prefix("ERR ") {
                Some(text) => Error::Refused(text.to_owned()),
                None => Error::Protocol("an error without ERR".into()),
            }),
            Ok(reply) => Ok(reply),
            Err(malformed) => Err(Error::Protocol(malformed.0.into())),
        }
    }

    pub(crate) fn registered(&self) -> Result<Registered, Error> {
        match self.reply()? {
            RespValue::Simple(text) if text == "OK" => Ok(Registered::Begun(self.version.clone())),
            RespValue::Simple(text) if text == "MORE" => self.version().map(Registered::More),
            _ => Err(unexpected("KEYNOTIFY")),
        }
    }

    pub(crate) fn version(&self) -> Result<Version, Error> {
        self.version
            .clone()
            .ok_or_else(|| Error::Protocol("it has no __ts".into()))
    }
}

pub(crate) fn unexpected(command: &str) -> Error {
    Error::Protocol(format!("unexpected response to {command}"))
}

/// The argument of PX: whole milliseconds from 1 to 2^63-1 (the protocol, section 3).
fn expiry_ms(expiry: Duration) -> Result<String, Error> {
    match i64::try_from(expiry.as_millis()) {
        Ok(ms @ 1..) => Ok(ms.to_string()),
        _ => Err(Error::Invalid(
            "the expiry must be from 1 ms to 2^63-1 ms".into(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expiries() {
        assert_eq!(expiry_ms(Duration::from_secs(10)), Ok("10000".into()));
        assert_eq!(expiry_ms(Duration::from_micros(1999)), Ok("1".into()));
        for bad in [Duration::ZERO, Duration::from_micros(999), Duration::MAX] {
            assert!(matches!(expiry_ms(bad), Err(Error::Invalid(_))));
        }
    }

    #[test]
    fn reply_of_another_form_is_an_error_of_the_protocol() {
        let answer = |payload: &'static [u8]| Answer {
            payload: payload.into(),
            version: None,
        };
        for payload in [&b"-1\r\n"[..], b"-ERR\r\n", b"-ERR: text\r\n", b"+OK"] {
            let reply = answer(payload).reply();
            assert!(matches!(reply, Err(Error::Protocol(_))), "{reply:?}");
        }
        for payload in [&b"+ok\r\n"[..], b":1\r\n", b"$2\r\nOK\r\n"] {
            let registered = answer(payload).registered();
            assert!(
                matches!(registered, Err(Error::Protocol(_))),
                "{registered:?}"
            );
        }
    }
}
