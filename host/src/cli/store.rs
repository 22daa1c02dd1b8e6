//! The admin API of a running store, for commands. Yields JSON, or a failure with an exit code.

use std::io;
use std::path::PathBuf;

use hyper::{Method, StatusCode};
use serde_json::Value as Json;

use super::context;
use super::output::{Failure, printable};
use crate::admin::{Endpoint, ask};
use crate::config::{ADMIN_TOKEN, socket_path};
use crate::limits;

/// Exit code if the store refuses.
const EXIT_REFUSED: u8 = 4;

/// Options that select the store.
#[derive(Debug, clap::Args)]
pub(super) struct Store {
    /// The data directory of the running store; its file `admin` holds the address and the token of
    /// the admin API [default: that of the context, or statehouse-data]
    #[arg(
        long,
        value_name = "DIR",
        env = "STATEHOUSE_DATA",
        help_heading = "Store"
    )]
    data: Option<PathBuf>,

    /// The context that names the store (see `statehouse context`) [default: the selected one]
    #[arg(
        long,
        value_name = "NAME",
        env = "STATEHOUSE_CONTEXT",
        help_heading = "Store",
        conflicts_with_all = ["data", "admin"]
    )]
    context: Option<String>,

    /// The address of the admin API instead: http://ADDR:PORT, with the token in
    /// STATEHOUSE_ADMIN_TOKEN, or unix:PATH
    #[arg(
        long,
        value_name = "URL",
        env = "STATEHOUSE_ADMIN_URL",
        help_heading = "Store"
    )]
    admin: Option<String>,

    /// Print JSON
    #[arg(long)]
    pub(super) json: bool,
}

/// The failure for a response that this program cannot parse.
pub(super) fn unexpected(error: serde_json::Error) -> Failure {
    Failure::transport(format!(
        "the store sent an unexpected response; do it and this program have the same version? {error}"
    ))
}

impl Store {
    /// Sends a request without a body.
    pub(super) async fn ask(&self, method: Method, path: &str) -> Result<Json, Failure> {
        self.send(method, path, Vec::new()).await
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
        let endpoint = self.endpoint()?;
        let asking = ask(&endpoint, method, path, body);
        let (status, answer) = tokio::time::timeout(limits::ADMIN_ANSWER_TIMEOUT, asking)
            .await
            .map_err(|_| {
                let url = &endpoint.url;
                Failure::transport(format!(
                    "{url} does not answer. The request may still take effect: check with `statehouse policy list`"
                ))
            })?
            .map_err(|error| self.unreachable(&endpoint, &error))?;
        if status.is_success() {
            return Ok(answer);
        }
        let error = answer["error"].as_str().unwrap_or("it gave no reason");
        let error = printable(error.as_bytes());
        Err(match status {
            StatusCode::NOT_FOUND | StatusCode::CONFLICT => Failure::negative(error),
            StatusCode::BAD_REQUEST => Failure::usage(error),
            _ if status.is_server_error() => Failure::transport(error),
            _ => Failure::new(EXIT_REFUSED, error),
        })
    }

    /// The data directory: the given one, that of the context, or the default one.
    fn data(&self) -> Result<PathBuf, Failure> {
        if let Some(data) = &self.data {
            return Ok(data.clone());
        }
        let of_context = context::find(self.context.as_deref())?.and_then(|it| it.data);
        Ok(of_context.unwrap_or_else(|| PathBuf::from("statehouse-data")))
    }

    fn endpoint(&self) -> Result<Endpoint, Failure> {
        if let Some(url) = &self.admin {
            if let Some(path) = url.strip_prefix("unix:") {
                let path = socket_path(path).map_err(Failure::usage)?;
                let url = format!("unix:{}", path.display());
                return Ok(Endpoint { url, token: None });
            }
            let token = std::env::var(ADMIN_TOKEN).map_err(|_| {
                Failure::usage(format!(
                    "--admin {url} needs the store's token in the environment variable {ADMIN_TOKEN}"
                ))
            })?;
            if url.contains("://") && !url.starts_with("http://") {
                return Err(Failure::usage(format!(
                    "{url} is not an address of the admin API, such as http://127.0.0.1:8080 or unix:/run/statehouse/admin. The admin API uses HTTP without TLS"
                )));
            }
            return Ok(Endpoint {
                url: url.clone(),
                token: Some(token),
            });
        }
        let data = self.data()?;
        Endpoint::read(&data).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Failure::transport(format!(
                "no store runs in {}, or its admin API is off: start one with `statehouse serve`, give its directory with --data, or the address of its admin API with --admin",
                data.display()
            )),
            io::ErrorKind::PermissionDenied => Failure::transport(format!(
                "{} is not readable by this account: {error}. Run this command as the account of the store",
                Endpoint::path(&data).display()
            )),
            _ => Failure::transport(format!(
                "cannot read {}: {error}",
                Endpoint::path(&data).display()
            )),
        })
    }

    fn unreachable(&self, endpoint: &Endpoint, error: &io::Error) -> Failure {
        let advice = match self.admin {
            Some(_) => "Is a store running there?".to_owned(),
            None => "It has probably been killed, which leaves the file with this address behind. Start one with `statehouse serve`".to_owned(),
        };
        Failure::transport(format!("cannot reach {}: {error}. {advice}", endpoint.url))
    }
}
