//! A store whose admin API listens over TLS, and requests and commands of its users.

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    os::unix::fs::PermissionsExt,
    sync::Arc,
};

use data_encoding::BASE64;
use rustls::{ClientConfig, ClientConnection, StreamOwned, pki_types::ServerName};
use statehouse_tests::{
    Ran, Server, client::PATIENCE, command, command::finish, run, tls::trusting,
};
use tempfile::TempDir;

use crate::{
    authority::Authority,
    tls::{admin_address, text},
};

pub(super) const PASSWORD: &str = "right horse";

/// A store whose admin API listens over TLS, with a user for each role, and without one.
pub(super) struct Plant {
    pub(super) server: Server,
    files: TempDir,
    pub(super) address: SocketAddr,
    config: Arc<ClientConfig>,
}

impl Plant {
    pub(super) fn start() -> Plant {
        Plant::serve(|settings| {
            let flags = settings
                .iter()
                .map(|(name, _)| format!("--{}", name.replace('_', "-")));
            let flags: Vec<_> = flags.collect();
            let values = settings.iter().map(|(_, value)| *value);
            let own = flags.iter().map(String::as_str).zip(values);
            let own: Vec<_> = own.flat_map(|(name, value)| [name, value]).collect();
            Server::with("", &[&own[..], &["--allow-anonymous"]].concat())
        })
    }

    /// Starts a server with these settings.
    pub(super) fn serve(start: impl FnOnce(&[(&str, &str)]) -> Server) -> Plant {
        let files = tempfile::tempdir().unwrap();
        let path = |name: &str| text(&files.path().join(name));
        let authority = Authority::new(files.path(), "ca");
        Authority::new(files.path(), "stranger");
        let pair = authority.server("server");
        let users = path("users");
        let add = ["user", "add", "reader", "--role", "read", "--users", &users];
        run(
            &[&add[..], &["--password-stdin"]].concat(),
            PASSWORD.as_bytes(),
        )
        .code(0);
        let line = fs::read_to_string(&users).unwrap();
        let hash = line.trim().strip_prefix("reader:").unwrap();
        let hash = hash.strip_suffix(":read").unwrap();
        let lines = format!("{line}operator:{hash}:operate\nshipper:{hash}:ship\nclient:{hash}\n");
        fs::write(&users, lines).unwrap();
        fs::set_permissions(&users, fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(path("password"), PASSWORD).unwrap();
        fs::set_permissions(path("password"), fs::Permissions::from_mode(0o600)).unwrap();
        let (certificate, key) = (text(&pair.certificate), text(&pair.key));
        let server = start(&[
            ("admin", "https://127.0.0.1:0"),
            ("users", &users),
            ("tls_cert", &certificate),
            ("tls_key", &key),
        ]);
        Plant {
            address: admin_address(&server),
            server,
            files,
            config: trusting(&authority.certificate),
        }
    }

    pub(super) fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    pub(super) fn file(&self, name: &str) -> String {
        text(&self.files.path().join(name))
    }

    /// Sends a request over TLS with further header lines. Returns the status and the body.
    pub(super) fn ask(&self, method: &str, path: &str, headers: &str) -> (u16, String) {
        let host = self.address;
        self.send(&format!(
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\n{headers}Content-Length: 0\r\nConnection: close\r\n\r\n"
        ))
    }

    fn connect(&self) -> StreamOwned<ClientConnection, TcpStream> {
        let name = ServerName::try_from("localhost").unwrap();
        let connection = ClientConnection::new(self.config.clone(), name).unwrap();
        let socket = TcpStream::connect(self.address).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        StreamOwned::new(connection, socket)
    }

    /// A connection of a user who has got an answer.
    pub(super) fn keep_open(&self, user: &str) -> impl Read + use<> {
        let (stream, status) = self.begin(user, "GET /v1/session", "");
        assert_eq!(status, "200");
        stream
    }

    /// Sends the head of a request. Returns the connection and the status of the answer.
    pub(super) fn begin(
        &self,
        user: &str,
        request: &str,
        headers: &str,
    ) -> (impl Read + use<>, String) {
        let mut stream = self.connect();
        let login = basic(user, PASSWORD);
        let host = self.address;
        let head = format!("{request} HTTP/1.1\r\nHost: {host}\r\n{login}{headers}\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).unwrap();
        let status = String::from_utf8_lossy(&answer[9..]).into_owned();
        (stream, status)
    }

    pub(super) fn send(&self, request: &str) -> (u16, String) {
        let mut stream = self.connect();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = Vec::new();
        // The server may close without a close_notify.
        _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8(answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").expect("an HTTP response");
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, body.to_owned())
    }

    pub(super) fn as_user(&self, user: &str, method: &str, path: &str) -> (u16, String) {
        self.ask(method, path, &basic(user, PASSWORD))
    }

    /// Runs a command with contexts of its own, and no other settings.
    pub(super) fn run(&self, arguments: &[&str]) -> Ran {
        let mut command = command(arguments);
        command.env("XDG_CONFIG_HOME", self.files.path());
        command.current_dir(self.files.path());
        finish(command, b"")
    }

    /// Runs a command as a user. Flags name the store.
    pub(super) fn run_as(&self, user: &str, arguments: &[&str]) -> Ran {
        let (url, ca, password) = (self.url(), self.file("ca.crt"), self.file("password"));
        let login = ["--admin", &url, "--ca", &ca, "--user", user];
        let password = ["--password-file", &password];
        self.run(&[arguments, &login, &password].concat())
    }
}

pub(super) fn basic(user: &str, password: &str) -> String {
    let login = BASE64.encode(format!("{user}:{password}").as_bytes());
    format!("Authorization: Basic {login}\r\n")
}
