//! What all client commands share: where the store is, and connecting to it.

use std::time::Duration;

use statehouse_client::{Client, Error, Options, parse_duration};

use super::output::Failure;

/// Where the store is.
#[derive(Debug, clap::Args)]
pub(super) struct Address {
    /// Name or address of the store's host
    #[arg(
        long,
        env = "STATEHOUSE_HOST",
        default_value = "127.0.0.1",
        help_heading = "Connection"
    )]
    pub(super) host: String,

    /// TCP port of the store, or of the broker in front of it
    #[arg(long, env = "STATEHOUSE_PORT", default_value_t = 1883, help_heading = "Connection",
          value_parser = clap::value_parser!(u16).range(1..))]
    pub(super) port: u16,
}

/// What there is to do where no store is.
pub(super) const START_ONE: &str =
    "Start one with `statehouse serve`, or name another with --host and --port";

/// Options of every command that speaks with a store.
#[derive(Debug, clap::Args)]
pub(super) struct Remote {
    #[command(flatten)]
    address: Address,

    /// MQTT client id [default: statehouse- and random digits]
    #[arg(long, value_name = "ID", help_heading = "Connection")]
    client_id: Option<String>,

    /// How long to wait for the connection, and for each answer
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = parse_duration,
          help_heading = "Connection")]
    timeout: Duration,

    /// Print results as JSON objects, one on a line; bytes that are not UTF-8 as {"base64": ...}
    #[arg(long)]
    pub(super) json: bool,
}

impl Remote {
    /// Connects for one request: the broker need not keep the session longer than it may take.
    pub(super) async fn connect(&self) -> Result<Client, Failure> {
        self.connect_for(self.timeout).await
    }

    /// Connects for long: the broker keeps the session over an interruption of this length.
    pub(super) async fn connect_for(&self, interruption: Duration) -> Result<Client, Failure> {
        let options = Options {
            host: self.address.host.clone(),
            port: self.address.port,
            client_id: self.client_id.clone(),
            timeout: self.timeout,
            session_expiry: interruption.max(Duration::from_secs(1)),
            ..Options::default()
        };
        Client::connect(options).await.map_err(|error| match error {
            Error::Transport(why) => Failure::transport(format!("{why}. {START_ONE}")),
            other => other.into(),
        })
    }
}
