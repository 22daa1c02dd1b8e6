//! The commands of mosquitto, as people type them.

use std::process::{Child, Command, Stdio};

use statehouse_tests::{
    Ran, Server,
    command::finish,
    resp,
    store::{PREVIEW_TOPIC, REQUEST_TOPIC},
};

/// `program -V 5 -h 127.0.0.1 -p PORT …`
fn mosquitto(server: &Server, program: &str, arguments: &[&str]) -> Command {
    let port = server.port().to_string();
    let mut command = Command::new(program);
    command
        .args(["-V", "5", "-h", "127.0.0.1", "-p", &port])
        .args(arguments);
    command
}

/// A request through mosquitto_rr, its payload from standard input.
fn ask(server: &Server, topic: &str, qos: &str, arguments: &[&[u8]], properties: &[&str]) -> Ran {
    let response = format!("clients/rr-{}/answer", std::process::id());
    let mut command = mosquitto(
        server,
        "mosquitto_rr",
        &[
            "-t", topic, "-e", &response, "-q", qos, "-s", "-N", "-W", "20",
        ],
    );
    command.args(["-D", "publish", "correlation-data", "rr-1"]);
    for pair in properties.chunks(2) {
        command.args(["-D", "publish", "user-property", pair[0], pair[1]]);
    }
    finish(command, &resp::array(arguments))
}

#[test]
fn requests_by_mosquitto_rr() {
    let server = Server::start();
    let now = statehouse_tests::Hlc::now(0).to_string();
    for qos in ["1", "2"] {
        let key = format!("key{qos}");
        let set = ask(
            &server,
            REQUEST_TOPIC,
            qos,
            &[b"SET", key.as_bytes(), b"hello"],
            &["__ts", &now],
        );
        assert_eq!(set.code(0).text(), "+OK\r\n");
        let get = ask(&server, REQUEST_TOPIC, qos, &[b"GET", key.as_bytes()], &[]);
        assert_eq!(get.code(0).text(), "$5\r\nhello\r\n");
    }
    let get = ask(&server, PREVIEW_TOPIC, "1", &[b"GET", b"key1"], &[]);
    assert_eq!(get.code(0).text(), "$5\r\nhello\r\n");
    let bad = ask(&server, REQUEST_TOPIC, "1", &[b"SET", b"key1", b"x"], &[]);
    assert_eq!(bad.code(0).text(), "-ERR missing timestamp\r\n");
}

/// A subscriber in the background, stopped with the test.
struct Subscriber(Child);

impl Drop for Subscriber {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn publish_and_subscribe() {
    let server = Server::start();
    let subscriber = mosquitto(
        &server,
        "mosquitto_sub",
        &[
            "-t",
            "room/+/light",
            "-q",
            "1",
            "-C",
            "2",
            "-F",
            "%t %p",
            "-W",
            "30",
            "-d",
        ],
    )
    .stdout(Stdio::piped())
    .stderr(Stdio::null())
    .spawn()
    .unwrap();
    let mut subscriber = Subscriber(subscriber);
    // Its own debug line says when it is subscribed.
    let mut lines =
        std::io::BufRead::lines(std::io::BufReader::new(subscriber.0.stdout.take().unwrap()))
            .map(Result::unwrap);
    lines
        .by_ref()
        .find(|line| line.starts_with("Subscribed"))
        .expect("it subscribes");
    for (topic, payload) in [
        ("room/1/light", "on"),
        ("room/1/heat", "21"),
        ("room/2/light", "off"),
    ] {
        let publish = mosquitto(
            &server,
            "mosquitto_pub",
            &["-t", topic, "-m", payload, "-q", "1"],
        );
        finish(publish, b"").code(0);
    }
    let heard: Vec<String> = lines.filter(|line| line.starts_with("room/")).collect();
    assert_eq!(heard, ["room/1/light on", "room/2/light off"]);
}
