//! Runs checks at the same time against one broker. A check may restart the broker: it waits until
//! every other check has ended or waits, too.

use std::{
    fs,
    net::SocketAddr,
    path::Path,
    sync::{Condvar, Mutex},
    thread,
};

use statehouse_tests::{Client, Client3, Connect, Mosquitto, Server, mosquitto::PERSISTENT};

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
}

impl Broker {
    fn restart(&mut self) {
        match self {
            Broker::Statehouse(server) => {
                server.kill();
                server.restart();
            }
            // Mosquitto writes its sessions at the end.
            Broker::Mosquitto(broker) => {
                broker.stop();
                broker.restart();
            }
        }
    }
}

/// Starts Statehouse or Mosquitto with a listener of each kind. The certificate is written to
/// `certificate`.
pub(crate) fn start(statehouse: bool, certificate: &Path) -> (Broker, Addresses) {
    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = certificate.with_extension("key");
    fs::write(certificate, certified.cert.pem()).unwrap();
    fs::write(&key, certified.signing_key.serialize_pem()).unwrap();
    let [certificate, key] = [certificate, &key].map(|it| it.to_str().unwrap());
    let [plain, websocket, tls] = [(); 3].map(|()| statehouse_tests::server::own_address());
    if statehouse {
        let listen = format!("{plain},ws://{websocket},mqtts://{tls}");
        let settings = [
            ("listen", &*listen),
            ("tls_cert", certificate),
            ("tls_key", key),
        ];
        let server = Server::restartable(&settings);
        return (
            Broker::Statehouse(Box::new(server)),
            Addresses {
                plain,
                websocket,
                tls,
            },
        );
    }
    let broker = Mosquitto::set_up(|_, _| {
        let listener = |it: SocketAddr| format!("listener {} {}", it.port(), it.ip());
        format!(
            "{}\n{}\nprotocol websockets\n{}\ncertfile {certificate}\nkeyfile {key}\n",
            PERSISTENT.join("\n"),
            listener(websocket),
            listener(tls),
        )
    });
    let plain = broker.address();
    (
        Broker::Mosquitto(broker),
        Addresses {
            plain,
            websocket,
            tls,
        },
    )
}

/// What a check works with. Its client ids and topics are its own.
pub(crate) struct Scene<'a> {
    name: &'static str,
    pub(crate) statehouse: bool,
    pub(crate) at: &'a Addresses,
    /// The certificate of the TLS listener.
    pub(crate) certificate: &'a Path,
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

#[derive(Default)]
struct Progress {
    waiting: usize,
    ended: usize,
    done: bool,
}

impl Restart {
    /// Counts the end of a check, also if it panics.
    fn end(&self) -> impl Drop {
        struct End<'a>(&'a Restart);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                self.0.state.lock().unwrap().ended += 1;
                self.0.changed.notify_all();
            }
        }
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

/// Runs checks against one broker, and fails if any of them fails.
pub(crate) fn run<'a>(statehouse: bool, checks: impl Iterator<Item = &'a Check>) {
    let directory = tempfile::tempdir().unwrap();
    let certificate = directory.path().join("tls.crt");
    let (mut broker, at) = start(statehouse, &certificate);
    let wanted = std::env::var("STATEHOUSE_TEST_CHECK").unwrap_or_default();
    let checks: Vec<_> = checks
        .filter(|it| (it.mosquitto || statehouse) && it.name.contains(&wanted))
        .collect();
    let restart = Restart::default();
    let failed: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = checks
            .iter()
            .map(|check| {
                let (name, _) = (check.short_name(), &at);
                let scene = Scene {
                    name: name.rsplit("::").next().unwrap(),
                    statehouse,
                    at: &at,
                    certificate: &certificate,
                    restart: &restart,
                };
                let restart = &restart;
                let body = move || {
                    let _end = restart.end();
                    (check.run)(&scene);
                };
                // A panic prints the name of its thread.
                let thread = thread::Builder::new().name(name.into());
                (name, thread.spawn_scoped(scope, body).unwrap())
            })
            .collect();
        restart.run(&mut broker, checks.len());
        let ended = threads.into_iter();
        ended
            .filter_map(|(name, thread)| thread.join().is_err().then_some(name))
            .collect()
    });
    assert!(
        failed.is_empty(),
        "{} of {} checks fail: {failed:?}",
        failed.len(),
        checks.len()
    );
}
