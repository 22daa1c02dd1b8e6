//! Runs the nodes of an etcd cluster on loopback addresses of their own. Tests can kill, pause and
//! restart each node. Drop ends the nodes, and prints their logs if the test failed.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::Path,
    process::Command,
    thread,
    time::{Duration, Instant},
};

use data_encoding::BASE64;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{background::Foreign, server};

/// How long nodes may need to answer. It is long because the machine may be busy.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// How long one HTTP request may take. A node without a leader lets some requests wait.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

pub struct Etcd {
    nodes: Vec<Node>,
    urls: Vec<String>,
    directory: TempDir,
    /// The login of the requests of tests.
    token: Option<String>,
    /// How many keys [`Etcd::fill`] has written.
    filling: usize,
}

struct Node {
    command: Command,
    process: Foreign,
    /// Serves the requests of tests without TLS.
    clients: SocketAddr,
    peers: SocketAddr,
    /// Serves `/health` without TLS.
    health: SocketAddr,
}

impl Etcd {
    /// Starts this many nodes, and waits until they answer.
    pub fn start(count: usize) -> Etcd {
        Etcd::start_with(count, "http", &[])
    }

    /// Starts nodes with additional arguments. The scheme is that of the URLs for clients.
    pub fn start_with(count: usize, scheme: &str, arguments: &[String]) -> Etcd {
        let directory = tempfile::tempdir().unwrap();
        Etcd::launch(directory, count, scheme, arguments)
    }

    /// Starts nodes whose data is below this directory.
    pub fn start_in(place: &Path, count: usize) -> Etcd {
        let directory = tempfile::tempdir_in(place).unwrap();
        Etcd::launch(directory, count, "http", &[])
    }

    fn launch(directory: TempDir, count: usize, scheme: &str, arguments: &[String]) -> Etcd {
        let addresses =
            || -> Vec<SocketAddr> { (0..count).map(|_| server::own_address()).collect() };
        let (clients, peers, health) = (addresses(), addresses(), addresses());
        // Tests have no certificate.
        let asked = match scheme {
            "http" => clients.clone(),
            _ => addresses(),
        };
        let members = members(peers.iter().copied());
        let urls: Vec<String> = clients
            .iter()
            .map(|it| format!("{scheme}://{it}"))
            .collect();
        let nodes = (0..count).map(|index| {
            let mut listens = vec![urls[index].clone()];
            if asked[index] != clients[index] {
                listens.push(format!("http://{}", asked[index]));
            }
            let mut command = Command::new("etcd");
            command
                .args(["--name", &format!("n{index}"), "--data-dir"])
                .arg(directory.path().join(index.to_string()))
                .args(["--listen-client-urls", &listens.join(",")])
                .args(["--advertise-client-urls", &urls[index]])
                .args(["--initial-cluster", &members.join(",")])
                .args(arguments);
            Node::start(command, asked[index], peers[index], health[index])
        });
        let etcd = Etcd {
            nodes: nodes.collect(),
            urls,
            directory,
            token: None,
            filling: 0,
        };
        etcd.wait_until_ready();
        etcd
    }

    /// The URL of each node for clients.
    pub fn urls(&self) -> &[String] {
        &self.urls
    }

    pub fn count(&self) -> usize {
        self.nodes.len()
    }

    /// Waits until each running node answers as a part of a cluster with a leader.
    pub fn wait_until_ready(&self) {
        let end = Instant::now() + START_TIMEOUT;
        for (index, node) in self.nodes.iter().enumerate() {
            while !node.is_healthy() {
                assert!(Instant::now() < end, "node {index} of etcd does not answer");
                // A node without a leader logs each of these requests.
                thread::sleep(Duration::from_millis(100));
            }
        }
    }

    /// Ends a node with `kill -9`.
    pub fn kill(&mut self, index: usize) {
        let process = &mut self.nodes[index].process;
        assert!(process.runs(), "node {index} of etcd has already ended");
        process.end();
    }

    /// Ends all nodes with `kill -9`.
    pub fn kill_all(&mut self) {
        (0..self.count()).for_each(|index| self.kill(index));
    }

    /// Ends all nodes with `kill -9` that did not end by themselves because their disk failed.
    pub fn end_all(&mut self) {
        self.nodes.iter_mut().for_each(|node| node.process.end());
    }

    /// Starts a killed node again, without waiting until it answers.
    pub fn restart(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        let is_over = !node.process.runs();
        assert!(is_over, "node {index} of etcd has to be killed first");
        node.process = run(&mut node.command, node.clients);
    }

    /// Starts all killed nodes again, and waits until they answer.
    pub fn restart_all(&mut self) {
        for index in 0..self.count() {
            if !self.nodes[index].process.runs() {
                self.restart(index);
            }
        }
        self.wait_until_ready();
    }

    /// Stops a node without ending it (SIGSTOP).
    pub fn pause(&self, index: usize) {
        server::signal(self.nodes[index].process.child.id(), "STOP");
    }

    /// Continues a paused node (SIGCONT).
    pub fn resume(&self, index: usize) {
        server::signal(self.nodes[index].process.child.id(), "CONT");
    }

    pub fn leader(&mut self) -> usize {
        let end = Instant::now() + START_TIMEOUT;
        loop {
            for index in 0..self.count() {
                let node = &mut self.nodes[index];
                if node.process.runs()
                    && let Some(status) = node.status()
                    && status["leader"] == status["header"]["member_id"]
                {
                    return index;
                }
            }
            assert!(Instant::now() < end, "no node of etcd leads");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Lets only the user root with this password in, and a user `statehouse` with the same
    /// password and the role root.
    pub fn enable_authentication(&mut self, password: &str) {
        self.ask("auth/role/add", &json!({ "name": "root" }));
        for user in ["root", "statehouse"] {
            let user = json!({ "name": user, "user": user, "password": password, "role": "root" });
            self.ask("auth/user/add", &user);
            self.ask("auth/user/grant", &user);
        }
        self.ask("auth/enable", &json!({}));
        self.log_in(password);
    }

    /// Changes the password of the user `statehouse`.
    pub fn change_password(&mut self, password: &str) {
        let user = json!({ "name": "statehouse", "password": password });
        self.ask("auth/user/changepw", &user);
    }

    /// Sends further requests of tests as the user root.
    fn log_in(&mut self, password: &str) {
        let root = json!({ "name": "root", "password": password });
        let answer = self.ask("auth/authenticate", &root);
        self.token = answer["token"].as_str().map(str::to_owned);
    }

    /// Changes the value of a key, which must exist.
    pub fn change(&mut self, key: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let key = BASE64.encode(key.as_bytes());
        let found = self.ask("kv/range", &json!({ "key": key }));
        let value = found["kvs"][0]["value"].as_str().expect("the key exists");
        let mut value = BASE64.decode(value.as_bytes()).unwrap();
        change(&mut value);
        let put = json!({ "key": key, "value": BASE64.encode(&value) });
        self.ask("kv/put", &put);
    }

    pub fn put(&mut self, key: &[u8], value: &[u8]) {
        let put = json!({ "key": BASE64.encode(key), "value": BASE64.encode(value) });
        self.ask("kv/put", &put);
    }

    /// The number of keys that begin with this text, which does not end with the largest byte.
    pub fn count_below(&mut self, start: &str) -> usize {
        let mut end = start.as_bytes().to_vec();
        *end.last_mut().expect("the start of a key") += 1;
        let (start, end) = (BASE64.encode(start.as_bytes()), BASE64.encode(&end));
        let range = json!({ "key": start, "range_end": end, "count_only": true });
        let found = self.ask("kv/range", &range);
        found["count"].as_str().map_or(0, |it| it.parse().unwrap())
    }

    /// All keys with their values.
    pub fn all(&mut self) -> Vec<(Vec<u8>, Vec<u8>)> {
        // From the first key on, to the last one.
        let all = json!({ "key": BASE64.encode(b"\0"), "range_end": BASE64.encode(b"\0") });
        let found = self.ask("kv/range", &all);
        let bytes = |it: &Value| BASE64.decode(it.as_str().unwrap_or_default().as_bytes());
        let pair = |it: &Value| (bytes(&it["key"]).unwrap(), bytes(&it["value"]).unwrap());
        found["kvs"].as_array().unwrap().iter().map(pair).collect()
    }

    /// Replaces a killed node by one with the same addresses and an empty directory, as an operator
    /// does after the loss of a disk. Does not wait until it answers.
    pub fn replace(&mut self, index: usize) {
        let members = self.ask("cluster/member/list", &json!({}));
        let name = format!("n{index}");
        let members = members["members"].as_array().unwrap().iter();
        let mut lost = members.filter(|it| it["name"] == *name);
        let id = &lost.next().expect("it is a member")["ID"];
        self.ask("cluster/member/remove", &json!({ "ID": id }));
        let peer = format!("http://{}", self.nodes[index].peers);
        self.ask("cluster/member/add", &json!({ "peerURLs": [peer] }));
        // etcd uses the last value of a flag.
        let empty = self.directory.path().join(format!("{index}-replaced"));
        let command = &mut self.nodes[index].command;
        command.arg("--data-dir").arg(empty);
        command.args(["--initial-cluster-state", "existing"]);
        self.restart(index);
    }

    /// Starts a killed node again with an empty directory, as an etcd cluster of its own. Does not
    /// wait until it answers.
    pub fn return_alone(&mut self, index: usize) {
        let empty = self.directory.path().join(format!("{index}-alone"));
        let node = &mut self.nodes[index];
        let alone = format!("n{index}=http://{}", node.peers);
        // etcd uses the last value of a flag.
        node.command.arg("--data-dir").arg(empty);
        node.command.args(["--initial-cluster", &alone]);
        self.restart(index);
    }

    /// Adds a node in front of the others that has no vote and refuses nearly every request, as an
    /// operator does before a node replaces another one.
    pub fn add_learner(&mut self) {
        let (clients, peers) = (server::own_address(), server::own_address());
        let peer = format!("http://{peers}");
        let learner = json!({ "peerURLs": [peer], "isLearner": true });
        self.ask("cluster/member/add", &learner);
        let mut members = members(self.nodes.iter().map(|node| node.peers));
        members.push(format!("learner={peer}"));
        let url = format!("http://{clients}");
        let mut command = Command::new("etcd");
        command
            .args(["--name", "learner", "--data-dir"])
            .arg(self.directory.path().join("learner"))
            .args(["--listen-client-urls", &url])
            .args(["--advertise-client-urls", &url])
            .args(["--initial-cluster", &members.join(",")])
            .args(["--initial-cluster-state", "existing"]);
        let node = Node::start(command, clients, peers, server::own_address());
        let end = Instant::now() + START_TIMEOUT;
        while node.status().is_none() {
            assert!(Instant::now() < end, "the learner does not answer");
            thread::sleep(Duration::from_millis(100));
        }
        self.nodes.insert(0, node);
        self.urls.insert(0, url);
    }

    /// Compacts the data to the newest revision, as another client may do.
    pub fn compact(&mut self) {
        let revision = self.revision().to_string();
        self.ask("kv/compaction", &json!({ "revision": revision }));
    }

    /// Writes keys of another client until the quota is used up, and hosts that make room cannot
    /// change it. Each value has 300 kB.
    pub fn fill(&mut self) {
        // These are base 64, as the gateway expects bytes: the keys begin with the bytes of "JUNK".
        let value = "AAAA".repeat(100_000);
        let mut refused_since = None;
        for _ in 0..1000 {
            // Compaction would free the earlier values of a key.
            let key = format!("JUNK{:04}", self.filling);
            let put = json!({ "key": key, "value": value });
            let answer = self.answer("kv/put", &put).expect("etcd answers");
            let Some(error) = answer["error"].as_str() else {
                self.filling += 1;
                refused_since = None;
                continue;
            };
            assert!(error.contains("database space exceeded"), "{error}");
            if refused_since.get_or_insert_with(Instant::now).elapsed() > Duration::from_secs(2) {
                return;
            }
            thread::sleep(Duration::from_millis(100));
        }
        panic!("etcd accepted 300 MB, or its room does not end");
    }

    pub fn delete_filling(&mut self) {
        let range = json!({ "key": "JUNK", "range_end": "JUNL" });
        self.ask("kv/deleterange", &range);
        self.filling = 0;
    }

    /// Sends a request of the API to a running node. It must succeed.
    fn ask(&mut self, path: &str, request: &Value) -> Value {
        let end = Instant::now() + START_TIMEOUT;
        loop {
            match self.answer(path, request) {
                Some(answer) if answer.get("error").is_none() => return answer,
                // A new leader of etcd refuses changes of members for a moment.
                answer => assert!(Instant::now() < end, "{path}: {answer:?}"),
            }
            thread::sleep(Duration::from_millis(100));
        }
    }

    fn answer(&mut self, path: &str, request: &Value) -> Option<Value> {
        let running = self
            .nodes
            .iter_mut()
            .filter_map(|it| it.process.runs().then_some(it.clients));
        let node = running.last().expect("a node runs");
        let token = self.token.as_deref();
        let path = format!("/v3/{path}");
        exchange_as(token, node, "POST", &path, &request.to_string())
    }

    /// The revision of the data: every write raises it.
    pub fn revision(&self) -> u64 {
        let status = self.nodes[0].status().expect("etcd answers");
        let revision = status["header"]["revision"].as_str();
        revision.and_then(|it| it.parse().ok()).expect("a revision")
    }
}

impl Node {
    /// Starts a node with this command and the arguments that all nodes have.
    fn start(
        mut command: Command,
        clients: SocketAddr,
        peers: SocketAddr,
        health: SocketAddr,
    ) -> Self {
        let peer = format!("http://{peers}");
        command
            .args(["--listen-peer-urls", &peer])
            .args(["--initial-advertise-peer-urls", &peer])
            .args(["--listen-metrics-urls", &format!("http://{health}")])
            .args(["--snapshot-count=2000", "--log-level=error"]);
        Self {
            process: run(&mut command, clients),
            command,
            clients,
            peers,
            health,
        }
    }

    fn is_healthy(&self) -> bool {
        let answer = exchange(self.health, "GET", "/health", "");
        answer.is_some_and(|it| it["health"] == "true")
    }

    /// The answer to a status request, which only this node handles.
    fn status(&self) -> Option<Value> {
        exchange(self.clients, "POST", "/v3/maintenance/status", "{}")
    }
}

fn run(command: &mut Command, clients: SocketAddr) -> Foreign {
    Foreign::start(&format!("etcd at {clients}"), command)
}

/// The first nodes, as the argument `--initial-cluster` names them.
fn members(peers: impl Iterator<Item = SocketAddr>) -> Vec<String> {
    let named = peers.enumerate();
    let named = named.map(|(index, peer)| format!("n{index}=http://{peer}"));
    named.collect()
}

/// Sends a request over HTTP. `None` if no JSON is answered in time.
fn exchange(address: SocketAddr, method: &str, path: &str, body: &str) -> Option<Value> {
    exchange_as(None, address, method, path, body)
}

fn exchange_as(
    token: Option<&str>,
    address: SocketAddr,
    method: &str,
    path: &str,
    body: &str,
) -> Option<Value> {
    let authorization = token.map_or(String::new(), |it| format!("Authorization: {it}\r\n"));
    let mut stream = TcpStream::connect_timeout(&address, REQUEST_TIMEOUT).ok()?;
    stream.set_read_timeout(Some(REQUEST_TIMEOUT)).unwrap();
    let request = format!(
        "{method} {path} HTTP/1.0\r\nHost: {address}\r\n{authorization}Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (_, json) = answer.split_once("\r\n\r\n")?;
    serde_json::from_str(json).ok()
}
