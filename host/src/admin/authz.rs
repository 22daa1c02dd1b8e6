//! What somebody may do in the running store: its rules, and its limits, as they are now.
//!
//! What enters: who wants what. What leaves: what decides it, for `statehouse authz explain`. Nothing is done, and nobody's
//! standing changes by being asked about.

use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use statehouse_mqtt::{Broker, Standing};

use super::Sources;
use statehouse_access::explain::{Explanation, Question, Wanted};
use statehouse_access::rules::Principal;
use statehouse_core::store::Peer;

/// Who wants what.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Ask {
    /// The client id.
    pub(crate) client: String,
    /// Who it is; where that is not said, whoever is connected with this id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) who: Option<Who>,
    /// What it wants to do.
    pub(crate) command: Wanted,
    /// The key, the topic or the topic filter, with percent signs for what is no letter or digit; nothing where it is about
    /// connecting.
    #[serde(default)]
    pub(crate) on: String,
}

/// What is known of a client besides its id.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Who {
    /// Its user.
    #[serde(default)]
    pub(crate) user: Option<Box<str>>,
    /// What a certificate or a token says of it.
    #[serde(default)]
    pub(crate) attributes: Vec<(Box<str>, Box<str>)>,
}

/// What decides.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Told {
    /// The file of the rules, where there are any.
    pub(crate) rules: Option<PathBuf>,
    /// Whether a client with this id is connected.
    pub(crate) connected: bool,
    /// Who it was taken for.
    pub(crate) who: Who,
    /// What the rules say.
    pub(crate) explanation: Explanation,
    /// The limit that would refuse it at present, whatever rules say.
    pub(crate) limit: Option<String>,
    /// A share that may refuse it. The store does not say how much of it the client's owner holds.
    #[serde(default)]
    pub(crate) note: Option<String>,
}

impl Told {
    /// Whether it would be done.
    pub(crate) fn is_allowed(&self) -> bool {
        self.explanation.allowed && self.limit.is_none()
    }
}

/// Finds out. `on` is what is named, as bytes.
pub(super) fn explain(sources: &Sources, ask: Ask, on: &[u8]) -> Told {
    let standing = (sources.broker.as_ref()).and_then(|broker| broker.standing(&ask.client));
    let origin = standing.as_ref().and_then(|it| it.origin.as_ref());
    let who = ask.who.unwrap_or_else(|| {
        origin.map_or_else(Who::default, |origin| Who {
            user: origin.identity.user.clone(),
            attributes: origin.identity.attributes.clone(),
        })
    });
    let principal = Principal {
        client: &ask.client,
        user: who.user.as_deref(),
        attributes: &who.attributes,
    };
    let explanation = sources
        .access
        .explain(&principal, Question::of(ask.command, on));
    let peer = Peer {
        client: ask.client.as_str().into(),
        connection: origin.map_or(0, |it| it.connection),
        session: origin.map_or(0, |it| it.session),
    };
    let bound = match ask.command {
        Wanted::Set => sources.server.check_write(&ask.client, on),
        Wanted::Keynotify => sources.server.check_watch(&peer, on),
        _ => Ok(()),
    };
    let limit = match bound {
        Err(exceeded) => Some(exceeded.to_string()),
        Ok(()) => (sources.broker.as_ref())
            .and_then(|broker| at_the_broker(broker, standing.as_ref(), ask.command, on)),
    };
    let note = (sources.broker.as_ref())
        .filter(|_| limit.is_none() && standing.is_none() && ask.command == Wanted::Connect)
        .and_then(share);
    Told {
        rules: sources.access.rules_file(),
        connected: origin.is_some(),
        who,
        explanation,
        limit,
        note,
    }
}

/// Who has a share of the sessions.
const OWNER: &str = "its owner (its user, or the address of anonymous clients)";

/// The share of sessions, if an owner can have used it up.
fn share(broker: &Broker) -> Option<String> {
    let (share, sessions) = (broker.session_share(), broker.stats().sessions);
    let max = broker.limits().sessions_max;
    (share <= sessions).then(|| {
        format!("{OWNER} may have {share} of max_sessions, which is {max}, at present: it is refused if it would have more")
    })
}

/// The limit of the broker that would refuse it.
fn at_the_broker(
    broker: &Broker,
    standing: Option<&Standing>,
    command: Wanted,
    on: &[u8],
) -> Option<String> {
    let limits: Arc<_> = broker.limits();
    match (command, standing) {
        (Wanted::Connect, None) => {
            let stats = broker.stats();
            if stats.sessions >= limits.sessions_max {
                return Some(format!(
                    "there are max_sessions, which is {}: another one begins only if an empty one without a connection can end, and if {OWNER} has no more than {} with it",
                    limits.sessions_max,
                    broker.session_share()
                ));
            }
            (stats.connections >= limits.connections_max).then(|| {
                format!(
                    "there are max_connections, which is {}",
                    limits.connections_max
                )
            })
        }
        (Wanted::Subscribe, Some(standing)) => {
            let max = limits.subscriptions_per_session_max;
            let is_new = standing.filters.iter().all(|filter| **filter != *on);
            (is_new && standing.filters.len() >= max)
                .then(|| format!("it has max_client_subscriptions, which is {max}"))
        }
        _ => None,
    }
}
