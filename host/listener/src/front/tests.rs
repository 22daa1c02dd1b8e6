//! Fronts with real sockets and a real broker.

mod client;
mod links;
mod passing;
mod refusals;

use std::net::{self, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use statehouse_mqtt::{
    Access, Attempt, Broker, Deciding, Identity, NoService, Options, Origin, Verdict,
};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use super::preface::{Answer, Key, Purpose, Request, send};
use super::{Front, FrontOptions, Role};
use crate::Listeners;
use statehouse_access::audit::Audit;
use statehouse_config::{Listen, ListenConfig, TlsFiles};

pub(super) const SECRET: [u8; 32] = [7; 32];

/// Longer than anything takes on a busy machine.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// Admits every client and records it.
#[derive(Default)]
pub(super) struct Clients(Mutex<Vec<(String, SocketAddr)>>);

impl Clients {
    pub(super) fn seen(&self) -> Vec<(String, SocketAddr)> {
        self.0.lock().unwrap().clone()
    }
}

impl Access for Clients {
    fn admit(&self, attempt: Attempt) -> Deciding {
        let client = (attempt.client.to_string(), attempt.door.peer);
        self.0.lock().unwrap().push(client);
        Box::pin(std::future::ready(Verdict::admit(Identity::anonymous())))
    }

    fn may_publish(&self, _: &Origin, _: &[u8]) -> bool {
        true
    }

    fn may_subscribe(&self, _: &Origin, _: &[u8]) -> bool {
        true
    }
}

/// A broker, and the clients that it saw.
pub(super) fn broker() -> (Broker, Arc<Clients>) {
    let clients = Arc::<Clients>::default();
    let options = Options {
        access: clients.clone(),
        ..Options::default()
    };
    (Broker::new(options, Arc::new(NoService)), clients)
}

/// The options of a host that always reaches the log.
pub(super) fn options(host: &str) -> FrontOptions {
    FrontOptions {
        host: host.parse().unwrap(),
        secret: SECRET,
        connections_max: Arc::new(|| 1000),
        suspect: Arc::new(|| {}),
        reaches_log: Arc::new(|| true),
        times: Arc::new(|| None),
        compare: Arc::new(|_| {}),
        links: Arc::default(),
    }
}

pub(super) struct Host {
    pub(super) name: &'static str,
    pub(super) role: watch::Sender<Role>,
    /// The cluster port.
    pub(super) port: SocketAddr,
    /// The addresses of its listeners.
    pub(super) listeners: Vec<Listen>,
    pub(super) audit: Arc<Audit>,
    suspicions: Arc<AtomicUsize>,
    tasks: Vec<JoinHandle<()>>,
}

impl Host {
    /// A host with a plain listener.
    pub(super) fn plain(name: &'static str) -> Self {
        Self::new(name, &["mqtt"], None, |_| {})
    }

    /// A host with listeners of these schemes that knows no leader.
    pub(super) fn new(
        name: &'static str,
        schemes: &[&str],
        tls: Option<TlsFiles>,
        adjust: impl FnOnce(&mut Front),
    ) -> Self {
        let listeners = schemes.iter();
        let listeners = listeners.map(|it| format!("{it}://127.0.0.1:0").parse().unwrap());
        let config = ListenConfig {
            listeners: listeners.collect(),
            tls,
            ws_origins: Vec::new(),
        };
        let (role, following) = watch::channel(Role::Waiting);
        let suspicions = Arc::<AtomicUsize>::default();
        let audit = Arc::<Audit>::default();
        let count = suspicions.clone();
        let options = FrontOptions {
            suspect: Arc::new(move || {
                count.fetch_add(1, Ordering::SeqCst);
            }),
            ..options(name)
        };
        let mut front = Front::new(following, audit.clone(), options);
        adjust(&mut front);
        let cluster_port = net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = cluster_port.local_addr().unwrap();
        let listeners = Listeners::bind(&config).unwrap();
        let mut opened = Arc::new(front).listen(listeners, cluster_port).unwrap();
        let last = &opened.last().unwrap().line;
        assert_eq!(*last, format!("accepting hosts of the cluster on {port}"));
        let lines = opened.iter().take(schemes.len());
        let listeners = lines.map(|it| it.line["listening on ".len()..].parse().unwrap());
        Self {
            name,
            role,
            port,
            listeners: listeners.collect(),
            audit,
            suspicions,
            tasks: opened
                .drain(..)
                .map(|it| tokio::spawn(it.accepting))
                .collect(),
        }
    }

    pub(super) fn lead(&self, broker: &Broker) {
        self.role.send_replace(Role::Leading(broker.clone()));
    }

    /// Leads with a broker of its own. Returns the clients that the broker saw.
    pub(super) fn lead_alone(&self) -> Arc<Clients> {
        let (broker, clients) = broker();
        self.lead(&broker);
        clients
    }

    pub(super) fn follow(&self, leader: &Self) {
        self.follow_at(leader.name, leader.port);
    }

    pub(super) fn follow_at(&self, leader: &str, address: SocketAddr) {
        self.role.send_replace(Role::Following {
            leader: leader.to_owned(),
            address: address.to_string(),
        });
    }

    /// A TCP connection to the first listener.
    pub(super) async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.listeners[0].address).await.unwrap()
    }

    pub(super) fn suspicions(&self) -> usize {
        self.suspicions.load(Ordering::SeqCst)
    }

    /// Refusals that the front counted.
    pub(super) fn refusals(&self) -> u64 {
        let counts = self.audit.counts().into_iter();
        counts
            .filter(|(what, _)| *what == "cluster")
            .map(|it| it.1)
            .sum()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

pub(super) async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        sleep(Duration::from_millis(5)).await;
    }
}

/// The result of a future that ends in time.
pub(super) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    timeout(PATIENCE, future).await.expect(what)
}

/// Connects to a cluster port as another host does, and returns the answer.
pub(super) async fn knock(port: SocketAddr, purpose: Purpose) -> (TcpStream, Answer) {
    let mut socket = TcpStream::connect(port).await.unwrap();
    let request = Request {
        host: "gw9".parse().unwrap(),
        purpose,
    };
    let answer = send(&mut socket, &Key::new(&SECRET), &request).await;
    (socket, answer.unwrap())
}

/// A network in front of a cluster port: its address, and the task that ends it. `forward` passes on
/// what the other hosts send.
pub(super) async fn network<F>(
    port: SocketAddr,
    forward: impl Fn(OwnedReadHalf, OwnedWriteHalf) -> F + Clone + Send + 'static,
) -> (SocketAddr, JoinHandle<()>)
where
    F: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let accepting = tokio::spawn(async move {
        loop {
            let (socket, _) = listener.accept().await.unwrap();
            let forward = forward.clone();
            tokio::spawn(async move {
                let next = TcpStream::connect(port).await.unwrap();
                let (from_host, mut to_host) = socket.into_split();
                let (mut from_leader, to_leader) = next.into_split();
                let forth = forward(from_host, to_leader);
                let back = tokio::io::copy(&mut from_leader, &mut to_host);
                _ = tokio::join!(back, forth);
            });
        }
    });
    (address, accepting)
}

/// An address at which no program listens.
pub(super) fn dead_address() -> SocketAddr {
    let listener = net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap()
}

/// Waits until the other side closes the connection, without more bytes.
pub(super) async fn is_closed(socket: &mut (impl tokio::io::AsyncRead + Unpin)) {
    use tokio::io::AsyncReadExt;
    let read = within("its end", socket.read(&mut [0])).await;
    assert!(!matches!(read, Ok(1..)), "a byte came");
}

/// The files of a certificate for localhost, the directory that holds them, and the certificate.
pub(super) fn certificate() -> (
    TlsFiles,
    tempfile::TempDir,
    rustls::pki_types::CertificateDer<'static>,
) {
    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: String| -> PathBuf {
        let path = directory.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let files = TlsFiles {
        certificate: write("certificate.pem", certified.cert.pem()),
        key: write("key.pem", certified.signing_key.serialize_pem()),
        client_ca: None,
        client_crls: Vec::new(),
        client_required: false,
    };
    (files, directory, certified.cert.der().clone())
}
