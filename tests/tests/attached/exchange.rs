//! Injects a fault at a chosen packet of one exchange between store and broker.
//!
//! An exchange starts with the PUBLISH that delivers a request to the store, and ends with the
//! PUBACK of the store for it.

use std::sync::{Arc, Mutex};

use statehouse_tests::{Fate, Proxy, Way, packet::kind, proxy::Seen};

/// The packets of one exchange so far.
#[derive(Default)]
struct Progress {
    /// The connection of the latest delivery of the request, and its packet id there.
    request: Option<(usize, u16)>,
    /// All packets since the request, on all connections.
    packets: Vec<(Way, u8)>,
    /// The number of packets that did not pass.
    faults: usize,
    acknowledged: bool,
}

/// One exchange through a relay.
#[derive(Clone, Default)]
pub(crate) struct Exchange(Arc<Mutex<Progress>>);

impl Exchange {
    /// Waits for the request with this text in its payload. From that packet on, `fate_of` decides
    /// the fate of each packet by its number from 0.
    pub(crate) fn script(
        proxy: &Proxy,
        text: &str,
        mut fate_of: impl FnMut(usize) -> Fate + Send + 'static,
    ) -> Exchange {
        let exchange = Exchange::default();
        let (shared, text) = (exchange.clone(), text.as_bytes().to_vec());
        proxy.script(move |seen| {
            let mut progress = shared.0.lock().unwrap();
            if progress.acknowledged {
                return Fate::Pass;
            }
            if is_request(seen, &text) {
                let id = seen.packet.publish().packet_id;
                progress.request = Some((seen.connection, id));
            }
            let Some((connection, id)) = progress.request else {
                return Fate::Pass;
            };
            let fate = fate_of(progress.packets.len());
            progress.packets.push((seen.way, seen.packet.kind()));
            progress.faults += usize::from(fate != Fate::Pass);
            progress.acknowledged |= matches!(fate, Fate::Pass | Fate::CutAfter)
                && seen.connection == connection
                && seen.way == Way::ToBroker
                && seen.packet.kind() == kind::PUBACK
                && seen.packet.ack().packet_id == id;
            fate
        });
        exchange
    }

    /// The number of packets that did not pass.
    pub(crate) fn faults(&self) -> usize {
        self.0.lock().unwrap().faults
    }

    /// Whether the store has acknowledged the request.
    pub(crate) fn is_acknowledged(&self) -> bool {
        self.0.lock().unwrap().acknowledged
    }

    /// All packets since the request.
    pub(crate) fn packets(&self) -> Vec<(Way, u8)> {
        self.0.lock().unwrap().packets.clone()
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
