//! Runs a real Mosquitto on its own loopback address. Tests can kill, freeze and restart the
//! broker. Drop ends it.

use std::{
    fs,
    net::SocketAddr,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use tempfile::TempDir;

use crate::{
    background::Foreign,
    client::{Client, PATIENCE},
    connect::Connect,
    server,
};

/// The settings of a gateway with persistent sessions: Mosquitto saves every change within a
/// moment. With `autosave_on_changes`, `autosave_interval` counts changes (mosquitto.conf(5)).
pub const PERSISTENT: &[&str] = &[
    "persistence true",
    "autosave_on_changes true",
    "autosave_interval 1",
];

/// A running broker.
pub struct Mosquitto {
    process: Foreign,
    address: SocketAddr,
    directory: TempDir,
}

impl Mosquitto {
    /// Starts Mosquitto with its defaults: 20 messages in flight, 1000 in a queue, nothing on disk.
    /// Anonymous clients may connect.
    pub fn start() -> Mosquitto {
        Mosquitto::with(&[])
    }

    /// Starts Mosquitto with these additional configuration lines.
    pub fn with(lines: &[&str]) -> Mosquitto {
        Mosquitto::set_up(|_, _| lines.join("\n"))
    }

    /// Starts Mosquitto with the configuration lines that `lines` returns. `lines` receives the
    /// working directory, in which it may create files, and the listening address. Paths may be
    /// relative to the directory. For users and passwords, add `allow_anonymous false`.
    pub fn set_up(lines: impl FnOnce(&Path, SocketAddr) -> String) -> Mosquitto {
        let directory = tempfile::tempdir().unwrap();
        let address = server::own_address();
        let mut configuration = format!(
            "listener {} {}\nlog_dest stderr\nlog_type all\nset_tcp_nodelay true\n",
            address.port(),
            address.ip()
        );
        // Without this line, a broker that root starts changes to a user who may not read the
        // directory. For other users, the line has no effect.
        configuration.push_str("user root\n");
        let lines = lines(directory.path(), address);
        if !lines.contains("allow_anonymous") {
            configuration.push_str("allow_anonymous true\n");
        }
        configuration.push_str(&lines);
        configuration.push('\n');
        fs::write(directory.path().join("mosquitto.conf"), configuration).unwrap();
        let broker = Mosquitto {
            process: run(directory.path()),
            address,
            directory,
        };
        broker.wait_until_it_runs();
        broker
    }

    fn wait_until_it_runs(&self) {
        let log = &self.process.log;
        let runs = log.wait(PATIENCE, |line| line.ends_with(" running"));
        assert!(runs.is_some(), "mosquitto does not run");
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The URL for `statehouse serve --broker`.
    pub fn url(&self) -> String {
        format!("mqtt://{}", self.address)
    }

    /// The working directory, which drop removes.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Connects a client with a clean session.
    pub fn connect(&self, id: &str) -> Client {
        Client::connect(self.address, &Connect::new(id))
    }

    /// The log lines since the last start.
    pub fn log(&self) -> Vec<String> {
        self.process.log.all()
    }

    /// Waits for a log line that contains `what`.
    pub fn wait_for_log(&self, what: &str) -> String {
        let log = &self.process.log;
        let line = log.wait(PATIENCE, |line| line.contains(what));
        line.unwrap_or_else(|| panic!("mosquitto does not log {what:?}"))
    }

    /// Ends the broker with `kill -9`, which loses everything that is not on disk.
    pub fn kill(&mut self) {
        self.process.end();
    }

    /// Ends the broker with SIGTERM, so that it saves its sessions.
    pub fn stop(&mut self) {
        let end = Instant::now() + PATIENCE;
        loop {
            server::signal(self.process.child.id(), "TERM");
            // Right after its start, Mosquitto may ignore the signal.
            if server::wait(&mut self.process.child, Duration::from_millis(500)).is_some() {
                return;
            }
            assert!(Instant::now() < end, "mosquitto does not end");
        }
    }

    /// Starts the broker again at the same address, in the same directory. It must have ended.
    pub fn restart(&mut self) {
        assert!(!self.process.runs(), "it has to be killed or stopped first");
        self.process = run(self.directory.path());
        self.wait_until_it_runs();
    }

    /// Stops the process until [`Self::thaw`]. The kernel still accepts connections and bytes for
    /// it.
    pub fn freeze(&self) {
        server::signal(self.process.child.id(), "STOP");
    }

    pub fn thaw(&self) {
        server::signal(self.process.child.id(), "CONT");
    }
}

/// Debian installs Mosquitto in a directory that is not in a user's PATH.
fn program() -> &'static str {
    match Path::new("/usr/sbin/mosquitto").exists() {
        true => "/usr/sbin/mosquitto",
        false => "mosquitto",
    }
}

fn run(directory: &Path) -> Foreign {
    let mut command = Command::new(program());
    command
        .args(["-c", "mosquitto.conf"])
        .current_dir(directory);
    Foreign::start("mosquitto", &mut command)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::Publish;

    fn queue_message(broker: &Mosquitto) {
        let mut absent = Client::connect(broker.address(), &Connect::resume("absent", 3600));
        assert_eq!(absent.subscribe("a", 1), 1);
        absent.disconnect();
        let mut publisher = broker.connect("publisher");
        assert_eq!(publisher.publish(Publish::new("a", "b").qos(1)).reason, 0);
    }

    fn session_exists(broker: &Mosquitto) -> bool {
        let absent = Client::connect(broker.address(), &Connect::resume("absent", 3600));
        absent.session_present()
    }

    #[test]
    fn session_survives_the_broker_only_on_disk() {
        let mut broker = Mosquitto::start();
        queue_message(&broker);
        broker.kill();
        broker.restart();
        assert!(!session_exists(&broker));

        let mut broker = Mosquitto::with(PERSISTENT);
        queue_message(&broker);
        broker.stop();
        broker.restart();
        assert!(session_exists(&broker));
    }

    #[test]
    fn frozen_broker_answers_after_thaw() {
        let broker = Mosquitto::start();
        let mut client = broker.connect("client");
        broker.freeze();
        client.send(&crate::packet::PINGREQ);
        let silent = client.poll(Duration::from_millis(200));
        assert!(matches!(silent, crate::client::Heard::Silence));
        broker.thaw();
        assert_eq!(client.next().kind(), crate::packet::kind::PINGRESP);
    }
}
