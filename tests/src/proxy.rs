//! A relay of loopback in front of a broker that understands MQTT packets. What enters: the two sides' packets, and a
//! script that says of each what becomes of it. What leaves: the packets, or what is left of them. It changes none, and
//! it does nothing by chance: the same script gives the same faults.

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

/// Where a packet goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Way {
    /// From whoever connected.
    ToBroker,
    /// From the broker.
    FromBroker,
}

impl Way {
    /// The other one.
    #[must_use]
    pub fn back(self) -> Way {
        match self {
            Way::ToBroker => Way::FromBroker,
            Way::FromBroker => Way::ToBroker,
        }
    }
}

/// A packet that has arrived whole.
#[derive(Clone, Debug)]
pub struct Seen {
    /// The connection's number, from 0.
    pub connection: usize,
    /// Where it goes.
    pub way: Way,
    /// What it is.
    pub packet: Packet,
}

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It goes on.
    Pass,
    /// The connection ends before it.
    CutBefore,
    /// The connection ends behind its first half.
    CutWithin,
    /// The connection ends behind it.
    CutAfter,
    /// It waits for [`Proxy::release`]; others go on meanwhile.
    Hold,
    /// It goes on after this time, and whatever is behind it then too.
    Delay(Duration),
    /// From here on both sides of the connection send into nothing, and hear nothing: it is half open.
    Vanish,
}

/// A relay. Its connections end with it.
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
    /// 0 where there is no limit.
    bytes_per_second: AtomicU32,
}

#[derive(Default)]
struct State {
    connections: Vec<Arc<Connection>>,
    seen: Vec<Seen>,
    held: Vec<(Arc<Connection>, Way, Packet)>,
}

struct Connection {
    client: TcpStream,
    broker: TcpStream,
    /// Its packets go nowhere any more.
    over: AtomicBool,
}

impl Proxy {
    /// In front of the broker at this address.
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

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The same for `statehouse serve --broker`.
    pub fn url(&self) -> String {
        format!("mqtt://{}", self.address)
    }

    /// From now on this says what becomes of each packet. It is asked about one packet at a time, in the order they
    /// arrive; while it decides, nothing moves.
    pub fn script(&self, script: impl FnMut(&Seen) -> Fate + Send + 'static) {
        *self.shared.script.lock().unwrap() = Box::new(script);
    }

    /// From now on every packet passes.
    pub fn pass(&self) {
        self.script(|_| Fate::Pass);
    }

    /// Whether who connects is turned away at once.
    pub fn refuse(&self, refuses: bool) {
        self.shared.refuses.store(refuses, SeqCst);
    }

    /// Ends all connections.
    pub fn cut(&self) {
        for connection in &self.shared.state.lock().unwrap().connections {
            connection.end();
        }
    }

    /// Bytes per second and direction of each connection; none is as fast as it gets.
    pub fn limit(&self, bytes_per_second: Option<u32>) {
        let limit = bytes_per_second.unwrap_or(0);
        self.shared.bytes_per_second.store(limit, SeqCst);
    }

    /// Lets the held packets go, in the order that `order` brings them into.
    pub fn release(&self, order: impl FnOnce(&mut Vec<(Way, Packet)>)) {
        let held = std::mem::take(&mut self.shared.state.lock().unwrap().held);
        let Some((connection, ..)) = held.last() else {
            return;
        };
        let connection = connection.clone();
        let mut packets = held
            .into_iter()
            .filter(|(of, ..)| Arc::ptr_eq(of, &connection))
            .map(|(_, way, packet)| (way, packet))
            .collect();
        order(&mut packets);
        for (way, packet) in packets {
            connection.write(way, &packet.bytes());
        }
    }

    /// How many packets are held.
    pub fn held(&self) -> usize {
        self.shared.state.lock().unwrap().held.len()
    }

    /// All packets that came so far, in their order.
    pub fn seen(&self) -> Vec<Seen> {
        self.shared.state.lock().unwrap().seen.clone()
    }

    /// How many connections were made so far.
    pub fn connections(&self) -> usize {
        self.shared.state.lock().unwrap().connections.len()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.over.store(true, SeqCst);
        self.cut();
        // Wakes whoever accepts.
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
            // Where the broker is not there, this one is not either.
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
                thread::spawn(move || shared.carry(number, &connection, way));
            }
        }
    }

    /// Carries one direction of a connection up to its end.
    fn carry(&self, number: usize, connection: &Arc<Connection>, way: Way) {
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
                self.meet(connection, seen);
            }
        }
        // One that is half open stays so.
        if !connection.over.load(SeqCst) {
            connection.end();
        }
    }

    /// What the script says of a packet is done.
    fn meet(&self, connection: &Arc<Connection>, seen: Seen) {
        let mut script = self.script.lock().unwrap();
        if connection.over.load(SeqCst) {
            return;
        }
        let (way, bytes) = (seen.way, seen.packet.bytes());
        self.state.lock().unwrap().seen.push(seen.clone());
        match script(&seen) {
            Fate::Pass => {
                // The other direction may go on.
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
                let held = (connection.clone(), way, seen.packet);
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
    /// Where a direction comes from, and where it goes.
    fn ends(&self, way: Way) -> (&TcpStream, &TcpStream) {
        match way {
            Way::ToBroker => (&self.client, &self.broker),
            Way::FromBroker => (&self.broker, &self.client),
        }
    }

    /// The other side may be gone; then nobody misses it.
    fn write(&self, way: Way, bytes: &[u8]) {
        let (_, mut to) = self.ends(way);
        let _ = to.write_all(bytes);
    }

    /// What was written before arrives. It may have ended already.
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

    /// A client behind the proxy that hears what a client in front of it says.
    fn listening(proxy: &Proxy) -> Client {
        listening_as(proxy, "listener")
    }

    fn listening_as(proxy: &Proxy, id: &str) -> Client {
        let mut client = Client::connect(proxy.address(), &Connect::resume(id, 3600));
        assert_eq!(client.subscribe("a", 1), 1);
        client
    }

    fn say(broker: &Mosquitto, count: u8) {
        let mut speaker = broker.connect("speaker");
        for n in 0..count {
            assert_eq!(speaker.publish(Publish::new("a", [n]).qos(1)).reason, 0);
        }
    }

    /// Does this to the PUBLISH of this number, counted from 0.
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

    fn heard(client: &mut Client) -> Vec<u8> {
        let mut heard = Vec::new();
        while let Heard::Packet(packet) = client.poll(Duration::from_secs(5)) {
            heard.extend(packet.publish().payload);
        }
        heard
    }

    #[test]
    fn a_cut_is_before_within_or_behind_its_packet() {
        let broker = Mosquitto::start();
        for (fate, expected) in [
            (Fate::CutBefore, &[0][..]),
            (Fate::CutWithin, &[0]),
            (Fate::CutAfter, &[0, 1]),
        ] {
            let proxy = Proxy::start(broker.address());
            let mut client = listening_as(&proxy, &format!("{fate:?}"));
            proxy.script(at(1, fate));
            say(&broker, 3);
            assert_eq!(heard(&mut client), expected, "{fate:?}");
        }
    }

    #[test]
    fn held_packets_go_in_the_order_asked_for() {
        let broker = Mosquitto::start();
        let proxy = Proxy::start(broker.address());
        let mut client = listening(&proxy);
        proxy.script(|seen| match seen.packet.kind() {
            kind::PUBLISH => Fate::Hold,
            _ => Fate::Pass,
        });
        say(&broker, 3);
        while proxy.held() < 3 {
            thread::yield_now();
        }
        // Others pass them by.
        client.ping();
        client.expect_nothing();
        proxy.release(|packets| packets.reverse());
        let order: Vec<u8> = (0..3)
            .flat_map(|_| client.next().publish().payload)
            .collect();
        assert_eq!(order, [2, 1, 0]);
    }

    #[test]
    fn a_vanished_connection_is_silent_and_stays() {
        let broker = Mosquitto::start();
        let proxy = Proxy::start(broker.address());
        let mut client = listening(&proxy);
        proxy.script(at(1, Fate::Vanish));
        say(&broker, 3);
        assert_eq!(client.next().publish().payload, [0]);
        client.send(&crate::packet::PINGREQ);
        let heard = client.poll(Duration::from_millis(300));
        assert!(matches!(heard, Heard::Silence), "{heard:?}");
        assert!(
            !broker
                .log()
                .iter()
                .any(|line| line.contains("Client listener closed")),
            "the broker was told"
        );
        // Who comes anew is served.
        proxy.pass();
        assert!(listening(&proxy).session_present());
    }

    #[test]
    fn a_limit_and_a_delay_take_their_time() {
        let broker = Mosquitto::start();
        let proxy = Proxy::start(broker.address());
        let mut client = listening(&proxy);
        proxy.script(at(0, Fate::Delay(Duration::from_millis(300))));
        let began = Instant::now();
        say(&broker, 1);
        client.next();
        assert!(began.elapsed() >= Duration::from_millis(300));
        proxy.limit(Some(1000));
        let began = Instant::now();
        broker
            .connect("speaker")
            .publish(Publish::new("a", [0; 500]).qos(1));
        client.next();
        assert!(began.elapsed() >= Duration::from_millis(400));
    }

    #[test]
    fn who_is_refused_may_come_back() {
        let broker = Mosquitto::start();
        let proxy = Proxy::start(broker.address());
        let mut client = listening(&proxy);
        proxy.refuse(true);
        proxy.cut();
        client.expect_closed();
        assert!(Client::attempt(proxy.address(), &Connect::new("listener")).is_none());
        proxy.refuse(false);
        assert!(listening(&proxy).session_present());
        assert_eq!(proxy.connections(), 2);
    }
}
