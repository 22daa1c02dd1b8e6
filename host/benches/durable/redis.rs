//! Runs a Redis server that syncs every write, and a client of it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use crate::servers::{Process, free_address};

/// A Redis server.
pub(crate) struct Redis(pub(crate) Process);

impl Redis {
    pub(crate) fn start(directory: &Path) -> Option<Self> {
        let address = free_address();
        let mut command = Command::new("redis-server");
        command
            .args(["--port", &address.port().to_string(), "--bind", "127.0.0.1"])
            .args(["--appendonly", "yes", "--appendfsync", "always"])
            .args(["--save", "", "--dir"])
            .arg(directory);
        let redis = Self(Process::start(command, address)?);
        // Redis listens while it loads its data, and then answers PING with an error.
        for _ in 0..6_000 {
            if redis.connect().line(b"PING\r\n") == b"+PONG\r\n" {
                return Some(redis);
            }
            thread::sleep(Duration::from_millis(5));
        }
        None
    }

    pub(crate) fn connect(&self) -> RedisClient {
        let stream = TcpStream::connect(self.0.address).expect("it listens");
        stream.set_nodelay(true).expect("a socket option");
        RedisClient {
            stream,
            read: Vec::new(),
        }
    }
}

pub(crate) struct RedisClient {
    stream: TcpStream,
    read: Vec<u8>,
}

impl RedisClient {
    /// Sends commands, each of which has an answer of one line.
    pub(crate) fn ask(&mut self, commands: &[u8], answers: usize) {
        self.stream.write_all(commands).expect("redis reads");
        self.read.clear();
        while self.read.iter().filter(|byte| **byte == b'\n').count() < answers {
            self.more();
        }
        assert!(!self.read.contains(&b'-'), "an error of redis");
    }

    fn line(&mut self, command: &[u8]) -> Vec<u8> {
        self.stream.write_all(command).expect("redis reads");
        self.read.clear();
        while !self.read.ends_with(b"\n") {
            self.more();
        }
        self.read.clone()
    }

    fn more(&mut self) {
        let mut chunk = [0; 16 << 10];
        let count = self.stream.read(&mut chunk).expect("an answer");
        assert_ne!(count, 0, "redis closed the connection");
        self.read.extend_from_slice(&chunk[..count]);
    }
}
