//! Where the clients of a store that `serve` runs are: at the embedded broker, or with the store at a foreign one.
//!
//! What enters: settings, and a store. What leaves: lines that say where clients find it, and its end.

use std::io;
use std::sync::Arc;

use statehouse_link::{End, Options};
use statehouse_mqtt::Broker;
use tokio::task::JoinHandle;

use super::output::Failure;
use crate::config::{Config, ForeignConfig, TransportChoice};
use crate::limits;
use crate::listener::Listeners;
use crate::server::Server;
use crate::transport::foreign::{self, Foreign, Phase};
use statehouse_access::Authorizer;
use statehouse_access::audit::Audit;
use statehouse_files::watch::Reloads;

/// Exit code of a store whose session another client took over (EX_PROTOCOL of sysexits.h): whoever supervises it should
/// not start it again.
const EXIT_TAKEN_OVER: u8 = 76;

/// What is ready before the data is touched.
pub(super) enum Entrance {
    /// Addresses that were taken.
    Listening(Listeners),
    /// What a connection needs, but for the client id.
    Attaching(Box<Options>),
}

/// Where clients are.
pub(super) enum Clients {
    /// Their broker is this one.
    Embedded(Broker),
    /// They and the store are clients of another.
    Foreign(Box<Attached>),
}

/// What it takes to be a client oneself.
pub(super) struct Attached {
    foreign: Arc<Foreign>,
    config: ForeignConfig,
    client_id: String,
}

/// Clients can come.
pub(super) struct Open {
    clients: Clients,
    tasks: Vec<JoinHandle<()>>,
    link: Option<JoinHandle<()>>,
    lines: Vec<String>,
}

impl Entrance {
    /// Takes the addresses, where there are some, and reads the certificates: who connects from now on waits until the store
    /// is ready.
    pub(super) fn prepare(config: &Config) -> anyhow::Result<Self> {
        match &config.transport {
            TransportChoice::Embedded(listen) => Ok(Self::Listening(Listeners::bind(listen)?)),
            TransportChoice::Foreign(foreign) => {
                let options = foreign::options(foreign, config.bounds.broker.packet_bytes_max)?;
                Ok(Self::Attaching(Box::new(options)))
            }
        }
    }

    /// Lets its certificates be read again. Whose certificate is no longer good is disconnected from the broker.
    pub(super) fn reload_with(&self, reloads: &mut Reloads, broker: Option<&Broker>) {
        if let (Self::Listening(listeners), Some(broker)) = (self, broker.cloned()) {
            listeners.reload_with(reloads, move || broker.recheck());
        }
    }
}

impl Clients {
    /// A store behind a foreign broker.
    pub(super) fn foreign(
        server: &Arc<Server>,
        foreign_config: &ForeignConfig,
        client_id: String,
        rules: Option<Arc<Authorizer>>,
    ) -> Self {
        let foreign = Foreign::new(server.clone(), foreign_config, &client_id);
        if let Some(rules) = rules {
            foreign.under(rules);
        }
        server.attach(foreign.clone());
        Self::Foreign(Box::new(Attached {
            foreign,
            config: foreign_config.clone(),
            client_id,
        }))
    }

    /// The embedded broker.
    pub(super) fn broker(&self) -> Option<&Broker> {
        match self {
            Self::Embedded(broker) => Some(broker),
            Self::Foreign(_) => None,
        }
    }

    /// Lets clients in, or goes where they are.
    pub(super) fn open(
        self,
        entrance: Entrance,
        server: &Arc<Server>,
        audit: &Arc<Audit>,
    ) -> io::Result<Open> {
        let mut open = Open {
            clients: self,
            tasks: Vec::new(),
            link: None,
            lines: Vec::new(),
        };
        match (&open.clients, entrance) {
            (Clients::Embedded(broker), Entrance::Listening(listeners)) => {
                for opened in listeners.open(broker, audit)? {
                    open.lines.push(opened.line);
                    open.tasks.push(tokio::spawn(opened.accepting));
                }
                let broker = broker.clone();
                let timers = async move { broker.run_timers().await };
                open.tasks.push(tokio::spawn(timers));
            }
            (Clients::Foreign(attached), Entrance::Attaching(options)) => {
                let Attached {
                    foreign,
                    config,
                    client_id,
                } = &**attached;
                let client = client_id.escape_debug();
                open.lines
                    .push(format!("attached to {} as {client}", config.broker));
                let options = Options {
                    client_id: client_id.clone(),
                    ..*options
                };
                let link = statehouse_link::run(foreign.clone(), options);
                open.link = Some(tokio::spawn(link));
                let (foreign, server) = (foreign.clone(), server.clone());
                let aging = async move { foreign.age_watches(|| server.watching()).await };
                open.tasks.push(tokio::spawn(aging));
            }
            // Both are made of one setting.
            _ => return Err(io::Error::other("no way for clients to come")),
        }
        Ok(open)
    }
}

impl Open {
    /// Waits until clients can be served, and says where. None where that will not be.
    pub(super) async fn where_from(&self) -> Option<&[String]> {
        if let Clients::Foreign(attached) = &self.clients {
            let mut phase = attached.foreign.phase();
            let phase = phase.wait_for(|phase| *phase != Phase::Waiting).await;
            if !matches!(phase.as_deref(), Ok(Phase::Attached)) {
                return None;
            }
        }
        Some(&self.lines)
    }

    /// How it is learnt that clients have gone, where that is not seen.
    pub(super) async fn presence(&self) -> Option<String> {
        let Clients::Foreign(attached) = &self.clients else {
            return None;
        };
        let ForeignConfig {
            broker, watch_ttl, ..
        } = &attached.config;
        let shown = attached.foreign.presence();
        let line = shown.line(&broker.host, broker.port, *watch_ttl).await;
        Some(format!("presence: {line}"))
    }

    /// Waits until clients cannot be served any more, for ever where nothing but the store decides that.
    pub(super) async fn ended(&self) -> Failure {
        let Clients::Foreign(attached) = &self.clients else {
            return std::future::pending().await;
        };
        let mut phase = attached.foreign.phase();
        let ended = phase.wait_for(|phase| matches!(phase, Phase::Ended(_)));
        let why = match ended.await.as_deref() {
            Ok(Phase::Ended(End::TakenOver(why))) => why.clone(),
            _ => "the connection ended by itself: that is a bug".to_owned(),
        };
        let client = attached.client_id.escape_debug();
        let broker = &attached.config.broker;
        Failure::new(
            EXIT_TAKEN_OVER,
            format!(
                "the MQTT client id {client} at {broker} was taken over: {why}. Two stores cannot share one, so this one stops"
            ),
        )
    }

    /// Lets nobody in any more, and waits a little until clients have what is theirs.
    pub(super) async fn shutdown(self) {
        match &self.clients {
            Clients::Embedded(broker) => broker.shutdown(limits::SHUTDOWN_GRACE).await,
            Clients::Foreign(attached) => attached.foreign.shutdown(limits::SHUTDOWN_GRACE).await,
        }
        if let Some(link) = self.link {
            // It ends by itself, soon after.
            _ = tokio::time::timeout(2 * statehouse_link::limits::CLOSE_WAIT, link).await;
        }
        for task in self.tasks {
            task.abort();
        }
    }
}
