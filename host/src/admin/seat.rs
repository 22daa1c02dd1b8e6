//! Limits the connections of the admin API.
//!
//! A connection without a request holds one of many places, and loses it to newer connections. A
//! connection that has logged in takes one of a few operator seats and keeps it. One user has only
//! a part of them, and so has one network where no client logs in. Probes need no seat, so neither
//! slow connections nor operators can block `/livez`.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use tokio::sync::Notify;
use tokio::time::timeout;

use super::stream::OpenStream;
use statehouse_config::limits;
use statehouse_mqtt::handshakes::Place;

/// What the seat of a connection counts for.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(super) enum Holder {
    /// An operator with the token or at the socket. Those may do everything anyway, so they have no
    /// limit of their own.
    Owner,
    /// A user.
    User(Box<str>),
    /// The [`network`](statehouse_mqtt::network) of clients that need no login.
    Network(IpAddr),
}

impl Holder {
    /// Why it gets no seat if all are taken.
    fn full(&self) -> &'static str {
        match self {
            Self::Owner | Self::User(_) => "too many operators are connected: try again later",
            Self::Network(_) => "too many connections read this address: try again later",
        }
    }

    /// Why it gets no further seat; none if it may have all of them.
    fn refusal(&self) -> Option<&'static str> {
        match self {
            Self::Owner => None,
            Self::User(_) => {
                Some("this user has too many connections: close a page or end a command")
            }
            Self::Network(_) => Some("this address has too many connections: close one of them"),
        }
    }
}

/// The seats of one listener.
#[derive(Default)]
pub(super) struct Seats(Mutex<HashMap<Holder, usize>>);

/// A seat, which drop gives back.
struct Taken {
    seats: Arc<Seats>,
    holder: Holder,
}

impl Seats {
    /// Takes a seat, or says why there is none.
    fn take(self: &Arc<Self>, holder: Holder) -> Result<Taken, &'static str> {
        let mut taken = self.lock();
        if taken.values().sum::<usize>() >= limits::ADMIN_OPERATORS_MAX {
            return Err(holder.full());
        }
        let count = taken.entry(holder.clone()).or_default();
        if *count >= limits::ADMIN_USER_CONNECTIONS_MAX
            && let Some(text) = holder.refusal()
        {
            return Err(text);
        }
        *count += 1;
        drop(taken);
        let seats = self.clone();
        Ok(Taken { seats, holder })
    }

    /// Code under this lock does not panic.
    fn lock(&self) -> MutexGuard<'_, HashMap<Holder, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut taken = self.seats.lock();
        if let Some(count) = taken.get_mut(&self.holder) {
            *count -= 1;
            if *count == 0 {
                taken.remove(&self.holder);
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
    pub(super) fn take(&self, holder: impl FnOnce() -> Holder) -> Result<(), &'static str> {
        if self.taken.get().is_none() {
            // The requests of one connection are sequential, so no other one has set it meanwhile.
            _ = self.taken.set(self.seats.take(holder())?);
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

    /// Waits until the connection must end, whatever it does: after its last request has had the
    /// time for an answer. A stream has a time limit of its own.
    pub(super) async fn expired(&self) {
        let limit = limits::ADMIN_CONNECTION_TIMEOUT + limits::ADMIN_ANSWER_TIMEOUT;
        let streaming = timeout(limit, self.streaming.notified());
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
    fn one_user_or_network_cannot_take_the_seats_of_others() {
        let seats = Arc::new(Seats::default());
        let take = |holder: &Holder| {
            let taken = (0..100).map_while(|_| seats.take(holder.clone()).ok());
            taken.collect::<Vec<_>>()
        };
        let max = limits::ADMIN_USER_CONNECTIONS_MAX;
        let reader = Holder::User("reader".into());
        let mut of_reader = take(&reader);
        assert_eq!(of_reader.len(), max);
        assert!(seats.take(reader.clone()).is_err());
        of_reader.pop();
        assert!(seats.take(reader).is_ok());
        let of_other = take(&Holder::User("other".into()));
        let of_network = take(&Holder::Network(IpAddr::from([192, 0, 2, 1])));
        assert_eq!((of_other.len(), of_network.len()), (max, max));
        let of_owner = take(&Holder::Owner);
        let all = of_reader.len() + of_other.len() + of_network.len() + of_owner.len();
        assert_eq!(all, limits::ADMIN_OPERATORS_MAX);
        let refusal = |holder: Holder| seats.take(holder).err();
        assert_eq!(
            refusal(Holder::Owner),
            Some("too many operators are connected: try again later")
        );
        assert_eq!(
            refusal(Holder::Network(IpAddr::from([192, 0, 2, 2]))),
            Some("too many connections read this address: try again later")
        );
        drop((of_reader, of_other, of_network, of_owner));
        assert!(seats.lock().is_empty());
    }
}
