//! Limits the connections of the admin API.
//!
//! A connection without a request holds one of many places, and loses it to newer connections. A
//! connection that has logged in takes one of a few operator seats and keeps it. One user has only
//! a part of them. Probes need no seat, so neither slow connections nor operators can block
//! `/livez`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tokio::sync::Notify;
use tokio::time::timeout;

use super::stream::OpenStream;
use statehouse_config::limits;
use statehouse_mqtt::handshakes::Place;

/// The seats of one listener.
#[derive(Default)]
pub(super) struct Seats(Mutex<HashMap<Option<Box<str>>, usize>>);

/// A seat, which drop gives back.
struct Taken {
    seats: Arc<Seats>,
    user: Option<Box<str>>,
}

impl Seats {
    /// Takes a seat for a user, or for an operator with the token or the socket. Those may do
    /// everything anyway, so they have no limit of their own.
    fn take(self: &Arc<Self>, user: Option<&str>) -> Result<Taken, &'static str> {
        let mut taken = self.lock();
        if taken.values().sum::<usize>() >= limits::ADMIN_OPERATORS_MAX {
            return Err("too many operators are connected: try again later");
        }
        let user: Option<Box<str>> = user.map(Into::into);
        let count = taken.entry(user.clone()).or_default();
        if user.is_some() && *count >= limits::ADMIN_USER_CONNECTIONS_MAX {
            return Err("this user has too many connections: close a page or end a command");
        }
        *count += 1;
        drop(taken);
        let seats = self.clone();
        Ok(Taken { seats, user })
    }

    /// Code under this lock does not panic.
    fn lock(&self) -> MutexGuard<'_, HashMap<Option<Box<str>>, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut taken = self.seats.lock();
        if let Some(count) = taken.get_mut(&self.user) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.user);
            }
        }
    }
}

/// The place and the seat of one connection.
pub(super) struct Seat {
    place: Place,
    seats: Arc<Seats>,
    taken: OnceLock<Taken>,
    /// The stream of events that this connection ends with, if one has begun.
    stream: OnceLock<OpenStream>,
    streaming: Notify,
}

impl Seat {
    pub(super) fn new(place: Place, seats: Arc<Seats>) -> Self {
        Self {
            place,
            seats,
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

    /// Takes a seat for an operator's request, or says why there is none.
    pub(super) fn take(&self, user: Option<&str>) -> Result<(), &'static str> {
        if self.taken.get().is_none() {
            // The requests of one connection are sequential, so no other one has set it meanwhile.
            _ = self.taken.set(self.seats.take(user)?);
        }
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_user_cannot_take_the_seats_of_others() {
        let seats = Arc::new(Seats::default());
        let take = |user, count| {
            let taken = (0..count).map_while(|_| seats.take(user).ok());
            taken.collect::<Vec<_>>()
        };
        let max = limits::ADMIN_USER_CONNECTIONS_MAX;
        let mut reader = take(Some("reader"), 100);
        assert_eq!(reader.len(), max);
        assert!(seats.take(Some("reader")).is_err());
        reader.pop();
        assert!(seats.take(Some("reader")).is_ok());
        let other = take(Some("other"), 100);
        let token = take(None, 100);
        assert_eq!(other.len(), max);
        let all = reader.len() + other.len() + token.len();
        assert_eq!(all, limits::ADMIN_OPERATORS_MAX);
        drop((reader, other, token));
        assert!(seats.lock().is_empty());
    }
}
