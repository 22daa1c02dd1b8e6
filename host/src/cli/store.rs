//! The admin API of a running store, for commands. Yields JSON, or a failure with an exit code.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bytes::Bytes;
use data_encoding::BASE64;
use hyper::{Method, StatusCode};
use serde_json::Value as Json;
use statehouse_client::Login;
use statehouse_link::{describe_io, is_untrusted};

use super::context::{self, Context};
use super::output::{Exit, Failure, emit_either, one_line};
use super::remote::{Certificates, Credentials, TRUST_ONE};
use crate::admin::{
    Connection, Endpoint, NO_LEADER, NoAnswer, Question, ask, is_bearer_token, is_plain_url,
    is_tls_url,
};
use statehouse_config::{ADMIN_TOKEN, ConfigError, limits, socket_path};

/// How long a command asks for a host that leads its cluster. It must exceed the time in which a
/// connection to a host without power fails (5 s). A takeover takes about 2 s.
const LEADER_WAIT: Duration = Duration::from_secs(6);

/// The pause before all hosts are asked again.
const LEADER_PAUSE: Duration = Duration::from_millis(200);

/// Options that name the store.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Store")]
pub(super) struct Place {
    /// The data directory of the store, if it is on this machine; while the store runs, its file
    /// `admin` holds the address and the token of the admin API [default: that of the context, or
    /// statehouse-data]
    #[arg(long, value_name = "DIR", env = "STATEHOUSE_DATA")]
    data: Option<PathBuf>,

    /// The address of the admin API instead: https://HOST:PORT, http://ADDR:PORT, or unix:PATH;
    /// those of all hosts of a cluster with commas. The host that leads answers, or about the past
    /// of a key the first one that has a history. Over https:// log in with --user and
    /// --password-file, else with the store's token in STATEHOUSE_ADMIN_TOKEN
    #[arg(long, value_name = "URL", env = "STATEHOUSE_ADMIN_URL")]
    admin: Option<String>,
}

/// The store, or a context that names it.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Store")]
pub(super) struct Named {
    #[command(flatten)]
    place: Place,

    /// The context that names the store (see `statehouse context`) [default: the selected one]
    #[arg(long, value_name = "NAME", env = "STATEHOUSE_CONTEXT",
          conflicts_with_all = ["data", "admin"])]
    context: Option<String>,
}

/// The store and how to log in.
#[derive(Debug, clap::Args)]
pub(super) struct Reach {
    #[command(flatten)]
    named: Named,

    #[command(flatten)]
    credentials: Credentials,
}

/// Options of commands that ask the admin API.
#[derive(Debug, clap::Args)]
pub(super) struct Store {
    #[command(flatten)]
    reach: Reach,

    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// How a command reaches the store.
pub(super) enum Found {
    /// Its data directory is on this machine.
    Data(PathBuf),
    /// It has an admin API somewhere.
    Admin(Asked),
}

/// The admin API of a store.
#[derive(Default)]
pub(super) struct Asked {
    /// One host, or those of a cluster.
    hosts: Vec<Connection>,
    /// The data directory whose file `admin` has the address.
    data: Option<PathBuf>,
    /// How long to wait for each host, if the command has an option for that.
    pub(super) timeout: Option<Duration>,
    /// Whether this is one of several hosts that are asked.
    is_one_of_several: bool,
}

/// What the requests of a command need.
#[derive(Clone, Copy)]
enum Needs {
    Login,
    /// No login, as probes. One that is given is sent nevertheless.
    Nothing,
}

/// The failure for a response that this program cannot parse.
pub(super) fn unexpected(error: serde_json::Error) -> Failure {
    Failure::transport(format!(
        "the store sent an unexpected response; do it and this program have the same version? {error}"
    ))
}

impl Place {
    pub(super) fn is_given(&self) -> bool {
        self.data.is_some() || self.admin.is_some()
    }

    /// Whether they name an admin API over TLS.
    pub(super) fn has_tls_admin(&self) -> bool {
        self.admin.as_deref().is_some_and(is_any_tls_url)
    }

    /// How to reach the store, without a context if its address is given.
    fn find(
        &self,
        needs: Needs,
        context: Option<&str>,
        credentials: &Credentials,
    ) -> Result<Found, Failure> {
        if let Some(url) = &self.admin {
            return Asked::at(url, credentials, needs).map(Found::Admin);
        }
        if let Some(data) = &self.data {
            return Ok(Found::Data(data.clone()));
        }
        match context::find(context)? {
            Some((name, context)) => Self::of(&name, context, credentials, needs),
            None => Ok(Found::default()),
        }
    }

    /// How to reach the store beside its address `is_given`: the selected context may be that of
    /// another store.
    pub(super) fn find_beside(
        &self,
        is_given: bool,
        context: Option<&str>,
        credentials: &Credentials,
    ) -> Result<Found, Failure> {
        match (is_given, self.is_given(), context) {
            (_, true, Some(_)) => Err(Failure::usage(
                "name the store either by a context, or by --data or --admin",
            )),
            (true, false, _) => Ok(Found::default()),
            _ => self.find(Needs::Login, context, credentials),
        }
    }

    /// How to reach the store of a context.
    fn of(
        name: &str,
        mut context: Context,
        credentials: &Credentials,
        needs: Needs,
    ) -> Result<Found, Failure> {
        if let Some(url) = context.admin.take() {
            let mut credentials = credentials.clone();
            credentials.fill(context);
            return Asked::at(&url, &credentials, needs).map(Found::Admin);
        }
        let data = context.data.map(Found::Data);
        data.ok_or_else(|| context::lacks(name, "neither --admin nor --data"))
    }
}

impl Default for Found {
    fn default() -> Self {
        Self::Data("statehouse-data".into())
    }
}

impl Reach {
    pub(super) fn find(&self) -> Result<Found, Failure> {
        let Named { place, context } = &self.named;
        place.find(Needs::Login, context.as_deref(), &self.credentials)
    }
}

impl Named {
    /// The admin API, for a command without options of an account: that is the one of the context.
    pub(super) fn asked(&self, certificates: &Certificates) -> Result<Asked, Failure> {
        let credentials = Credentials::from(certificates.clone());
        let context = match self.place.is_given() {
            true => None,
            false => context::find(self.context.as_deref())?,
        };
        let needs_token = match &context {
            Some((_, it)) => it.user.is_none() && it.admin.as_deref().is_some_and(is_any_tls_url),
            None => self.place.has_tls_admin(),
        };
        if needs_token && token().is_none() {
            return Err(Failure::usage(format!(
                "this command logs in over https:// as the user of a --context (see `statehouse context add`), or with the store's token in {ADMIN_TOKEN}"
            )));
        }
        let found = match context {
            Some((name, context)) => Place::of(&name, context, &credentials, Needs::Login),
            None => self.place.find(Needs::Login, None, &credentials),
        };
        Asked::of(found?)
    }
}

impl Store {
    /// Sends a request without a body.
    pub(super) async fn ask(&self, method: Method, path: &str) -> Result<Json, Failure> {
        self.send(method, path, Vec::new()).await
    }

    /// Asks a probe, which needs no login. One host that succeeds is enough.
    pub(super) async fn probe(&self, path: &str, timeout: Duration) -> Result<(), Failure> {
        let Reach { named, credentials } = &self.reach;
        let context = named.context.as_deref();
        let found = named.place.find(Needs::Nothing, context, credentials)?;
        let asked = Asked {
            timeout: Some(timeout),
            ..Asked::of(found)?
        };
        asked.probe(path).await
    }

    /// The overview of the host that leads. If none does, that of the first host that answers:
    /// each one has an overview.
    pub(super) async fn overview(&self) -> Result<Json, Failure> {
        Asked::of(self.reach.find()?)?.overview().await
    }

    pub(super) async fn put(&self, path: &str, document: &Json) -> Result<Json, Failure> {
        self.send(Method::PUT, path, document.to_string().into_bytes())
            .await
    }

    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<Json, Failure> {
        let asked = Asked::of(self.reach.find()?)?;
        asked.send(method, path, body).await
    }

    /// Prints the response to a request: as JSON, or in words.
    pub(super) fn print(
        &self,
        response: &Json,
        in_words: impl FnOnce(&Json) -> String,
    ) -> Result<Exit, Failure> {
        emit_either(self.json, || response.clone(), || in_words(response))?;
        Ok(Exit::Done)
    }
}

impl Asked {
    async fn overview(self) -> Result<Json, Failure> {
        let mut last = Err(Failure::usage("no host is named"));
        for host in self.each() {
            let answer = host.send(Method::GET, "/v1/overview", Vec::new()).await;
            // A host that does not lead its cluster has no store.
            if answer.as_ref().is_ok_and(|it| !it["rates"].is_null()) {
                return answer;
            }
            if last.is_err() {
                last = answer;
            }
        }
        last
    }

    async fn probe(self, path: &str) -> Result<(), Failure> {
        let mut failures = Vec::new();
        for host in self.each() {
            match host.send(Method::GET, path, Vec::new()).await {
                Ok(_) => return Ok(()),
                Err(failure) if !host.is_one_of_several => return Err(failure),
                Err(failure) => {
                    let url: String = host.hosts.iter().map(|it| &*it.url).collect();
                    let why = failure.message();
                    failures.push(match why.contains(&url) {
                        true => why.to_owned(),
                        false => format!("{url}: {why}"),
                    });
                }
            }
        }
        Err(Failure::transport(failures.join("; ")))
    }

    /// Each host on its own.
    fn each(self) -> impl Iterator<Item = Self> {
        let is_one_of_several = self.hosts.len() > 1;
        self.hosts.into_iter().map(move |host| Self {
            hosts: vec![host],
            data: self.data.clone(),
            timeout: self.timeout,
            is_one_of_several,
        })
    }

    /// Sends a request with any body. If no host of a cluster can answer because none leads, sends
    /// it again for some seconds: a host that answers 421 has executed nothing.
    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<Json, Failure> {
        let began = Instant::now();
        let mut is_repeated = false;
        loop {
            let (status, answer) = self.answer(&method, path, body.clone()).await?;
            if status.is_success() {
                return Ok(answer);
            }
            let error = answer["error"].as_str().unwrap_or("it gave no reason");
            if status != StatusCode::MISDIRECTED_REQUEST || !self.may_change(path, error) {
                return Err(self.refusal(status, error));
            }
            // Several hosts that cannot be reached take longer.
            if is_repeated && began.elapsed() >= LEADER_WAIT {
                return Err(Failure::transport(format!(
                    "no host that was asked leads at present ({}): try again in a few seconds, or see `statehouse cluster status`",
                    one_line(error)
                )));
            }
            is_repeated = true;
            tokio::time::sleep(LEADER_PAUSE).await;
        }
    }

    /// Whether a host may soon answer a request to which all hosts that were reached answered 421
    /// with this error.
    fn may_change(&self, path: &str, error: &str) -> bool {
        let of_past = ["/v1/history", "/v1/value"];
        let is_of_past = of_past.iter().any(|it| path.starts_with(it));
        error == NO_LEADER || (self.hosts.len() > 1 && !is_of_past)
    }

    /// The answer of the first host that can be reached and does not answer 421, or else of the
    /// last one that was reached.
    async fn answer(
        &self,
        method: &Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<(StatusCode, Json), Failure> {
        let time = self.timeout.unwrap_or_else(|| patience(method, path));
        let question = Question {
            method,
            path,
            body: Bytes::from(body),
            time,
            is_one_of_several: self.is_one_of_several,
        };
        let (url, answered) = ask(&self.hosts, &question).await;
        answered.map_err(|why| match why {
            NoAnswer::Silent => silent(url, time, method, path),
            NoAnswer::Failed(error) => self.unreachable(url, &error),
        })
    }

    /// The failure for a status that is no success.
    fn refusal(&self, status: StatusCode, error: &str) -> Failure {
        let error = one_line(error);
        match status {
            StatusCode::NOT_FOUND | StatusCode::CONFLICT => Failure::negative(error),
            StatusCode::BAD_REQUEST => Failure::usage(error),
            StatusCode::MISDIRECTED_REQUEST if self.hosts.len() == 1 => {
                Failure::refused(error).with(
                    "With --admin https://HOST:PORT,https://HOST:PORT and the address of each host this command finds the host that can answer by itself",
                )
            }
            _ if status.is_server_error() => Failure::transport(error),
            _ => Failure::refused(error),
        }
    }

    /// The admin API of a store that was found.
    fn of(found: Found) -> Result<Self, Failure> {
        match found {
            Found::Admin(asked) => Ok(asked),
            Found::Data(data) => Ok(Self {
                hosts: vec![endpoint(&data)?.into()],
                data: Some(data),
                ..Self::default()
            }),
        }
    }

    /// The admin API at a URL, or at those of all hosts of a cluster.
    fn at(urls: &str, credentials: &Credentials, needs: Needs) -> Result<Self, Failure> {
        let hosts = urls.split(',');
        let hosts = hosts.map(|url| connection(url, credentials, needs));
        Ok(Self {
            hosts: hosts.collect::<Result<_, _>>()?,
            ..Self::default()
        })
    }

    fn unreachable(&self, url: &str, error: &io::Error) -> Failure {
        let advice = match &self.data {
            _ if is_untrusted(error) => TRUST_ONE,
            None => "Is a store running there?",
            // A store that stops removes the file, and one that starts replaces it.
            Some(data) if Endpoint::read(data).is_ok_and(|it| it.url == url) => {
                "It has probably been killed, which leaves the file with this address behind. Start one with `statehouse serve`"
            }
            Some(_) => "It has stopped meanwhile. Start it with `statehouse serve`",
        };
        let why = describe_io(error);
        Failure::transport(format!("cannot reach {url}: {why}. {advice}"))
    }
}

/// How long a host may take to answer a request.
fn patience(method: &Method, path: &str) -> Duration {
    let is_one_of = |all: &[&str]| all.iter().any(|it| path.starts_with(it));
    let reads_history = is_one_of(&["/v1/history", "/v1/value", "/v1/replay"]);
    let is_short = is_one_of(&["/v1/authz", "/v1/clients"]);
    match (*method == Method::GET && !reads_history) || is_short {
        true => limits::ADMIN_SHORT_ANSWER_TIMEOUT,
        false => limits::ADMIN_ANSWER_TIMEOUT,
    }
}

/// The failure of a request that a host did not answer within this time.
fn silent(url: &str, time: Duration, method: &Method, path: &str) -> Failure {
    let silent = Failure::transport(format!("{url} does not answer within {time:?}"));
    let questions = ["/v1/replay", "/v1/authz"];
    if *method == Method::GET || questions.iter().any(|it| path.starts_with(it)) {
        return silent;
    }
    let lists = match path.starts_with("/v1/clients") {
        true => "clients",
        false => "policy list",
    };
    silent.with(&format!(
        "The request may still take effect: check with `statehouse {lists}`"
    ))
}

/// The admin API of a host, and how to log in there.
fn connection(url: &str, credentials: &Credentials, needs: Needs) -> Result<Connection, Failure> {
    let mut connection = Connection {
        url: url.to_owned(),
        authorization: None,
        tls: None,
    };
    if let Some(path) = url.strip_prefix("unix:") {
        let path = socket_path(path).map_err(Failure::usage)?;
        connection.url = format!("unix:{}", path.display());
    } else if is_tls_url(url) {
        let tls = credentials.client_config();
        let tls = tls.map_err(|it| it.with("--ca FILE names the CA of the store"))?;
        connection.tls = Some(tls);
        connection.authorization = match credentials.operator()? {
            Some(Login { user, password }) => {
                let login = BASE64.encode(format!("{user}:{password}").as_bytes());
                Some(format!("Basic {login}"))
            }
            None => bearer(url, "a user (--user and --password-file), or ", needs)?,
        };
    } else if is_plain_url(url) {
        connection.authorization = bearer(url, "", needs)?;
    } else {
        let url = ConfigError::without_login(url);
        return Err(Failure::usage(format!(
            "{url} is not an address of the admin API, such as https://plant7:8443, http://127.0.0.1:8080 or unix:/run/statehouse/admin"
        )));
    }
    Ok(connection)
}

/// Whether one of these URLs, with commas between them, is that of an admin API over TLS.
fn is_any_tls_url(urls: &str) -> bool {
    urls.split(',').any(is_tls_url)
}

/// The token of the environment.
fn token() -> Option<OsString> {
    std::env::var_os(ADMIN_TOKEN).filter(|it| !it.is_empty())
}

/// The Authorization header with the token of the environment; none if there is no token and the
/// request needs no login.
fn bearer(url: &str, alternative: &str, needs: Needs) -> Result<Option<String>, Failure> {
    let token = match (token(), needs) {
        (Some(token), _) => token,
        (None, Needs::Nothing) => return Ok(None),
        (None, Needs::Login) => {
            return Err(Failure::usage(format!(
                "--admin {url} needs {alternative}the store's token in the environment variable {ADMIN_TOKEN}"
            )));
        }
    };
    match token.into_string().ok().filter(|it| is_bearer_token(it)) {
        Some(token) => Ok(Some(format!("Bearer {token}"))),
        None => Err(Failure::usage(format!(
            "{ADMIN_TOKEN} must be printable ASCII without a space or a line end at either end, since it is sent in an HTTP header"
        ))),
    }
}

/// The address that the store with this data directory has written.
fn endpoint(data: &Path) -> Result<Endpoint, Failure> {
    Endpoint::read(data).map_err(|error| match error.kind() {
        // The file says why it counts for nothing.
        io::ErrorKind::NotFound if error.get_ref().is_some() => Failure::transport(format!(
            "no store runs in {}: {error}. Give the directory of the store with --data, or the address of its admin API with --admin",
            data.display()
        )),
        io::ErrorKind::NotFound => Failure::transport(format!(
            "no store runs in {}, or its admin API is off: start one with `statehouse serve`, give its directory with --data, or the address of its admin API with --admin",
            data.display()
        )),
        io::ErrorKind::PermissionDenied => Failure::transport(format!(
            "{} is not readable by this account: {error}. Run this command as the account of the store",
            Endpoint::path(data).display()
        )),
        _ => Failure::transport(format!(
            "cannot read {}: {error}",
            Endpoint::path(data).display()
        )),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: every command waited five minutes for a store that does not answer.
    #[test]
    fn short_answers_have_a_short_time() {
        let short = limits::ADMIN_SHORT_ANSWER_TIMEOUT;
        let long = limits::ADMIN_ANSWER_TIMEOUT;
        assert!(short > limits::ADMIN_LOG_WAIT);
        for (method, path, time) in [
            (Method::GET, "/v1/usage?clients=5", short),
            (Method::GET, "/v1/log?from=1", short),
            (Method::POST, "/v1/authz", short),
            (Method::DELETE, "/v1/clients/press-4", short),
            (Method::GET, "/v1/history?key=a", long),
            (Method::GET, "/v1/replay?limit=1", long),
            (Method::POST, "/v1/policies", long),
        ] {
            assert_eq!(patience(&method, path), time, "{method} {path}");
        }
    }
}
