//! A real Mosquitto, alone on an address of loopback. What enters: lines of its configuration. What leaves: its
//! address and its log. It is killed, frozen and started again on demand, and gone with the test.

use std::{
    fs,
    net::SocketAddr,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

use crate::{
    client::{Client, PATIENCE},
    connect::Connect,
    lines::Lines,
    server,
};

/// What a gateway sets that keeps sessions: everything is on disk a moment after it happened. mosquitto.conf(5) counts
/// changes where `autosave_on_changes` is set.
pub const PERSISTENT: &[&str] = &[
    "persistence true",
    "autosave_on_changes true",
    "autosave_interval 1",
];

/// A running broker.
pub struct Mosquitto {
    child: Child,
    log: Lines,
    address: SocketAddr,
    directory: TempDir,
}

impl Mosquitto {
    /// With its defaults: 20 messages in flight, 1000 in a queue, nothing on disk. Anybody may connect.
    pub fn start() -> Mosquitto {
        Mosquitto::with(&[])
    }

    /// With these further lines of its configuration.
    pub fn with(lines: &[&str]) -> Mosquitto {
        Mosquitto::set_up(|_, _| lines.join("\n"))
    }

    /// With the lines that `lines` gives for the directory it runs in, where it may put files, and the address it
    /// listens on. Paths may be relative to the directory. Who wants names and passwords says `allow_anonymous false`.
    pub fn set_up(lines: impl FnOnce(&Path, SocketAddr) -> String) -> Mosquitto {
        let directory = tempfile::tempdir().unwrap();
        let address = server::own_address();
        let mut configuration = format!(
            "listener {} {}\nlog_dest stderr\nlog_type all\nset_tcp_nodelay true\n",
            address.port(),
            address.ip()
        );
        // Otherwise root's broker becomes a user who may not read the directory; others may not name one.
        configuration.push_str("user root\n");
        let lines = lines(directory.path(), address);
        if !lines.contains("allow_anonymous") {
            configuration.push_str("allow_anonymous true\n");
        }
        configuration.push_str(&lines);
        configuration.push('\n');
        fs::write(directory.path().join("mosquitto.conf"), configuration).unwrap();
        let (child, log) = run(directory.path());
        let broker = Mosquitto {
            child,
            log,
            address,
            directory,
        };
        broker.wait_until_it_runs();
        broker
    }

    fn wait_until_it_runs(&self) {
        let runs = self.log.wait(PATIENCE, |line| line.ends_with(" running"));
        assert!(runs.is_some(), "mosquitto does not run");
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The same for `statehouse serve --broker`.
    pub fn url(&self) -> String {
        format!("mqtt://{}", self.address)
    }

    /// The directory it runs in, which goes with it.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// A client with a session of its own, clean.
    pub fn connect(&self, id: &str) -> Client {
        Client::connect(self.address, &Connect::new(id))
    }

    /// What it has logged since it was started last.
    pub fn log(&self) -> Vec<String> {
        self.log.all()
    }

    /// Waits for a line of its log.
    pub fn wait_for_log(&self, what: &str) -> String {
        let line = self.log.wait(PATIENCE, |line| line.contains(what));
        line.unwrap_or_else(|| panic!("mosquitto does not log {what:?}"))
    }

    /// `kill -9`: what is not on disk is lost.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Asks it to end, so that it saves what it keeps.
    pub fn stop(&mut self) {
        let end = Instant::now() + PATIENCE;
        loop {
            server::signal(self.child.id(), "TERM");
            // Right after its start it forgets that it was asked.
            if server::wait(&mut self.child, Duration::from_millis(500)).is_some() {
                return;
            }
            assert!(Instant::now() < end, "mosquitto does not end");
        }
    }

    /// Starts it again at the same address, in the same directory. It has to have ended.
    pub fn restart(&mut self) {
        assert!(
            self.child.try_wait().unwrap().is_some(),
            "it has to be killed or stopped first"
        );
        (self.child, self.log) = run(self.directory.path());
        self.wait_until_it_runs();
    }

    /// It does nothing until [`Self::thaw`]; the system goes on to accept connections and to take bytes for it.
    pub fn freeze(&self) {
        server::signal(self.child.id(), "STOP");
    }

    /// Goes on.
    pub fn thaw(&self) {
        server::signal(self.child.id(), "CONT");
    }
}

/// Debian has it where a user's PATH does not look.
fn program() -> &'static str {
    match Path::new("/usr/sbin/mosquitto").exists() {
        true => "/usr/sbin/mosquitto",
        false => "mosquitto",
    }
}

fn run(directory: &Path) -> (Child, Lines) {
    let mut child = Command::new(program())
        .args(["-c", "mosquitto.conf"])
        .current_dir(directory)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| {
            panic!("cannot run mosquitto, Debian's package of that name: {error}")
        });
    let log = Lines::follow(child.stderr.take().unwrap());
    (child, log)
}

impl Drop for Mosquitto {
    fn drop(&mut self) {
        // It may have ended; a frozen one ends too.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            // The thread that reads is a moment behind the end of the process.
            self.log.wait(Duration::from_secs(1), |_| false);
            eprintln!("--- mosquitto logged (its last 60 lines)");
            let log = self.log();
            for line in &log[log.len().saturating_sub(60)..] {
                eprintln!("{line}");
            }
            eprintln!("---");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packet::Publish;

    fn queue_one(broker: &Mosquitto) {
        let mut absent = Client::connect(broker.address(), &Connect::resume("absent", 3600));
        assert_eq!(absent.subscribe("a", 1), 1);
        absent.disconnect();
        let mut publisher = broker.connect("publisher");
        assert_eq!(publisher.publish(Publish::new("a", "b").qos(1)).reason, 0);
    }

    fn is_there(broker: &Mosquitto) -> bool {
        let absent = Client::connect(broker.address(), &Connect::resume("absent", 3600));
        absent.session_present()
    }

    #[test]
    fn a_session_outlives_the_broker_only_on_disk() {
        let mut broker = Mosquitto::start();
        queue_one(&broker);
        broker.kill();
        broker.restart();
        assert!(!is_there(&broker));

        let mut broker = Mosquitto::with(PERSISTENT);
        queue_one(&broker);
        broker.stop();
        broker.restart();
        assert!(is_there(&broker));
    }

    #[test]
    fn a_frozen_broker_answers_when_it_is_thawed() {
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
