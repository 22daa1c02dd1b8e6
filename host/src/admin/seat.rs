//! Limits the connections of the admin API.
//!
//! A connection without a request holds one of many places, and loses it to newer connections. A
//! connection that has logged in takes one of a few operator seats and keeps it. Probes
//! need no seat, so neither slow connections nor operators can block `/livez`.

use std::sync::{Arc, OnceLock};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::stream::OpenStream;
use statehouse_config::limits;
use statehouse_listener::handshakes::Place;

/// The place and the seat of one connection.
pub(super) struct Seat {
    place: Place,
    operators: Arc<Semaphore>,
    taken: OnceLock<OwnedSemaphorePermit>,
    /// The stream of events that this connection ends with, if one has begun.
    stream: OnceLock<OpenStream>,
    streaming: Notify,
}

impl Seat {
    pub(super) fn new(place: Place, operators: Arc<Semaphore>) -> Self {
        Self {
            place,
            operators,
            taken: OnceLock::new(),
            stream: OnceLock::new(),
            streaming: Notify::new(),
        }
    }

    /// Waits until a newer connection takes the place.
    pub(super) async fn lost(&self) {
        self.place.evicted().await;
    }

    /// A request has arrived and its sender is known or refused, so the connection releases its
    /// place: the response is short, and the last one unless an operator sent the request.
    pub(super) fn arrived(&self) {
        self.place.release();
    }

    /// Takes a seat for an operator's request. False if other operators hold all seats.
    pub(super) fn take(&self) -> bool {
        if self.taken.get().is_some() {
            return true;
        }
        let Ok(permit) = self.operators.clone().try_acquire_owned() else {
            return false;
        };
        // The requests of one connection are sequential.
        self.taken.set(permit).is_ok()
    }

    /// The connection sends a stream of events from now on.
    pub(super) fn stream(&self, stream: OpenStream) {
        // A stream is the last answer of its connection.
        if self.stream.set(stream).is_ok() {
            self.streaming.notify_one();
        }
    }

    /// Waits until the connection must end, whatever it does. A stream has a time limit of its own.
    pub(super) async fn expired(&self) {
        let streaming = timeout(limits::ADMIN_CONNECTION_TIMEOUT, self.streaming.notified());
        if streaming.await.is_ok()
            && let Some(stream) = self.stream.get()
        {
            stream.lost().await;
        }
    }
}
