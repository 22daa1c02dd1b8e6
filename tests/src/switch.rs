//! A TCP switch: one address in front of several hosts, as a service of Kubernetes is. Each
//! connection goes to the next host that accepts it. For clients that know one address only.
//!
//! A switch can hold the bytes of one direction or of both, as a network does that drops packets:
//! TCP repeats them, so they arrive when the network is whole again.

use std::{
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

use crate::server;

/// A host on loopback that does not accept in this time is paused.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// A direction of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Toward {
    /// From the clients of the switch to its hosts.
    Hosts,
    /// From the hosts to the clients.
    Clients,
}

impl Toward {
    pub const BOTH: [Toward; 2] = [Toward::Hosts, Toward::Clients];
}

/// A running switch. Drop ends its listener. A connection ends with its client or its host.
pub struct Switch {
    address: SocketAddr,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    over: AtomicBool,
    holds_to_hosts: AtomicBool,
    holds_to_clients: AtomicBool,
}

impl State {
    fn holds(&self, toward: Toward) -> &AtomicBool {
        match toward {
            Toward::Hosts => &self.holds_to_hosts,
            Toward::Clients => &self.holds_to_clients,
        }
    }

    /// Waits while the switch holds one of these directions.
    fn wait(&self, directions: &[Toward]) {
        while directions.iter().any(|it| self.holds(*it).load(SeqCst)) && !self.over.load(SeqCst) {
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Switch {
    /// Starts a switch in front of these hosts.
    pub fn start(hosts: Vec<SocketAddr>) -> Switch {
        let listener = TcpListener::bind(server::own_address()).unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::<State>::default();
        let shared = state.clone();
        thread::spawn(move || {
            for (number, client) in listener.incoming().enumerate() {
                if shared.over.load(SeqCst) {
                    return;
                }
                let (hosts, state) = (hosts.clone(), shared.clone());
                // An error ends the connection, and the client opens another one.
                thread::spawn(move || {
                    client.and_then(|client| serve(&client, &hosts, number, &state))
                });
            }
        });
        Switch { address, state }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether to hold all bytes back. No connection ends, and connections are still accepted.
    pub fn stall(&self, stalls: bool) {
        for toward in Toward::BOTH {
            self.hold(toward, stalls);
        }
    }

    /// Whether to hold the bytes of one direction back, and the end of a connection in that
    /// direction. No connection can be established during that time, because that needs packets of
    /// both directions.
    pub fn hold(&self, toward: Toward, holds: bool) {
        self.state.holds(toward).store(holds, SeqCst);
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        self.state.over.store(true, SeqCst);
        // Wakes the listener.
        let _ = TcpStream::connect(self.address);
    }
}

/// Connects a client to the first host that accepts, beginning with the host of this number.
fn serve(
    client: &TcpStream,
    hosts: &[SocketAddr],
    number: usize,
    state: &Arc<State>,
) -> io::Result<()> {
    state.wait(&Toward::BOTH);
    let in_turn = (0..hosts.len()).map(|n| hosts[(number + n) % hosts.len()]);
    let mut accepted =
        in_turn.filter_map(|it| TcpStream::connect_timeout(&it, CONNECT_TIMEOUT).ok());
    let Some(host) = accepted.next() else {
        return Ok(());
    };
    client.set_nodelay(true)?;
    host.set_nodelay(true)?;
    let (from_host, to_client) = (host.try_clone()?, client.try_clone()?);
    let shared = state.clone();
    let back = thread::spawn(move || pass(&from_host, &to_client, Toward::Clients, &shared));
    pass(client, &host, Toward::Hosts, state);
    // A panic there would be one in the standard library.
    let _ = back.join();
    Ok(())
}

/// Passes bytes on until one side ends. Then ends both.
fn pass(mut from: &TcpStream, mut to: &TcpStream, toward: Toward, state: &State) {
    let mut bytes = [0; 16 * 1024];
    loop {
        let read = from.read(&mut bytes);
        // The end of the connection is a packet too.
        state.wait(&[toward]);
        let Ok(count @ 1..) = read else {
            break;
        };
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    // An error means that the socket has already ended.
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
