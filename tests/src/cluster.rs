//! Runs the hosts of a cluster over etcd. Each host has addresses that survive its restarts. Tests
//! can kill, pause and restart each host.
//!
//! Drop ends all hosts, and prints the log of each one if the test failed.

use std::{
    net::SocketAddr,
    ops::{Index, IndexMut},
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use crate::{
    Client, Connect, Store, binary,
    command::{self, Ran},
    etcd::Etcd,
    server::{self, Server},
};

/// The name of every cluster of the tests: each has an etcd of its own.
pub const NAME: &str = "plant7";

/// How long a change of the leader may take. It is long because the machine may be busy.
const LEADER_TIMEOUT: Duration = Duration::from_secs(60);

pub struct Cluster {
    // The first field, so that the hosts are dropped before their etcd.
    hosts: Vec<Server>,
    /// The servers that keep the log.
    pub etcd: Etcd,
    settings: Vec<(String, String)>,
    arguments: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leader {
    pub host: usize,
    /// The number of its leadership.
    pub epoch: u64,
}

impl Cluster {
    /// Starts this many hosts over one node of etcd. Waits until a host leads and all are ready.
    pub fn start(hosts: usize) -> Cluster {
        Cluster::with(hosts, 1, &[])
    }

    /// Starts hosts over this many nodes of etcd. Settings are pairs such as `("cluster_lease",
    /// "500ms")`.
    pub fn with(hosts: usize, nodes: usize, settings: &[(&str, &str)]) -> Cluster {
        Cluster::with_arguments(hosts, nodes, settings, &[])
    }

    /// Like [`Self::with`], with further arguments for each host.
    pub fn with_arguments(
        hosts: usize,
        nodes: usize,
        settings: &[(&str, &str)],
        arguments: &[&str],
    ) -> Cluster {
        let mut cluster = Cluster::without_hosts(nodes, settings);
        cluster.arguments = arguments.iter().map(|&it| it.to_owned()).collect();
        cluster.add_hosts(hosts);
        cluster
    }

    /// Starts hosts. Waits until a host leads and all are ready.
    pub fn add_hosts(&mut self, hosts: usize) {
        for _ in 0..hosts {
            self.add();
        }
        self.wait_until_ready();
        if hosts > 0 {
            self.wait_for_leader_after(0);
        }
    }

    /// Starts etcd and creates the cluster, which has no host yet.
    pub fn without_hosts(nodes: usize, settings: &[(&str, &str)]) -> Cluster {
        Cluster::without_hosts_on(Etcd::start(nodes), settings)
    }

    /// Creates the cluster on an etcd. It has no host yet.
    pub fn without_hosts_on(etcd: Etcd, settings: &[(&str, &str)]) -> Cluster {
        let cluster = Cluster::existing_on(etcd, settings);
        let created = cluster.ask(&["init"]).code(0);
        assert_eq!(created.text(), format!("created the cluster {NAME}\n"));
        cluster
    }

    /// The cluster that this etcd holds. It has no host yet.
    pub fn existing_on(etcd: Etcd, settings: &[(&str, &str)]) -> Cluster {
        let own = |&(name, value): &(&str, &str)| (name.to_owned(), value.to_owned());
        Cluster {
            hosts: Vec::new(),
            etcd,
            settings: settings.iter().map(own).collect(),
            arguments: Vec::new(),
        }
    }

    /// Starts one more host without waiting until it is ready. Returns its index.
    pub fn add(&mut self) -> usize {
        self.add_with(&[])
    }

    /// Like [`Self::add`], with settings of this host only.
    pub fn add_with(&mut self, settings: &[(&str, &str)]) -> usize {
        self.push(binary::statehouse(), settings, &[])
    }

    /// Like [`Self::add`], with this program.
    pub fn add_program(&mut self, program: &Path) -> usize {
        self.push(program, &[], &[])
    }

    /// Like [`Self::add`], with environment variables of this host only.
    pub fn add_in(&mut self, environment: &[(&str, &str)]) -> usize {
        self.push(binary::statehouse(), &[], environment)
    }

    fn push(
        &mut self,
        program: &Path,
        own: &[(&str, &str)],
        environment: &[(&str, &str)],
    ) -> usize {
        let index = self.hosts.len();
        let host = self.launch_program(program, &name(index), own, environment);
        self.hosts.push(host);
        index
    }

    /// Starts a host with this name, which the caller keeps, without waiting until it is ready.
    pub fn launch(&self, name: &str) -> Server {
        self.launch_program(binary::statehouse(), name, &[], &[])
    }

    fn launch_program(
        &self,
        program: &Path,
        name: &str,
        own: &[(&str, &str)],
        environment: &[(&str, &str)],
    ) -> Server {
        let (clients, hosts) = (server::own_address(), server::own_address());
        let mut command = Command::new(program);
        command.args(["serve", "--listen", &clients.to_string()]);
        command.args(["--cluster-name", NAME, "--name", name]);
        command.envs(environment.iter().copied());
        command.args(&self.arguments);
        let settings = self.settings.iter();
        let settings: Vec<(&str, &str)> = settings.map(|(n, v)| (&**n, &**v)).collect();
        let hosts = hosts.to_string();
        server::set(
            &mut command,
            &[("cluster", &self.urls()), ("cluster_listen", &hosts)],
        );
        server::set(&mut command, &settings);
        server::set(&mut command, own);
        Server::launch_at(clients, command)
    }

    /// The URLs of etcd, as the settings expect them.
    pub fn urls(&self) -> String {
        self.etcd.urls().join(",")
    }

    /// Runs a command of `statehouse cluster` that connects to etcd.
    pub fn ask(&self, arguments: &[&str]) -> Ran {
        let urls = self.urls();
        let log = ["--cluster", &urls, "--cluster-name", NAME];
        command::run(&[&["cluster"], arguments, &log].concat(), b"")
    }

    pub fn count(&self) -> usize {
        self.hosts.len()
    }

    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.hosts.iter().map(Server::address).collect()
    }

    /// The host with the newest leadership, as the hosts print it. A host that was killed, and not
    /// restarted, counts until another one leads.
    pub fn leader(&self) -> Option<Leader> {
        let hosts = self.hosts.iter().enumerate();
        let leaders = hosts.filter_map(|(host, server)| {
            let epoch = newest_epoch(&server.stdout(), &name(host))?;
            Some(Leader { host, epoch })
        });
        leaders.max_by_key(|it| it.epoch)
    }

    /// Waits for a leadership with a higher number than this.
    pub fn wait_for_leader_after(&self, epoch: u64) -> Leader {
        let end = Instant::now() + LEADER_TIMEOUT;
        loop {
            match self.leader() {
                Some(leader) if leader.epoch > epoch => return leader,
                _ => {}
            }
            assert!(Instant::now() < end, "no host leads after epoch {epoch}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// The host that leads. There must be one.
    pub fn present_leader(&self) -> Leader {
        self.leader().expect("a host leads")
    }

    pub fn followers(&self) -> Vec<usize> {
        let leader = self.present_leader().host;
        (0..self.count()).filter(|host| *host != leader).collect()
    }

    pub fn follower(&self) -> usize {
        *self.followers().first().expect("two hosts")
    }

    /// The first host that is none of these.
    pub fn other_than(&self, hosts: &[usize]) -> usize {
        let other = (0..self.count()).find(|host| !hosts.contains(host));
        other.expect("another host")
    }

    /// Waits until every host accepts requests.
    pub fn wait_until_ready(&mut self) {
        self.hosts.iter_mut().for_each(Server::wait_until_ready);
    }

    /// Connects a client through this host. It may have to wait for a leader.
    pub fn connect(&self, host: usize, connect: &Connect) -> Client {
        Client::connect(self.hosts[host].address(), connect)
    }

    /// Connects a client of the store through this host.
    pub fn store(&self, host: usize, id: &str) -> Store {
        self.hosts[host].store(id)
    }

    /// Kills the leader, and waits until another host leads. The killed host stays dead.
    pub fn fail_over(&mut self) -> (Leader, Leader) {
        let before = self.present_leader();
        self[before.host].kill();
        (before, self.wait_for_leader_after(before.epoch))
    }
}

pub fn name(index: usize) -> String {
    format!("gw{}", index + 1)
}

/// The number of the last leadership that a host has printed, unless it has ended.
fn newest_epoch(lines: &[String], name: &str) -> Option<u64> {
    let leads = format!("{name} leads {NAME} (epoch ");
    let ended = format!("{name} does not lead {NAME} any more: ");
    lines.iter().fold(None, |newest, line| {
        match line
            .strip_prefix(&leads)
            .and_then(|it| it.strip_suffix(')'))
        {
            Some(epoch) => Some(epoch.parse().unwrap()),
            None if line.starts_with(&ended) => None,
            None => newest,
        }
    })
}

impl Index<usize> for Cluster {
    type Output = Server;

    fn index(&self, host: usize) -> &Server {
        &self.hosts[host]
    }
}

impl IndexMut<usize> for Cluster {
    fn index_mut(&mut self, host: usize) -> &mut Server {
        &mut self.hosts[host]
    }
}
