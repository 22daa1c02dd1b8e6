//! A loopback proxy in front of a broker that injects faults at packet boundaries: for each packet,
//! a script decides whether to pass, delay, hold or drop it, or to cut the connection.
//!
//! The proxy never changes the bytes of a packet, and must be deterministic: the same script
//! injects the same faults.

use std::{
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

use crate::{packet::Packet, server};

/// The direction of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// From the client to the broker.
    ToBroker,
    /// From the broker to the client.
    FromBroker,
}

impl Way {
    #[must_use]
    pub fn back(self) -> Way {
        match self {
            Way::ToBroker => Way::FromBroker,
            Way::FromBroker => Way::ToBroker,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Seen {
    /// The connection's number, counted from 0.
    pub connection: usize,
    pub way: Way,
    pub packet: Packet,
}

/// What the proxy does with a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Forward the packet.
    Pass,
    /// End the connection before the packet.
    CutBefore,
    /// End the connection after the first half of the packet.
    CutWithin,
    /// End the connection after the packet.
    CutAfter,
    /// Hold the packet until [`Proxy::release`]. Other packets pass.
    Hold,
    /// Forward the packet after this time. Later packets in its direction wait, too.
    Delay(Duration),
    /// Drop this and all later packets of the connection in both directions, without ending it: a
    /// half-open connection.
    Vanish,
}

/// A running proxy. Drop ends its connections.
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

type Script = Box<dyn FnMut(&Seen) -> Fate + Send>;

struct Shared {
    broker: SocketAddr,
    script: Mutex<Script>,
    state: Mutex<State>,
    refuses: AtomicBool,
    over: AtomicBool,
    /// 0 means no limit.
    bytes_per_second: AtomicU32,
}

#[derive(Default)]
struct State {
    connections: Vec<Arc<Connection>>,
    seen: Vec<Seen>,
    held: Vec<Held>,
}

/// A packet that waits for [`Proxy::release`].
pub struct Held {
    connection: Arc<Connection>,
    way: Way,
    bytes: Vec<u8>,
}

struct Connection {
    client: TcpStream,
    broker: TcpStream,
    /// Whether all further packets are dropped.
    over: AtomicBool,
}

impl Proxy {
    /// Starts a proxy in front of the broker at this address.
    pub fn start(broker: SocketAddr) -> Proxy {
        let listener = TcpListener::bind(server::own_address()).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            broker,
            script: Mutex::new(Box::new(|_| Fate::Pass)),
            state: Mutex::default(),
            refuses: AtomicBool::new(false),
            over: AtomicBool::new(false),
            bytes_per_second: AtomicU32::new(0),
        });
        let accepting = shared.clone();
        thread::spawn(move || accepting.accept(&listener));
        Proxy { address, shared }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The URL for `statehouse serve --broker`.
    pub fn url(&self) -> String {
        format!("mqtt://{}", self.address)
    }

    /// From now on, `script` decides about each packet. It is called with one packet at a time, in
    /// the order of arrival. No packet moves during a call.
    pub fn script(&self, script: impl FnMut(&Seen) -> Fate + Send + 'static) {
        *self.shared.script.lock().unwrap() = Box::new(script);
    }

    /// From now on, forward every packet.
    pub fn pass(&self) {
        self.script(|_| Fate::Pass);
    }

    /// Whether to close each new connection at once.
    pub fn refuse(&self, refuses: bool) {
        self.shared.refuses.store(refuses, SeqCst);
    }

    /// Ends all connections.
    pub fn cut(&self) {
        for connection in &self.shared.state.lock().unwrap().connections {
            connection.end();
        }
    }

    /// Limits the bytes per second in each direction of each connection. `None` removes the limit.
    pub fn limit(&self, bytes_per_second: Option<u32>) {
        let limit = bytes_per_second.unwrap_or(0);
        self.shared.bytes_per_second.store(limit, SeqCst);
    }

    /// Forwards the held packets of all connections that have not ended, after `order` has
    /// reordered them.
    pub fn release(&self, order: impl FnOnce(&mut Vec<Held>)) {
        let mut held = std::mem::take(&mut self.shared.state.lock().unwrap().held);
        order(&mut held);
        for Held {
            connection,
            way,
            bytes,
        } in held
        {
            connection.write(way, &bytes);
        }
    }

    pub fn held(&self) -> usize {
        self.shared.state.lock().unwrap().held.len()
    }

    /// All packets so far, in the order of arrival.
    pub fn seen(&self) -> Vec<Seen> {
        self.shared.state.lock().unwrap().seen.clone()
    }

    pub fn connections(&self) -> usize {
        self.shared.state.lock().unwrap().connections.len()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.over.store(true, SeqCst);
        self.cut();
        // Wakes the accepting thread.
        let _ = TcpStream::connect(self.address);
    }
}

impl Shared {
    fn accept(self: Arc<Self>, listener: &TcpListener) {
        while let Ok((client, _)) = listener.accept() {
            if self.over.load(SeqCst) {
                return;
            }
            if self.refuses.load(SeqCst) {
                continue;
            }
            // If the broker is down, the proxy closes the connection.
            let Ok(broker) = TcpStream::connect(self.broker) else {
                continue;
            };
            client.set_nodelay(true).unwrap();
            broker.set_nodelay(true).unwrap();
            let connection = Arc::new(Connection {
                client,
                broker,
                over: AtomicBool::new(false),
            });
            let mut state = self.state.lock().unwrap();
            let number = state.connections.len();
            state.connections.push(connection.clone());
            drop(state);
            for way in [Way::ToBroker, Way::FromBroker] {
                let (shared, connection) = (self.clone(), connection.clone());
                thread::spawn(move || shared.forward(number, &connection, way));
            }
        }
    }

    /// Forwards one direction of a connection until it ends.
    fn forward(&self, number: usize, connection: &Arc<Connection>, way: Way) {
        let (mut from, _) = connection.ends(way);
        let mut read = Vec::new();
        let mut chunk = [0; 16 * 1024];
        while let Ok(count @ 1..) = from.read(&mut chunk) {
            read.extend_from_slice(&chunk[..count]);
            while let Some(packet) = Packet::cut(&mut read) {
                let seen = Seen {
                    connection: number,
                    way,
                    packet,
                };
                self.handle(connection, seen);
            }
        }
        // A half-open connection stays open.
        if !connection.over.load(SeqCst) {
            connection.end();
        }
    }

    /// Asks the script about a packet, and does what it returns.
    fn handle(&self, connection: &Arc<Connection>, seen: Seen) {
        let mut script = self.script.lock().unwrap();
        if connection.over.load(SeqCst) {
            return;
        }
        let (way, bytes) = (seen.way, seen.packet.bytes());
        self.state.lock().unwrap().seen.push(seen.clone());
        match script(&seen) {
            Fate::Pass => {
                // Releases the lock, so that the other direction can proceed.
                drop(script);
                self.pass(connection, way, &bytes);
            }
            Fate::CutBefore => connection.end(),
            Fate::CutWithin => {
                connection.write(way, &bytes[..bytes.len() / 2]);
                connection.end();
            }
            Fate::CutAfter => {
                connection.write(way, &bytes);
                connection.end();
            }
            Fate::Hold => {
                let connection = connection.clone();
                let held = Held {
                    connection,
                    way,
                    bytes,
                };
                self.state.lock().unwrap().held.push(held);
            }
            Fate::Delay(time) => {
                drop(script);
                thread::sleep(time);
                self.pass(connection, way, &bytes);
            }
            Fate::Vanish => connection.over.store(true, SeqCst),
        }
    }

    fn pass(&self, connection: &Connection, way: Way, bytes: &[u8]) {
        let limit = self.bytes_per_second.load(SeqCst);
        if limit == 0 {
            return connection.write(way, bytes);
        }
        for piece in bytes.chunks(64) {
            connection.write(way, piece);
            thread::sleep(Duration::from_secs_f64(
                piece.len() as f64 / f64::from(limit),
            ));
        }
    }
}

impl Connection {
    /// The source and the destination of a direction.
    fn ends(&self, way: Way) -> (&TcpStream, &TcpStream) {
        match way {
            Way::ToBroker => (&self.client, &self.broker),
            Way::FromBroker => (&self.broker, &self.client),
        }
    }

    /// Writes to the destination. Ignores the error if the destination has closed.
    fn write(&self, way: Way, bytes: &[u8]) {
        let (_, mut to) = self.ends(way);
        let _ = to.write_all(bytes);
    }

    /// Ends the connection. Bytes that were written before still arrive.
    fn end(&self) {
        self.over.store(true, SeqCst);
        let _ = self.client.shutdown(Shutdown::Both);
        let _ = self.broker.shutdown(Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::{
        Mosquitto,
        client::{Client, Heard},
        connect::Connect,
        packet::{Publish, kind},
    };

    /// Connects a client through the proxy, with a subscription to `a`.
    fn subscriber(proxy: &Proxy) -> Client {
        subscriber_as(proxy, "listener")
    }

    fn subscriber_as(proxy: &Proxy, id: &str) -> Client {
        let mut client = Client::connect(proxy.address(), &Connect::resume(id, 3600));
        assert_eq!(client.subscribe("a", 1), 1);
        client
    }

    fn publish(broker: &Mosquitto, count: u8) {
        let mut publisher = broker.connect("publisher");
        for n in 0..count {
            assert_eq!(publisher.publish(Publish::new("a", [n]).qos(1)).reason, 0);
        }
    }

    /// A script that applies `fate` to the PUBLISH with this number, counted from 0.
    fn at(number: usize, fate: Fate) -> impl FnMut(&Seen) -> Fate {
        let mut count = 0;
        move |seen| {
            if seen.packet.kind() != kind::PUBLISH {
                return Fate::Pass;
            }
            count += 1;
            if count == number + 1 {
                fate
            } else {
                Fate::Pass
            }
        }
    }

    fn received(client: &mut Client) -> Vec<u8> {
        let mut payloads = Vec::new();
        while let Heard::Packet(packet) = client.poll(Duration::from_secs(5)) {
            payloads.extend(packet.publish().payload);
        }
        payloads
    }

    #[test]
    fn cut_is_before_within_or_after_its_packet() {
        let broker = Mosquitto::start();
        for (fate, expected) in [
            (Fate::CutBefore, &[0][..]),
            (Fate::CutWithin, &[0]),
            (Fate::CutAfter, &[0, 1]),
        ] {
            let proxy = Proxy::start(broker.address());
            let mut client = subscriber_as(&proxy, &format!("{fate:?}"));
            proxy.script(at(1, fate));
            publish(&broker, 3);
            assert_eq!(received(&mut client), expected, "{fate:?}");
        }
    }

    #[test]
    fn held_packets_are_released_in_the_given_order() {
        let broker = Mosquitto::start();
        let proxy = Proxy::start(broker.address());
        let mut clients = ["one", "two"].map(|id| subscriber_as(&proxy, id));
        proxy.script(|seen| match seen.packet.kind() {
            kind::PUBLISH => Fate::Hold,
            _ => Fate::Pass,
        });
        publish(&broker, 3);
        while proxy.held() < 6 {
            thread::yield_now();
        }
        // Other packets pass.
        for client in &mut clients {
            client.expect_nothing();
        }
        proxy.release(|packets| packets.reverse());
        for client in &mut clients {
            let order = [0; 3].map(|_| client.next().publish().payload[0]);
            assert_eq!(order, [2, 1, 0]);
        }
    }

    #[test]
    fn vanished_connection_stays_half_open() {
        let broker = Mosquitto::start();
        let proxy = Proxy::start(broker.address());
        let mut client = subscriber(&proxy);
        proxy.script(at(1, Fate::Vanish));
        publish(&broker, 3);
        assert_eq!(client.next().publish().payload, [0]);
        client.send(&crate::packet::PINGREQ);
        let polled = client.poll(Duration::from_millis(300));
        assert!(matches!(polled, Heard::Silence), "{polled:?}");
        assert!(
            !broker
                .log()
                .iter()
                .any(|line| line.contains("Client listener closed")),
            "the broker closed the connection"
        );
        // A new connection works.
        proxy.pass();
        assert!(subscriber(&proxy).session_present());
    }

    #[test]
    fn delay_and_limit_slow_packets_down() {
        let broker = Mosquitto::start();
        let proxy = Proxy::start(broker.address());
        let mut client = subscriber(&proxy);
        proxy.script(at(0, Fate::Delay(Duration::from_millis(300))));
        let began = Instant::now();
        publish(&broker, 1);
        client.next();
        assert!(began.elapsed() >= Duration::from_millis(300));
        proxy.limit(Some(1000));
        let began = Instant::now();
        broker
            .connect("publisher")
            .publish(Publish::new("a", [0; 500]).qos(1));
        client.next();
        assert!(began.elapsed() >= Duration::from_millis(400));
    }

    #[test]
    fn refused_client_can_reconnect_later() {
        let broker = Mosquitto::start();
        let proxy = Proxy::start(broker.address());
        let mut client = subscriber(&proxy);
        proxy.refuse(true);
        proxy.cut();
        client.expect_closed();
        assert!(Client::attempt(proxy.address(), &Connect::new("listener")).is_none());
        proxy.refuse(false);
        assert!(subscriber(&proxy).session_present());
        assert_eq!(proxy.connections(), 2);
    }
}
