//! The administration of a running server over HTTP, by nothing but a socket: one request, one connection.

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    path::Path,
};

use serde_json::Value;

use crate::{client::PATIENCE, server::Server};

/// Where a server's administration listens, and what to show there.
pub struct Admin {
    address: String,
    token: String,
}

impl Admin {
    /// Of a server with the default data directory.
    pub fn of(server: &Server) -> Admin {
        Admin::at(&server.directory().join("statehouse-data"))
    }

    /// As the data directory says.
    pub fn at(data: &Path) -> Admin {
        let door = fs::read(data.join("admin")).expect("a running server says where to find it");
        let door: Value = serde_json::from_slice(&door).unwrap();
        let text = |name: &str| door[name].as_str().unwrap().to_owned();
        Admin {
            address: text("url").trim_start_matches("http://").to_owned(),
            token: text("token"),
        }
    }

    /// Where it is.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Sends a request; the status, and the body as it came.
    pub fn ask(&self, method: &str, path: &str, body: &[u8]) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut request = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            self.address,
            self.token,
            body.len()
        )
        .into_bytes();
        request.extend_from_slice(body);
        stream.write_all(&request).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").expect("an answer of HTTP");
        let status = head.split(' ').nth(1).and_then(|it| it.parse().ok());
        (status.expect("a status"), body.to_owned())
    }

    /// The JSON of a request that has to succeed.
    pub fn done(&self, method: &str, path: &str, body: &[u8]) -> Value {
        let (status, body) = self.ask(method, path, body);
        assert_eq!(status, 200, "{method} {path}: {body}");
        serde_json::from_str(&body).unwrap()
    }
}
