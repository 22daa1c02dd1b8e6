//! The points of an exchange at which something happens: counted from the PUBLISH that brings a request to the store, up
//! to the PUBACK with which the store takes leave of it.

use std::sync::{Arc, Mutex};

use statehouse_tests::{Fate, Proxy, Way, packet::kind, proxy::Seen};

/// What was seen of one exchange.
#[derive(Default)]
struct Progress {
    /// The connection over which the request came last, and its packet id there.
    request: Option<(usize, u16)>,
    /// What came since the request did, over whichever connection.
    came: Vec<(Way, u8)>,
    /// How often something other than passing became of it.
    strikes: usize,
    settled: bool,
}

/// One exchange through a proxy.
#[derive(Clone, Default)]
pub(crate) struct Exchange(Arc<Mutex<Progress>>);

impl Exchange {
    /// Watches for the request with this text in its payload. Of that packet and all behind it `strike` says what
    /// becomes of them, by their numbers from 0.
    pub(crate) fn arm(
        proxy: &Proxy,
        text: &str,
        mut strike: impl FnMut(usize) -> Fate + Send + 'static,
    ) -> Exchange {
        let exchange = Exchange::default();
        let (shared, text) = (exchange.clone(), text.as_bytes().to_vec());
        proxy.script(move |seen| {
            let mut progress = shared.0.lock().unwrap();
            if progress.settled {
                return Fate::Pass;
            }
            if is_request(seen, &text) {
                let id = seen.packet.publish().packet_id;
                progress.request = Some((seen.connection, id));
            }
            let Some((connection, id)) = progress.request else {
                return Fate::Pass;
            };
            let fate = strike(progress.came.len());
            progress.came.push((seen.way, seen.packet.kind()));
            progress.strikes += usize::from(fate != Fate::Pass);
            progress.settled |= matches!(fate, Fate::Pass | Fate::CutAfter)
                && seen.connection == connection
                && seen.way == Way::ToBroker
                && seen.packet.kind() == kind::PUBACK
                && seen.packet.ack().packet_id == id;
            fate
        });
        exchange
    }

    /// How often something happened.
    pub(crate) fn strikes(&self) -> usize {
        self.0.lock().unwrap().strikes
    }

    /// Whether the store has acknowledged the request.
    pub(crate) fn settled(&self) -> bool {
        self.0.lock().unwrap().settled
    }

    /// What came since the request did.
    pub(crate) fn came(&self) -> Vec<(Way, u8)> {
        self.0.lock().unwrap().came.clone()
    }
}

fn is_request(seen: &Seen, text: &[u8]) -> bool {
    seen.way == Way::FromBroker
        && seen.packet.kind() == kind::PUBLISH
        && seen
            .packet
            .body
            .windows(text.len())
            .any(|part| part == text)
}
