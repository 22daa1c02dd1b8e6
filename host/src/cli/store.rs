//! The admin API of a running store, for commands. Yields JSON, or a failure with an exit code.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use data_encoding::BASE64;
use hyper::{Method, StatusCode};
use serde_json::Value as Json;
use statehouse_client::Login;
use statehouse_link::{describe_io, is_untrusted};

use super::context::{self, Context};
use super::output::{Exit, Failure, emit_either, one_line};
use super::remote::Credentials;
use crate::admin::{Connection, Endpoint, ask, is_plain_url, is_tls_url};
use statehouse_config::{ADMIN_TOKEN, limits, socket_path};

/// Options that name the store.
#[derive(Debug, clap::Args)]
pub(super) struct Place {
    /// The data directory of the store, if it is on this machine; while the store runs, its file
    /// `admin` holds the address and the token of the admin API [default: that of the context, or
    /// statehouse-data]
    #[arg(
        long,
        value_name = "DIR",
        env = "STATEHOUSE_DATA",
        help_heading = "Store"
    )]
    data: Option<PathBuf>,

    /// The address of the admin API instead: https://HOST:PORT, http://ADDR:PORT, or unix:PATH;
    /// those of all hosts of a cluster with commas. The host that leads answers, or about the past
    /// of a key the first one that has a history. Over https:// log in with --user and
    /// --password-file, else with the store's token in STATEHOUSE_ADMIN_TOKEN
    #[arg(
        long,
        value_name = "URL",
        env = "STATEHOUSE_ADMIN_URL",
        help_heading = "Store"
    )]
    admin: Option<String>,
}

/// The store, or a context that names it.
#[derive(Debug, clap::Args)]
pub(super) struct Named {
    #[command(flatten)]
    place: Place,

    /// The context that names the store (see `statehouse context`) [default: the selected one]
    #[arg(
        long,
        value_name = "NAME",
        env = "STATEHOUSE_CONTEXT",
        help_heading = "Store",
        conflicts_with_all = ["data", "admin"]
    )]
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
pub(super) struct Asked {
    /// One host, or those of a cluster.
    hosts: Vec<Connection>,
    /// The data directory whose file `admin` has the address.
    data: Option<PathBuf>,
    /// How long to wait for an answer.
    pub(super) timeout: Duration,
}

/// The failure for a response that this program cannot parse.
pub(super) fn unexpected(error: serde_json::Error) -> Failure {
    Failure::transport(format!(
        "the store sent an unexpected response; do it and this program have the same version? {error}"
    ))
}

impl Place {
    /// Whether these options name a store.
    pub(super) fn is_given(&self) -> bool {
        self.data.is_some() || self.admin.is_some()
    }

    /// How to reach the store, without a context if its address is given.
    pub(super) fn find(
        &self,
        context: Option<&str>,
        credentials: &Credentials,
    ) -> Result<Found, Failure> {
        if let Some(url) = &self.admin {
            return Asked::at(url, credentials).map(Found::Admin);
        }
        if let Some(data) = &self.data {
            return Ok(Found::Data(data.clone()));
        }
        match context::find(context)? {
            Some((name, context)) => Self::of(&name, context, credentials),
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
            _ => self.find(context, credentials),
        }
    }

    /// How to reach the store of a context.
    fn of(name: &str, mut context: Context, credentials: &Credentials) -> Result<Found, Failure> {
        if let Some(url) = context.admin.take() {
            let mut credentials = credentials.clone();
            credentials.fill(context);
            return Asked::at(&url, &credentials).map(Found::Admin);
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
    /// How to reach the store.
    pub(super) fn find(&self) -> Result<Found, Failure> {
        let Named { place, context } = &self.named;
        place.find(context.as_deref(), &self.credentials)
    }
}

impl Named {
    /// The admin API. The account and the certificates are those of the context.
    pub(super) fn asked(&self) -> Result<Asked, Failure> {
        let (admin, context) = (&self.place.admin, self.context.as_deref());
        if admin.as_deref().is_some_and(is_tls_url) && std::env::var_os(ADMIN_TOKEN).is_none() {
            return Err(Failure::usage(format!(
                "this command logs in over https:// by --context (see `statehouse context add`), or with the store's token in {ADMIN_TOKEN}"
            )));
        }
        Asked::of(self.place.find(context, &Credentials::default())?)
    }
}

impl Store {
    /// Sends a request without a body.
    pub(super) async fn ask(&self, method: Method, path: &str) -> Result<Json, Failure> {
        self.send(method, path, Vec::new()).await
    }

    /// The overview of the host that leads. If none does, that of the first host that answers:
    /// each one has an overview.
    pub(super) async fn overview(&self) -> Result<Json, Failure> {
        Asked::of(self.reach.find()?)?.overview().await
    }

    /// Sends a JSON document.
    pub(super) async fn put(&self, path: &str, document: &Json) -> Result<Json, Failure> {
        self.send(Method::PUT, path, document.to_string().into_bytes())
            .await
    }

    /// Sends any body.
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
        for host in self.hosts {
            let host = Self {
                hosts: vec![host],
                data: self.data.clone(),
                timeout: self.timeout,
            };
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

    /// Sends a request with any body.
    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<Json, Failure> {
        let asking = ask(&self.hosts, method.clone(), path, body);
        let (url, answered) = tokio::time::timeout(self.timeout, asking)
            .await
            .map_err(|_| self.silent(&method, path))?;
        let (status, answer) = answered.map_err(|error| self.unreachable(url, &error))?;
        if status.is_success() {
            return Ok(answer);
        }
        let error = answer["error"].as_str().unwrap_or("it gave no reason");
        let error = one_line(error);
        Err(match status {
            StatusCode::NOT_FOUND | StatusCode::CONFLICT => Failure::negative(error),
            StatusCode::BAD_REQUEST => Failure::usage(error),
            StatusCode::MISDIRECTED_REQUEST => Failure::refused(error).with(
                "With --admin https://HOST:PORT,https://HOST:PORT and the address of each host this command finds the host that can answer by itself",
            ),
            _ if status.is_server_error() => Failure::transport(error),
            _ => Failure::refused(error),
        })
    }

    /// The admin API of a store that was found.
    fn of(found: Found) -> Result<Self, Failure> {
        match found {
            Found::Admin(asked) => Ok(asked),
            Found::Data(data) => Ok(Self {
                hosts: vec![endpoint(&data)?.into()],
                data: Some(data),
                timeout: limits::ADMIN_ANSWER_TIMEOUT,
            }),
        }
    }

    /// The admin API at a URL, or at those of all hosts of a cluster.
    fn at(urls: &str, credentials: &Credentials) -> Result<Self, Failure> {
        let hosts = urls.split(',').map(|url| connection(url, credentials));
        Ok(Self {
            hosts: hosts.collect::<Result<_, _>>()?,
            data: None,
            timeout: limits::ADMIN_ANSWER_TIMEOUT,
        })
    }

    fn silent(&self, method: &Method, path: &str) -> Failure {
        let urls: Vec<_> = self.hosts.iter().map(|it| &*it.url).collect();
        let silent = Failure::transport(format!("{} does not answer", urls.join(",")));
        let questions = ["/v1/replay", "/v1/authz"];
        if *method == Method::GET || questions.iter().any(|it| path.starts_with(it)) {
            return silent;
        }
        silent.with("The request may still take effect: check with `statehouse policy list`")
    }

    fn unreachable(&self, url: &str, error: &io::Error) -> Failure {
        let advice = match &self.data {
            _ if is_untrusted(error) => "--ca FILE names the CA certificates to trust",
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

/// The admin API of a host, and how to log in there.
fn connection(url: &str, credentials: &Credentials) -> Result<Connection, Failure> {
    if let Some(path) = url.strip_prefix("unix:") {
        let path = socket_path(path).map_err(Failure::usage)?;
        Ok(Connection {
            url: format!("unix:{}", path.display()),
            authorization: None,
            tls: None,
        })
    } else if is_tls_url(url) {
        let tls = credentials.client_config();
        let tls = tls.map_err(|it| it.with("--ca FILE names the CA of the store"))?;
        let authorization = match credentials.operator()? {
            Some(Login { user, password }) => {
                let login = BASE64.encode(format!("{user}:{password}").as_bytes());
                format!("Basic {login}")
            }
            None => bearer(url, "a user (--user and --password-file), or ")?,
        };
        Ok(Connection {
            url: url.to_owned(),
            authorization: Some(authorization),
            tls: Some(tls),
        })
    } else if !is_plain_url(url) {
        Err(Failure::usage(format!(
            "{url} is not an address of the admin API, such as https://plant7:8443, http://127.0.0.1:8080 or unix:/run/statehouse/admin"
        )))
    } else {
        Ok(Connection {
            url: url.to_owned(),
            authorization: Some(bearer(url, "")?),
            tls: None,
        })
    }
}

/// The Authorization header with the token of the environment.
fn bearer(url: &str, alternative: &str) -> Result<String, Failure> {
    let token = std::env::var(ADMIN_TOKEN).map_err(|_| {
        Failure::usage(format!(
            "--admin {url} needs {alternative}the store's token in the environment variable {ADMIN_TOKEN}"
        ))
    })?;
    Ok(format!("Bearer {token}"))
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
