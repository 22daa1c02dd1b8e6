//! Which connections of the administration may stay.
//!
//! A connection whose first request has not come takes one of many places, and loses it to newer connections. An operator's
//! connection, which has shown the token, takes one of few seats and keeps it. Probes need no seat, so neither half-sent
//! requests nor operators can keep a supervisor from `/livez`.

use std::sync::{Arc, OnceLock};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::listener::handshakes::Place;

/// What one connection holds.
pub(super) struct Seat {
    place: Place,
    operators: Arc<Semaphore>,
    taken: OnceLock<OwnedSemaphorePermit>,
}

impl Seat {
    pub(super) fn new(place: Place, operators: Arc<Semaphore>) -> Self {
        Self {
            place,
            operators,
            taken: OnceLock::new(),
        }
    }

    /// Waits until a newer connection has the place.
    pub(super) async fn lost(&self) {
        self.place.lost().await;
    }

    /// The head of a request has come. Its answer is short, and the last of the connection unless
    /// an operator sent it, so it gives its place
    /// back.
    pub(super) fn arrived(&self) {
        self.place.leave();
    }

    /// An operator has sent the request. False if other operators have all seats.
    pub(super) fn take(&self) -> bool {
        if self.taken.get().is_some() {
            return true;
        }
        let Ok(permit) = self.operators.clone().try_acquire_owned() else {
            return false;
        };
        // Requests of one connection come one after the other.
        self.taken.set(permit).is_ok()
    }
}
