//! Runs checks at the same time against one broker. A check may restart the broker: it waits until
//! every other check has ended or waits, too.

use std::{
    fs,
    net::SocketAddr,
    path::Path,
    process::Command,
    sync::{Condvar, Mutex},
    thread,
};

use statehouse_tests::{
    Client, Client3, Connect, Mosquitto, Publish, Server, binary, mosquitto::PERSISTENT,
    server::own_address,
};

/// The certificate of the TLS listener, in the directory of the broker.
pub(crate) const CERTIFICATE: &str = "tls.crt";

/// One check of the conformance table.
pub(crate) struct Check {
    /// Module and function.
    pub(crate) name: &'static str,
    pub(crate) run: fn(&Scene<'_>),
    /// Whether Mosquitto passes the check. If not, the table says why.
    pub(crate) mosquitto: bool,
}

/// A list of checks. Those behind `not mosquitto:` do not run against Mosquitto.
macro_rules! checks {
    (not mosquitto: $($other:ident),* $(,)?) => {
        pub(crate) const CHECKS: &[crate::scene::Check] = &[
            $(crate::scene::check!($other, false),)*
        ];
    };
    ($($name:ident),* $(,)? $(; not mosquitto: $($other:ident),* $(,)?)?) => {
        pub(crate) const CHECKS: &[crate::scene::Check] = &[
            $(crate::scene::check!($name, true),)*
            $($(crate::scene::check!($other, false),)*)?
        ];
    };
}

macro_rules! check {
    ($name:ident, $mosquitto:expr) => {
        crate::scene::Check {
            name: concat!(module_path!(), "::", stringify!($name)),
            run: $name,
            mosquitto: $mosquitto,
        }
    };
}

pub(crate) use {check, checks};

impl Check {
    /// The name without the test program: `module::function`.
    pub(crate) fn short_name(&self) -> &'static str {
        self.name.split_once("::").unwrap().1
    }
}

/// The broker under test.
pub(crate) enum Broker {
    Statehouse(Box<Server>),
    Mosquitto(Mosquitto),
}

/// Where a broker listens.
pub(crate) struct Addresses {
    pub(crate) plain: SocketAddr,
    pub(crate) websocket: SocketAddr,
    pub(crate) tls: SocketAddr,
    pub(crate) secure_websocket: SocketAddr,
}

impl Addresses {
    /// Those of a broker that listens at this address only.
    pub(crate) fn only(plain: SocketAddr) -> Addresses {
        Addresses {
            plain,
            websocket: plain,
            tls: plain,
            secure_websocket: plain,
        }
    }
}

impl Broker {
    fn restart(&mut self) {
        match self {
            Broker::Statehouse(server) => {
                server.kill_and_restart();
            }
            // Mosquitto writes its sessions at the end.
            Broker::Mosquitto(broker) => {
                broker.stop();
                broker.restart();
            }
        }
    }
}

/// Starts a broker with its files in this directory.
pub(crate) type Start = fn(&Path) -> (Broker, Addresses);

/// Writes a certificate for the TLS listener, and its key. Returns their paths.
fn certificate(directory: &Path) -> [String; 2] {
    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let files = [
        (CERTIFICATE, certified.cert.pem()),
        ("tls.key", certified.signing_key.serialize_pem()),
    ];
    files.map(|(name, text)| {
        let path = directory.join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    })
}

/// Starts Statehouse with a listener of each kind.
pub(crate) fn statehouse(directory: &Path) -> (Broker, Addresses) {
    let [certificate, key] = certificate(directory);
    let [plain, websocket, tls, secure_websocket] = [(); 4].map(|()| own_address());
    let mut command = Command::new(binary::statehouse());
    command.args(["serve", "--tls-cert", &certificate, "--tls-key", &key]);
    for (scheme, at) in [
        ("mqtt", plain),
        ("ws", websocket),
        ("mqtts", tls),
        ("wss", secure_websocket),
    ] {
        command.args(["--listen", &format!("{scheme}://{at}")]);
    }
    let server = Server::spawn(command, tempfile::tempdir().unwrap());
    let at = Addresses {
        plain,
        websocket,
        tls,
        secure_websocket,
    };
    (Broker::Statehouse(Box::new(server)), at)
}

/// Starts Mosquitto with a listener of each kind.
pub(crate) fn mosquitto(directory: &Path) -> (Broker, Addresses) {
    let [certificate, key] = certificate(directory);
    let [websocket, tls, secure_websocket] = [(); 3].map(|()| own_address());
    let listener = |it: SocketAddr| format!("listener {} {}", it.port(), it.ip());
    let files = format!("certfile {certificate}\nkeyfile {key}");
    let lines = [
        format!("{}\nprotocol websockets", listener(websocket)),
        format!("{}\n{files}", listener(tls)),
        format!(
            "{}\nprotocol websockets\n{files}",
            listener(secure_websocket)
        ),
    ];
    let broker =
        Mosquitto::set_up(|_, _| format!("{}\n{}", PERSISTENT.join("\n"), lines.join("\n")));
    let at = Addresses {
        plain: broker.address(),
        websocket,
        tls,
        secure_websocket,
    };
    (Broker::Mosquitto(broker), at)
}

/// What a check works with. Its client ids and topics are its own.
pub(crate) struct Scene<'a> {
    pub(crate) name: &'static str,
    pub(crate) at: &'a Addresses,
    /// Where checks may create files.
    pub(crate) directory: &'a Path,
    restart: &'a Restart,
}

impl Scene<'_> {
    /// A client id of this check.
    pub(crate) fn id(&self, who: &str) -> String {
        format!("{}-{who}", self.name)
    }

    /// A topic or filter of this check.
    pub(crate) fn topic(&self, rest: &str) -> String {
        format!("{}/{rest}", self.name)
    }

    /// Opens a TCP connection without sending a CONNECT.
    pub(crate) fn open(&self) -> Client3 {
        Client3::open(self.at.plain)
    }

    /// A CONNECT with a clean session.
    pub(crate) fn clean(&self, who: &str) -> Connect {
        Connect::new(&self.id(who))
    }

    /// A CONNECT that keeps the session.
    pub(crate) fn lasting(&self, who: &str) -> Connect {
        Connect {
            clean_start: false,
            ..self.clean(who)
        }
    }

    /// Connects. The broker must accept the CONNECT.
    pub(crate) fn accept(&self, connect: &Connect) -> Client3 {
        Client3::connect(self.at.plain, connect)
    }

    /// Connects with a clean session.
    pub(crate) fn connect(&self, who: &str) -> Client3 {
        self.accept(&self.clean(who))
    }

    /// Connects with a session that outlives the connection, and resumes it.
    pub(crate) fn resume(&self, who: &str) -> Client3 {
        self.accept(&self.lasting(who))
    }

    /// Resumes a session. The client acknowledges no message.
    pub(crate) fn silent(&self, who: &str) -> Client3 {
        let mut client = self.resume(who);
        client.acknowledges = false;
        client
    }

    /// Publishes a message at QoS 1, over a connection of its own.
    pub(crate) fn publish(&self, topic: &str, payload: &str) {
        let mut publisher = self.connect("publisher");
        publisher.publish(Publish::new(topic, payload).qos(1));
        publisher.disconnect();
    }

    /// Connects a client of MQTT 5 with a clean session.
    pub(crate) fn connect5(&self, who: &str) -> Client {
        Client::connect(self.at.plain, &self.clean(who))
    }

    /// Connects a client, which has subscribed at this QoS to all topics of the check.
    pub(crate) fn subscriber(&self, who: &str, qos: u8) -> Client3 {
        let mut client = self.connect(who);
        assert_eq!(client.subscribe(&self.topic("#"), qos), qos);
        client
    }

    /// Kills the broker and starts it again.
    pub(crate) fn restart(&self) {
        let mut state = self.restart.state.lock().unwrap();
        state.waiting += 1;
        self.restart.changed.notify_all();
        let done = self.restart.changed.wait_while(state, |it| !it.done);
        drop(done.unwrap());
    }
}

/// The restart of the broker, which all checks share.
#[derive(Default)]
struct Restart {
    state: Mutex<Progress>,
    changed: Condvar,
}

struct End<'a>(&'a Restart);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.state.lock().unwrap().ended += 1;
        self.0.changed.notify_all();
    }
}

#[derive(Default)]
struct Progress {
    waiting: usize,
    ended: usize,
    done: bool,
}

impl Restart {
    /// Counts the end of a check, also if it panics.
    fn end(&self) -> End<'_> {
        End(self)
    }

    /// Restarts the broker after each of `count` checks has ended or waits.
    fn run(&self, broker: &mut Broker, count: usize) {
        let state = self.state.lock().unwrap();
        let state = self
            .changed
            .wait_while(state, |it| it.waiting + it.ended < count);
        if state.unwrap().waiting > 0 {
            broker.restart();
        }
        self.state.lock().unwrap().done = true;
        self.changed.notify_all();
    }
}

/// Runs checks against one broker, and fails if any of them fails. STATEHOUSE_TEST_CHECK selects
/// checks by a part of their name.
pub(crate) fn run<'a>(start: Start, checks: impl Iterator<Item = &'a Check>) {
    let directory = tempfile::tempdir().unwrap();
    let (mut broker, at) = start(directory.path());
    let wanted = std::env::var("STATEHOUSE_TEST_CHECK").unwrap_or_default();
    let all = matches!(broker, Broker::Statehouse(_));
    let checks = checks.filter(|it| (it.mosquitto || all) && it.name.contains(&wanted));
    let checks: Vec<_> = checks.collect();
    assert!(!checks.is_empty(), "no check is called {wanted:?}");
    let restart = Restart::default();
    let failed: Vec<_> = thread::scope(|scope| {
        let spawn = |check: &'a Check| {
            let name = check.short_name();
            let scene = Scene {
                name: name.rsplit("::").next().unwrap(),
                at: &at,
                directory: directory.path(),
                restart: &restart,
            };
            let body = move || {
                let _end = scene.restart.end();
                (check.run)(&scene);
            };
            // A panic prints the name of its thread.
            let thread = thread::Builder::new().name(name.into());
            (name, thread.spawn_scoped(scope, body).unwrap())
        };
        let threads: Vec<_> = checks.iter().copied().map(spawn).collect();
        restart.run(&mut broker, checks.len());
        let ended = threads.into_iter();
        ended
            .filter_map(|(name, thread)| thread.join().is_err().then_some(name))
            .collect()
    });
    let (count, all) = (failed.len(), checks.len());
    assert!(
        failed.is_empty(),
        "{count} of {all} checks fail: {failed:?}"
    );
}
