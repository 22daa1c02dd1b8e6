//! A TCP switch: one address in front of several hosts, as a service of Kubernetes is. Each
//! connection goes to the next host that accepts it. For clients that know one address only.
//!
//! A switch can stall, as a network does that drops all packets.

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

/// A running switch. Drop ends its listener. A connection ends with its client or its host.
pub struct Switch {
    address: SocketAddr,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    over: AtomicBool,
    stalls: AtomicBool,
}

impl State {
    /// Waits while the switch stalls.
    fn wait(&self) {
        while self.stalls.load(SeqCst) && !self.over.load(SeqCst) {
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

    /// The address for clients.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether to hold all bytes back. No connection ends, and connections are still accepted.
    pub fn stall(&self, stalls: bool) {
        self.state.stalls.store(stalls, SeqCst);
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
    state.wait();
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
    let back = thread::spawn(move || pass(&from_host, &to_client, &shared));
    pass(client, &host, state);
    // A panic there would be one in the standard library.
    let _ = back.join();
    Ok(())
}

/// Passes bytes on until one side ends. Then ends both.
fn pass(mut from: &TcpStream, mut to: &TcpStream, state: &State) {
    let mut bytes = [0; 16 * 1024];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        state.wait();
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    // An error means that the socket has already ended.
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
