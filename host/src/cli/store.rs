//! The administration of a running store, as commands speak with it.
//!
//! What enters: where the store is, and what is asked of it. What leaves: JSON, or a failure with an exit code.

use std::io;
use std::path::PathBuf;

use hyper::{Method, StatusCode};
use serde_json::Value as Json;

use super::output::{Failure, printable};
use crate::admin::{Door, ask};
use crate::config::{ADMIN_TOKEN, socket_path};
use crate::limits;

/// Exit code: the store refused.
const EXIT_REFUSED: u8 = 4;

/// Which store.
#[derive(Debug, clap::Args)]
pub(super) struct Store {
    /// The data directory of the running store: the file `admin` in it says where it is and lets you in
    #[arg(
        long,
        value_name = "DIR",
        env = "STATEHOUSE_DATA",
        default_value = "statehouse-data",
        help_heading = "Store"
    )]
    data: PathBuf,

    /// Where its administration is instead: http://ADDR:PORT, with the token in STATEHOUSE_ADMIN_TOKEN, or unix:PATH
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

/// An answer that is none.
pub(super) fn strange(error: serde_json::Error) -> Failure {
    Failure::transport(format!(
        "the store answers otherwise than this program expects; are both of one version? {error}"
    ))
}

impl Store {
    /// Asks without a body.
    pub(super) async fn ask(&self, method: Method, path: &str) -> Result<Json, Failure> {
        self.send(method, path, Vec::new()).await
    }

    /// Asks with a JSON document.
    pub(super) async fn put(&self, path: &str, document: &Json) -> Result<Json, Failure> {
        self.send(Method::PUT, path, document.to_string().into_bytes())
            .await
    }

    /// Asks with any body.
    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Vec<u8>,
    ) -> Result<Json, Failure> {
        let door = self.door()?;
        let asking = ask(&door, method, path, body);
        let (status, answer) = tokio::time::timeout(limits::ADMIN_ANSWER_TIMEOUT, asking)
            .await
            .map_err(|_| {
                let url = &door.url;
                Failure::transport(format!(
                    "{url} does not answer. What was asked may still be done: `statehouse policy list` tells"
                ))
            })?
            .map_err(|error| self.unreachable(&door, &error))?;
        if status.is_success() {
            return Ok(answer);
        }
        let error = answer["error"].as_str().unwrap_or("it does not say why");
        let error = printable(error.as_bytes());
        Err(match status {
            StatusCode::NOT_FOUND | StatusCode::CONFLICT => Failure::negative(error),
            StatusCode::BAD_REQUEST => Failure::usage(error),
            _ if status.is_server_error() => Failure::transport(error),
            _ => Failure::new(EXIT_REFUSED, error),
        })
    }

    fn door(&self) -> Result<Door, Failure> {
        if let Some(url) = &self.admin {
            if let Some(path) = url.strip_prefix("unix:") {
                let path = socket_path(path).map_err(Failure::usage)?;
                let url = format!("unix:{}", path.display());
                return Ok(Door { url, token: None });
            }
            let token = std::env::var(ADMIN_TOKEN).map_err(|_| {
                Failure::usage(format!(
                    "--admin {url} needs the token of the store in the variable {ADMIN_TOKEN}"
                ))
            })?;
            if url.contains("://") && !url.starts_with("http://") {
                return Err(Failure::usage(format!(
                    "{url} is no address of an administration, such as http://127.0.0.1:8080 or unix:/run/statehouse/admin: it speaks HTTP, without TLS"
                )));
            }
            return Ok(Door {
                url: url.clone(),
                token: Some(token),
            });
        }
        Door::read(&self.data).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Failure::transport(format!(
                "no store runs in {}, or its administration is off: start one with `statehouse serve`, name its directory with --data, or its administration with --admin",
                self.data.display()
            )),
            io::ErrorKind::PermissionDenied => Failure::transport(format!(
                "{} is not for this account: {error}. Be the account that the store runs as",
                Door::path(&self.data).display()
            )),
            _ => Failure::transport(format!(
                "cannot read {}: {error}",
                Door::path(&self.data).display()
            )),
        })
    }

    fn unreachable(&self, door: &Door, error: &io::Error) -> Failure {
        let advice = match self.admin {
            Some(_) => "Is a store running there?".to_owned(),
            None => format!(
                "No store runs in {} any more, it seems: one that was killed leaves that file. Start one with `statehouse serve`",
                self.data.display()
            ),
        };
        Failure::transport(format!("cannot reach {}: {error}. {advice}", door.url))
    }
}
