//! The overview of a host: one document with its rates, times, sizes and limits, for the page and
//! for `statehouse top`.
//!
//! A task computes the document once a second for all readers, and only while there are readers: it
//! ends some seconds after the last one. The store measures more while the task runs. A reader
//! never waits for a lock of the store, and a slow reader skips documents.

pub(crate) mod document;
mod sample;
mod sampler;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use hyper::StatusCode;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

use self::document::Overview;
use self::sampler::{Sampler, Unchanging};
use super::answer::{Answer, Refusal, with};
use super::requests::Subject;
use super::stream::{event, event_stream};
use statehouse_config::limits;
use statehouse_files::blocking::{self, BlockingError};

pub(crate) struct Overviews {
    subject: watch::Receiver<Subject>,
    unchanging: Unchanging,
    /// The newest document while there are readers. Streams subscribe to it.
    latest: watch::Sender<Option<Latest>>,
    asked: Mutex<Asked>,
}

/// A document, in both forms.
#[derive(Clone)]
struct Latest {
    document: Bytes,
    event: Bytes,
}

/// Whether documents are computed.
struct Asked {
    /// When the last reader of a single document counts as gone.
    until: Instant,
    is_running: bool,
}

impl Overviews {
    pub(crate) fn new(subject: watch::Receiver<Subject>) -> Arc<Self> {
        Arc::new(Self {
            subject,
            unchanging: Unchanging::read(),
            latest: watch::Sender::new(None),
            asked: Mutex::new(Asked {
                until: Instant::now(),
                is_running: false,
            }),
        })
    }

    /// The newest document.
    pub(super) async fn answer(self: &Arc<Self>) -> Result<Answer, Refusal> {
        let mut latest = self.latest.subscribe();
        self.ask();
        let found = timeout(limits::OVERVIEW_WAIT, latest.wait_for(Option::is_some)).await;
        let document = match found {
            Ok(Ok(found)) => found.as_ref().map(|it| it.document.to_vec()),
            _ => None,
        };
        document
            .map(|document| with(StatusCode::OK, "application/json", document))
            .ok_or_else(|| {
                let error = "the overview could not be computed in time: the machine is overloaded, or the log names a bug";
                Refusal::new(StatusCode::SERVICE_UNAVAILABLE, error)
            })
    }

    /// A stream of documents.
    pub(super) fn live(self: &Arc<Self>) -> Answer {
        let (sink, answer) = event_stream();
        let mut latest = self.latest.subscribe();
        self.ask();
        tokio::spawn(async move {
            loop {
                let next = latest.borrow_and_update().clone();
                if let Some(next) = next
                    && !sink.send(next.event).await
                {
                    return;
                }
                tokio::select! {
                    changed = latest.changed() => if changed.is_err() { return },
                    () = sink.ended() => return,
                }
            }
        });
        answer
    }

    /// Makes sure that documents are computed. The caller must have subscribed.
    fn ask(self: &Arc<Self>) {
        let mut asked = self.asked();
        asked.until = Instant::now() + limits::OVERVIEW_LINGER;
        if !asked.is_running {
            asked.is_running = true;
            tokio::spawn(self.clone().run());
        }
    }

    /// Computes documents while there are readers.
    async fn run(self: Arc<Self>) {
        let sampler = Arc::new(Mutex::new(Sampler::default()));
        // The first document is of a short time, so that its reader need not wait.
        let mut due = Instant::now() + limits::OVERVIEW_FIRST;
        loop {
            let (this, sampling) = (self.clone(), sampler.clone());
            let looked = blocking::run("overview", move || {
                let subject = this.subject.borrow().clone();
                locked(&sampling).look(&subject, &this.unchanging)
            });
            match looked.await {
                Ok(Some(overview)) => {
                    self.latest.send_replace(Some(Latest::of(&overview)));
                }
                Ok(None) => {}
                Err(error @ BlockingError::Thread(_)) => {
                    tracing::warn!(%error, "an overview was not computed");
                }
                Err(BlockingError::Panicked) => {
                    tracing::error!("an overview was not computed because of a bug");
                    self.stop(&mut self.asked());
                    return;
                }
            }
            sleep_until(due).await;
            due = Instant::now() + limits::OVERVIEW_INTERVAL;
            let mut asked = self.asked();
            if Instant::now() >= asked.until && self.latest.receiver_count() == 0 {
                // Before another reader can start a task, since that one measures from then on.
                locked(&sampler).end();
                return self.stop(&mut asked);
            }
        }
    }

    fn stop(&self, asked: &mut Asked) {
        asked.is_running = false;
        self.latest.send_replace(None);
    }

    fn asked(&self) -> MutexGuard<'_, Asked> {
        // Code under this lock does not panic.
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Latest {
    fn of(overview: &Overview) -> Self {
        Self {
            // All keys in the document are strings, so this cannot fail.
            document: serde_json::to_vec(overview).unwrap_or_default().into(),
            event: event("overview", overview),
        }
    }
}

/// After a panic, `Overviews::run` uses the sampler no more.
fn locked(sampler: &Mutex<Sampler>) -> MutexGuard<'_, Sampler> {
    sampler.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http_body_util::BodyExt;
    use serde_json::Value as Json;

    use super::*;
    use crate::admin::metrics::tests::figures;
    use crate::admin::{ClusterPlace, Reader};

    /// A host that follows `gw2`.
    fn follower() -> Subject {
        Subject::Follower {
            impediment: Arc::new(|| None),
            leader: "ask gw2".into(),
            place: ClusterPlace {
                cluster: "plant7".to_owned(),
                host: "gw1".to_owned(),
                leader: Some("gw2".to_owned()),
                followers: Vec::new(),
            },
            figures: Arc::new(|| figures(None)),
            past: Arc::new(Reader::new(None)),
            reloads: Arc::default(),
        }
    }

    #[tokio::test]
    async fn overviews_are_computed_only_while_they_are_read() {
        let subject = watch::Sender::new(follower());
        let overviews = Overviews::new(subject.subscribe());
        let answer = overviews.answer().await.unwrap();
        let body = answer.into_body().collect().await.unwrap().to_bytes();
        let document: Json = serde_json::from_slice(&body).unwrap();
        assert_eq!(document["store"], "plant7");
        assert_eq!(document["host"], "gw1");
        assert_eq!(document["cluster"]["leader"], "gw2");
        assert!(document["rates"].is_null() && document["memory"]["rss"].is_u64());

        // As if the time after the request were over. A stream keeps the task running.
        let mut stream = overviews.live().into_body();
        overviews.asked().until = Instant::now();
        for _ in 0..2 {
            let event = stream.frame().await.unwrap().unwrap().into_data().unwrap();
            assert!(event.starts_with(b"event: overview\ndata: {"), "{event:?}");
        }
        assert!(overviews.asked().is_running);
        drop(stream);
        let ended = async {
            while overviews.asked().is_running {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        timeout(Duration::from_secs(30), ended).await.unwrap();
        assert!(overviews.latest.borrow().is_none());
    }
}
