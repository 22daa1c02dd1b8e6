//! Admits requests to the admin API, and passes them to the endpoints of the store that this host
//! runs at present. A host of a cluster that does not lead answers only probes and requests for
//! metrics.

use std::convert::Infallible;
use std::sync::Arc;

use hyper::body::Incoming;
use hyper::header::{CONNECTION, HeaderValue, WWW_AUTHENTICATE};
use hyper::{Method, Request, StatusCode};
use serde_json::json;
use tokio::sync::watch;

use super::access::Access;
use super::answer::{Answer, Refusal, json};
use super::api::Api;
use super::cluster::ReadFigures;
use super::seat::Seat;
use super::{Scope, metrics};
use statehouse_access::audit::{self, Audit, Refused};

/// What the admin API reports on.
#[derive(Clone)]
pub enum Subject {
    /// The store that this host runs.
    Store(Arc<Api>),
    /// A host of a cluster that does not lead.
    Follower {
        /// Why the host cannot pass clients on, if it cannot.
        impediment: Option<&'static str>,
        /// The answer to operators: which host leads.
        leader: Arc<str>,
        /// Reads its figures.
        figures: ReadFigures,
    },
}

/// Admits requests.
pub(super) struct Requests {
    access: Access,
    scope: Scope,
    audit: Arc<Audit>,
    subject: watch::Receiver<Subject>,
}

impl Requests {
    pub(super) fn new(
        access: Access,
        scope: Scope,
        audit: Arc<Audit>,
        subject: watch::Receiver<Subject>,
    ) -> Self {
        Self {
            access,
            scope,
            audit,
            subject,
        }
    }

    /// Answers one request.
    pub(super) async fn answer(
        &self,
        request: Request<Incoming>,
        seat: &Seat,
    ) -> Result<Answer, Infallible> {
        seat.arrived();
        if let Err(error) = Access::check_form(request.headers()) {
            return Ok(last(Refusal::new(StatusCode::BAD_REQUEST, error).answer()));
        }
        let subject = self.subject.borrow().clone();
        if let Some(answer) = probe(&subject, &request) {
            return Ok(last(answer));
        }
        if self.scope == Scope::Metrics && !is_metrics(&request) {
            let error = "this address answers GET /metrics, /livez and /readyz only";
            return Ok(last(Refusal::new(StatusCode::NOT_FOUND, error).answer()));
        }
        if let Err((status, error)) = self.access.check(request.headers()) {
            self.audit.refused(&Refused {
                what: "administer",
                peer: None,
                client: "",
                user: None,
                why: &error,
            });
            let mut answer = Refusal::new(status, error).answer();
            if status == StatusCode::UNAUTHORIZED {
                let scheme = HeaderValue::from_static("Bearer");
                answer.headers_mut().insert(WWW_AUTHENTICATE, scheme);
            }
            return Ok(last(answer));
        }
        if !seat.take() {
            let text = "too many operators are connected: try again later";
            return Ok(last(
                Refusal::new(StatusCode::SERVICE_UNAVAILABLE, text).answer(),
            ));
        }
        // A refused request may have an unread body, so its connection is closed after the answer.
        let act = (request.method() != Method::GET)
            .then(|| (request.method().clone(), request.uri().path().to_owned()));
        let answer = match subject {
            Subject::Store(api) => api.route(request).await,
            Subject::Follower { figures, .. } if is_metrics(&request) => Ok(metrics::answer(
                metrics::of_follower(&figures()),
                request.headers(),
            )),
            Subject::Follower { leader, .. } => {
                Err(Refusal::new(StatusCode::MISDIRECTED_REQUEST, &*leader))
            }
        };
        let answer = answer.unwrap_or_else(|refusal| last(refusal.answer()));
        if let Some((method, path)) = act {
            let status = answer.status().as_u16();
            tracing::info!(target: audit::TARGET, %method, path, status, "admin request");
        }
        Ok(answer)
    }
}

/// Health probes, which need no token because they reveal no stored data.
fn probe(subject: &Subject, request: &Request<Incoming>) -> Option<Answer> {
    if request.method() != Method::GET {
        return None;
    }
    match request.uri().path() {
        "/livez" => Some(json(StatusCode::OK, &json!({}))),
        "/readyz" => {
            let impediment = match subject {
                Subject::Store(api) => api.impediment(),
                Subject::Follower { impediment, .. } => *impediment,
            };
            Some(match impediment {
                None => json(StatusCode::OK, &json!({})),
                Some(why) => Refusal::new(StatusCode::SERVICE_UNAVAILABLE, why).answer(),
            })
        }
        _ => None,
    }
}

fn is_metrics(request: &Request<Incoming>) -> bool {
    request.method() == Method::GET && request.uri().path() == "/metrics"
}

/// Closes the connection after this answer.
fn last(mut answer: Answer) -> Answer {
    let close = HeaderValue::from_static("close");
    answer.headers_mut().insert(CONNECTION, close);
    answer
}
