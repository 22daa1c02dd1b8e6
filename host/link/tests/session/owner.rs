//! An owner that passes everything to its test, and its messages.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use rumqttc::v5::mqttbytes::QoS;
use rumqttc::v5::mqttbytes::v5::{Filter, Publish, SubscribeReasonCode};
use statehouse_link::{Accepted, Arrival, End, Message, Outlet, Owner, Place, Verdict};
use tokio::sync::{Notify, mpsc};

/// A message that may expire, and that may have a shorter replacement.
#[derive(Debug, Clone)]
pub(crate) struct Note {
    pub(crate) payload: Bytes,
    pub(crate) expired: bool,
    pub(crate) shorter: bool,
}

pub(crate) fn note(payload: impl Into<Bytes>) -> Note {
    Note {
        payload: payload.into(),
        expired: false,
        shorter: false,
    }
}

impl Message for Note {
    fn publish(&self) -> Option<Publish> {
        let payload = self.payload.clone();
        (!self.expired).then(|| Publish::new("notes", QoS::AtLeastOnce, payload, None))
    }

    fn too_large(self, _bytes: usize, _bytes_max: usize) -> Option<Self> {
        self.shorter.then(|| note("too long"))
    }
}

/// An owner that passes everything to its test.
#[derive(Default)]
pub(crate) struct Tester {
    pub(crate) outlet: Mutex<Outlet<Note>>,
    pub(crate) stopping: Notify,
    pub(crate) subscribed: Notify,
    pub(crate) arrived: Option<mpsc::UnboundedSender<Arrival>>,
    /// The decisions about the next subscriptions.
    pub(crate) verdicts: Mutex<Vec<Verdict>>,
    /// Where the next connection goes, if it is another place than before.
    pub(crate) place: Mutex<Option<Place>>,
    pub(crate) accepted: Mutex<Option<Accepted>>,
    pub(crate) lost: Mutex<Vec<String>>,
    pub(crate) hopeless: Mutex<Vec<Bytes>>,
    /// The messages that the broker refused with a reason code that rumqttc does not know.
    pub(crate) unacceptable: Mutex<Vec<(Bytes, u8)>>,
    pub(crate) ended: Mutex<Option<End>>,
    /// Whether it takes back a session that another connection took over.
    pub(crate) takes_back: AtomicBool,
}

impl Owner for Tester {
    type Message = Note;

    fn with<R>(&self, work: impl FnOnce(&mut Outlet<Note>) -> R) -> R {
        work(&mut self.outlet.lock().unwrap())
    }

    fn stopping(&self) -> &Notify {
        &self.stopping
    }

    fn filters(&self) -> Vec<Filter> {
        vec![Filter::new("requests", QoS::AtLeastOnce)]
    }

    fn connected(self: &Arc<Self>, accepted: Accepted) {
        *self.accepted.lock().unwrap() = Some(accepted);
    }

    fn subscribed(&self, _granted: &[SubscribeReasonCode]) -> Verdict {
        self.subscribed.notify_one();
        self.verdicts.lock().unwrap().pop().unwrap_or(Verdict::GoOn)
    }

    fn arrived(&self, arrivals: &mut Vec<Arrival>) {
        for arrival in arrivals.drain(..) {
            if let Arrival::Acknowledged(number, _) = &arrival {
                self.with(|outlet| outlet.remove(*number));
            }
            self.arrived.as_ref().unwrap().send(arrival).unwrap();
        }
    }

    fn lost(&self, why: &str) -> bool {
        self.lost.lock().unwrap().push(why.to_owned());
        true
    }

    fn ends_when_taken_over(&self) -> bool {
        !self.takes_back.load(Relaxed)
    }

    fn hopeless(&self, message: Note, _why: &str) {
        self.hopeless.lock().unwrap().push(message.payload);
    }

    fn unacceptable(&self, message: Note, code: u8) {
        let mut unacceptable = self.unacceptable.lock().unwrap();
        unacceptable.push((message.payload, code));
    }

    fn place(&self) -> Option<Place> {
        self.place.lock().unwrap().clone()
    }

    fn ended(&self, end: End) {
        *self.ended.lock().unwrap() = Some(end);
    }
}
