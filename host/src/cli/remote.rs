//! Options that all client commands share, and the connection to the store.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use statehouse_client::{Client, Error, Login, Options, Tls, Version, parse_duration};

use super::context::{self, Context};
use super::environment::has_flag;
use super::output::{Failure, one_line, printable};
use super::signals::interruption;
use super::store::{Found, Place};
use statehouse_config::{BrokerUrl, read_password};
use statehouse_protocol::topics::client_id_of;

/// The port of MQTT (IANA).
const MQTT_PORT: u16 = 1883;

/// Environment variable with the password, as an alternative to a file.
const PASSWORD: &str = "STATEHOUSE_PASSWORD";

/// Environment variable with the trace context of the calling process, as in other tools.
const TRACEPARENT: &str = "TRACEPARENT";

/// Advice if the store is unreachable.
pub(super) const START_ONE: &str =
    "Start one with `statehouse serve`, or name another with --host and --port";

/// Advice if a broker answered until the timeout that it stops or has no leader, or closed the
/// connection each time.
const TRY_AGAIN: &str = "The store stops or has no leader at present: try again, or name another with --host and --port";

/// What the reason says then.
const UNAVAILABLE: [&str; 4] = [
    "(server unavailable",
    "(server shutting down",
    "closed it without a reason",
    "connection reset",
];

/// What the reason says if no rule lets the client connect.
const NOT_AUTHORIZED: &str = "not authorized to connect";

/// Advice if no authority that is trusted here has issued the certificate of the store.
pub(super) const TRUST_ONE: &str = "--ca FILE names the CA certificates to trust";

/// Advice if the broker answers CONNACK 0x97.
const NO_ROOM: &str =
    "It has no room for another session: try again later, or raise `max_sessions` of the store";

/// The certificates of the connection.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Connection")]
pub(super) struct Certificates {
    /// CA certificates (PEM) that the server's certificate is verified against, for mqtts://,
    /// wss:// or https:// [default: the system's]
    #[arg(long, value_name = "FILE", env = "STATEHOUSE_CA")]
    ca: Option<PathBuf>,

    /// A client certificate (PEM), if the store asks for one
    #[arg(
        long,
        value_name = "FILE",
        env = "STATEHOUSE_CERT",
        requires = "own_key"
    )]
    cert: Option<PathBuf>,

    /// The private key of this certificate (PEM)
    #[arg(
        id = "own_key",
        long = "cert-key",
        value_name = "FILE",
        env = "STATEHOUSE_CERT_KEY",
        requires = "cert"
    )]
    key: Option<PathBuf>,
}

/// The credentials of the user and the certificates of the connection.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Connection")]
pub(super) struct Credentials {
    #[command(flatten)]
    certificates: Certificates,

    /// User name
    #[arg(long, value_name = "NAME", env = "STATEHOUSE_USER")]
    user: Option<String>,

    /// A file with the password [default: STATEHOUSE_PASSWORD]
    #[arg(long, value_name = "FILE", env = "STATEHOUSE_PASSWORD_FILE")]
    password_file: Option<PathBuf>,
}

impl Certificates {
    /// The files by their flags or variables, for the error about them.
    fn names(&self) -> String {
        let files = [
            (&self.ca, "--ca", "STATEHOUSE_CA"),
            (&self.cert, "--cert", "STATEHOUSE_CERT"),
            (&self.key, "--cert-key", "STATEHOUSE_CERT_KEY"),
        ];
        let names = files.into_iter().filter_map(|(path, flag, variable)| {
            let value = path.as_ref()?.as_os_str();
            let is_of_variable = std::env::var_os(variable).is_some_and(|it| it == value);
            Some(if is_of_variable { variable } else { flag })
        });
        names.collect::<Vec<_>>().join(" and ")
    }
}

impl From<Certificates> for Credentials {
    fn from(certificates: Certificates) -> Self {
        Self {
            certificates,
            ..Self::default()
        }
    }
}

impl Credentials {
    /// Adds what the context has and the flags and variables do not name.
    pub(super) fn fill(&mut self, context: Context) {
        let fill = |own: &mut Option<PathBuf>, of_context| *own = own.take().or(of_context);
        let own = &mut self.certificates;
        fill(&mut own.ca, context.ca);
        if own.cert.is_none() {
            fill(&mut own.cert, context.cert);
            fill(&mut own.key, context.cert_key);
        }
        if self.user.is_none() {
            self.user = context.user;
            if password_variable().is_none() {
                fill(&mut self.password_file, context.password_file);
            }
        }
    }

    /// The user and the password of an operator, if there is a user.
    pub(super) fn operator(&self) -> Result<Option<Login>, Failure> {
        match self.user {
            Some(_) => self.login(None),
            None => Ok(None),
        }
    }

    /// The configuration of a TLS connection that is not MQTT.
    pub(super) fn client_config(&self) -> Result<Arc<ClientConfig>, Failure> {
        let Certificates { ca, cert, key } = &self.certificates;
        let own = cert.as_deref().zip(key.as_deref());
        let config = statehouse_link::tls::config(ca.as_deref(), own);
        config.map_err(|error| Failure::usage(error.to_string()))
    }

    /// The certificate files; refused if this URL is unencrypted.
    pub(super) fn tls(&self, url: &BrokerUrl) -> Result<Option<Tls>, Failure> {
        let Certificates { ca, cert, key } = &self.certificates;
        let tls = Tls {
            ca: ca.clone(),
            certificate: cert.clone().zip(key.clone()),
        };
        match url.scheme.tls {
            true => Ok(Some(tls)),
            false if tls == Tls::default() => Ok(None),
            false => Err(Failure::usage(format!(
                "{}: certificates require an encrypted connection, but {url} is unencrypted: name the store with --url mqtts://HOST:PORT, or wss://",
                self.certificates.names()
            ))),
        }
    }

    /// User and password, of these options or of a URL. Flags take precedence over the URL.
    /// Variables do so only if the URL is not that of a flag, which may name another store.
    pub(super) fn login(&self, url: Option<&BrokerUrl>) -> Result<Option<Login>, Failure> {
        let user = url.and_then(|it| it.user.as_deref());
        let password = url.and_then(|it| Some(it.password.as_ref()?.0.as_str()));
        let (mut own_user, mut file) = (self.user.clone(), self.password_file.as_deref());
        let mut variable = password_variable();
        if let Some(user) = user
            && URL_FLAGS.into_iter().any(has_flag)
            && !has_flag("--user")
        {
            let is_other = own_user.take().is_some_and(|it| it != user);
            // The password of the environment is that of its user.
            if is_other || password.is_some() {
                variable = None;
                file = file.filter(|_| has_flag("--password-file"));
            }
        }
        let own_password = match file {
            Some(path) => {
                let read = read_password(path);
                Some(read.map_err(|error| Failure::usage(error.to_string()))?.0)
            }
            None => variable,
        };
        let password = own_password.or_else(|| password.map(str::to_owned));
        let user = own_user.or_else(|| user.map(str::to_owned));
        Ok(match (user, password) {
            // MQTT 5 allows a password without a user (section 3.1.2.9); rumqttc does not.
            (None, Some(_)) => {
                let why = "there is a password but no user: give --user NAME";
                return Err(Failure::usage(why));
            }
            (None, None) => None,
            (Some(user), password) => Some(Login {
                user,
                password: password.unwrap_or_default(),
            }),
        })
    }
}

/// The flags with the URL of a store or its broker.
const URL_FLAGS: [&str; 2] = ["--url", "--broker"];

/// The password of the environment; an empty one counts as unset.
fn password_variable() -> Option<String> {
    std::env::var(PASSWORD).ok().filter(|it| !it.is_empty())
}

/// The option --fencing-token of all commands that write.
#[derive(Debug, clap::Args)]
pub(super) struct Fencing {
    /// The fencing token: the version of the lock that protects the key
    #[arg(id = "fencing_token", long = "fencing-token", value_name = "VERSION")]
    pub(super) token: Option<Version>,
}

/// The address of the store, and the credentials.
#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Connection")]
pub(super) struct Target {
    /// The URL of the store: mqtt://HOST:PORT, mqtts:// (TLS), ws:// or wss:// (WebSocket); takes
    /// precedence over --host and --port. A user and a password in the URL of this flag take
    /// precedence over those of environment variables
    #[arg(long, value_name = "URL", env = "STATEHOUSE_URL")]
    url: Option<BrokerUrl>,

    /// Name or address of the store's host [default: 127.0.0.1]
    #[arg(long, env = "STATEHOUSE_HOST")]
    host: Option<String>,

    /// TCP port of the store, or of the broker in front of it [default: 1883]
    #[arg(long, env = "STATEHOUSE_PORT", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,

    /// The context that names the store (see `statehouse context`) [default: the selected one]
    #[arg(long, value_name = "NAME", env = "STATEHOUSE_CONTEXT",
          conflicts_with_all = ["url", "host", "port"])]
    context: Option<String>,

    #[command(flatten)]
    pub(super) credentials: Credentials,

    /// Whether other options of the command name a store.
    #[arg(skip)]
    is_named: bool,

    /// Whether the other options name an admin API over TLS.
    #[arg(skip)]
    has_tls_admin: bool,
}

impl Target {
    fn is_given(&self) -> bool {
        self.url.is_some() || self.host.is_some() || self.port.is_some()
    }

    /// The same with what the context adds. A context must add nothing if flags name another store,
    /// which would otherwise receive its password.
    pub(super) fn with_context(&self) -> Result<Self, Failure> {
        let mut target = self.clone();
        if self.is_given() || self.is_named && self.context.is_none() {
            return Ok(target);
        }
        let Some((name, mut context)) = context::find(self.context.as_deref())? else {
            return Ok(target);
        };
        let Some(url) = context.url.take() else {
            return Err(context::lacks(&name, "no --url"));
        };
        let url: BrokerUrl = url.parse().map_err(Failure::usage)?;
        if !url.scheme.tls && context.admin.is_some() {
            // Its certificates are for the admin API.
            (context.ca, context.cert, context.cert_key) = (None, None, None);
        }
        target.url = Some(url);
        target.credentials.fill(context);
        Ok(target)
    }

    /// The certificate files for this URL of the store. The files may be for the admin API alone.
    fn tls(&self, url: &BrokerUrl) -> Result<Option<Tls>, Failure> {
        match self.has_tls_admin && !url.scheme.tls {
            true => Ok(None),
            false => self.credentials.tls(url),
        }
    }

    /// The URL of the store, from either form.
    pub(super) fn url(&self) -> BrokerUrl {
        match &self.url {
            Some(url) => url.clone(),
            None => BrokerUrl::plain(
                self.host.as_deref().unwrap_or("127.0.0.1"),
                self.port.unwrap_or(MQTT_PORT),
            ),
        }
    }
}

/// The default of --timeout.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Shortest time for which the broker keeps a session that it is to keep: one second of MQTT.
const SESSION_MIN: Duration = Duration::from_secs(1);

/// Options of every command that connects to a store.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Connection")]
pub(super) struct Remote {
    #[command(flatten)]
    target: Target,

    /// MQTT client id [default: user@host- and random digits; with --user, NAME:user@host-]
    #[arg(long, value_name = "ID")]
    client_id: Option<String>,

    /// How long to wait for the connection, and for each response [default: 5s; for a question
    /// about the past, 5m]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    timeout: Option<Duration>,

    /// The span that the requests belong to, as the W3C trace context
    /// 00-TRACE-SPAN-FLAGS [default: TRACEPARENT]
    #[arg(long, value_name = "CONTEXT")]
    traceparent: Option<String>,

    /// Print results as JSON objects, one per line; bytes that are not UTF-8 as {"base64": ...}
    #[arg(long)]
    pub(super) json: bool,
}

impl Remote {
    /// Connects for reads, which need no session: after an interruption the client sends them again
    /// on a new one. The broker records no session, and ends it with the connection.
    pub(super) async fn read<T, E: Into<Failure>>(
        &self,
        requests: impl AsyncFnOnce(&Client) -> Result<T, E>,
    ) -> Result<T, Failure> {
        let client = self.connect(Duration::ZERO).await?;
        until_signal(client, requests).await
    }

    /// Connects for one request: the broker keeps the session only as long as the request may take.
    pub(super) async fn ask<T, E: Into<Failure>>(
        &self,
        request: impl AsyncFnOnce(&Client) -> Result<T, E>,
    ) -> Result<T, Failure> {
        self.ask_for(self.timeout(), request).await
    }

    /// Connects, sends requests and closes the session, also if a request fails or a signal
    /// interrupts the requests. The broker keeps the session during an interruption of this length.
    pub(super) async fn ask_for<T, E: Into<Failure>>(
        &self,
        interruption: Duration,
        requests: impl AsyncFnOnce(&Client) -> Result<T, E>,
    ) -> Result<T, Failure> {
        let client = self.connect(interruption.max(SESSION_MIN)).await?;
        until_signal(client, requests).await
    }

    /// As [`ask_for`](Self::ask_for), for work that handles signals itself.
    pub(super) async fn ask_despite_signals<T, E: Into<Failure>>(
        &self,
        interruption: Duration,
        work: impl AsyncFnOnce(&Client) -> Result<T, E>,
    ) -> Result<T, Failure> {
        let client = self.connect(interruption.max(SESSION_MIN)).await?;
        let result = work(&client).await;
        client.close().await;
        result.map_err(Into::into)
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout.unwrap_or(TIMEOUT)
    }

    async fn connect(&self, session_expiry: Duration) -> Result<Client, Failure> {
        let target = self.target.with_context()?;
        let url = target.url();
        let login = target.credentials.login(Some(&url))?;
        let user = login.as_ref().map(|it| it.user.clone());
        let client_id = self.client_id.clone();
        let client_id = client_id.unwrap_or_else(|| default_client_id(user.as_deref()));
        let options = Options {
            tls: target.tls(&url)?,
            login,
            websocket: url.scheme.websocket.then(|| url.path.clone()),
            host: url.host,
            port: url.port,
            client_id: Some(client_id.clone()),
            timeout: self.timeout(),
            session_expiry,
            ..Options::default()
        };
        let client = Client::connect(options)
            .await
            .map_err(|error| match error {
                Error::Transport(why) | Error::Closed(why) => advised(&one_line(&why)),
                Error::Denied(why) if user.is_some() && why.contains(NOT_AUTHORIZED) => {
                    Failure::refused(one_line(&why)).with(&without_rule(&client_id))
                }
                other => other.into(),
            })?;
        self.traced(client)
    }

    /// Notes whether the other options of the command name a store.
    pub(super) fn heed(&mut self, place: &Place) {
        self.target.is_named = place.is_given();
        self.target.has_tls_admin = place.has_tls_admin();
    }

    /// Whether a context names the store.
    pub(super) fn has_context(&self) -> bool {
        self.target.context.is_some()
    }

    /// How to reach the data of the store: by these options, with the context and the credentials
    /// of the connection.
    pub(super) fn find(&self, place: &Place) -> Result<Found, Failure> {
        let Target {
            context,
            credentials,
            ..
        } = &self.target;
        let mut found =
            place.find_beside(self.target.is_given(), context.as_deref(), credentials)?;
        if let Found::Admin(asked) = &mut found {
            asked.timeout = self.timeout;
        }
        Ok(found)
    }

    /// The client with the trace context of the caller, if there is one.
    fn traced(&self, client: Client) -> Result<Client, Failure> {
        if let Some(context) = &self.traceparent {
            return Ok(client.traced(context)?);
        }
        // A malformed variable is that of another tool, and is ignored as the standard demands.
        let inherited = std::env::var(TRACEPARENT).ok();
        let traced = inherited.and_then(|it| client.traced(&it).ok());
        Ok(traced.unwrap_or(client))
    }
}

/// Sends requests until a signal interrupts them, and closes the session.
async fn until_signal<T, E: Into<Failure>>(
    client: Client,
    requests: impl AsyncFnOnce(&Client) -> Result<T, E>,
) -> Result<T, Failure> {
    let interrupted = interruption();
    let result: Result<T, Failure> = tokio::select! {
        biased;
        // Must be first: `watch` ends with success at SIGINT.
        result = requests(&client) => result.map_err(Into::into),
        failure = interrupted => Err(failure),
    };
    client.close().await;
    result
}

/// The failure of a connection, with advice that fits its reason.
fn advised(why: &str) -> Failure {
    let says = |text: &&str| why.contains(*text);
    let failure = Failure::transport(why);
    if says(&"(quota exceeded)") {
        failure.with(NO_ROOM)
    } else if says(&"no authority that is trusted here") {
        failure.with(TRUST_ONE)
    } else if UNAVAILABLE.iter().any(says) {
        failure.with(TRY_AGAIN)
    } else if [
        "certificate",
        "TLS",
        "not MQTT 5",
        "WebSocket",
        "the broker ",
    ]
    .iter()
    .any(says)
    {
        // A server answers, and the reason says what to do about it.
        failure
    } else {
        failure.with(START_ONE)
    }
}

/// Advice if the broker does not authorize a client with a login. The store reports a wrong password
/// otherwise, but Mosquitto does not.
fn without_rule(client_id: &str) -> String {
    format!(
        "No rule lets the client id {} connect: give another one with --client-id. Some brokers report a wrong password like this",
        printable(client_id.as_bytes())
    )
}

/// Names the user and the machine, so that logs and `statehouse history` show who it was. The
/// digits keep several commands of one user apart. Rules can bind the id to the login before it.
fn default_client_id(login: Option<&str>) -> String {
    let plain = |text: String| -> String {
        let is_plain = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        text.trim()
            .chars()
            .filter(is_plain)
            .take(NAME_CHARS_MAX)
            .collect()
    };
    let user = ["USER", "LOGNAME"]
        .iter()
        .find_map(|it| std::env::var(it).ok());
    let user = plain(user.unwrap_or_default());
    let host = plain(std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default());
    let (user, host) = (or(&user, "statehouse"), or(&host, "localhost"));
    let digits = statehouse_link::random() & 0xff_ffff;
    client_id_of(login, &format!("{user}@{host}-{digits:06x}"))
}

/// Longest user or host name in a client id.
const NAME_CHARS_MAX: usize = 32;

fn or<'a>(text: &'a str, otherwise: &'a str) -> &'a str {
    if text.is_empty() { otherwise } else { text }
}
