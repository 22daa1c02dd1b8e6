//! Tests the command line clients of Mosquitto.

use std::{
    io::Read,
    process::{Child, Command, Stdio},
};

use statehouse_tests::{
    Client, Publish, Ran, Server,
    command::finish,
    resp,
    store::{PREVIEW_TOPIC, REQUEST_TOPIC},
    wait::until,
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

/// Sends a request by mosquitto_rr. The payload is an argument, since mosquitto_rr of Debian 12
/// sends an empty payload with `-s` and `-f`.
fn ask(
    server: &Server,
    topic: &str,
    qos: &str,
    arguments: &[&str],
    properties: &[(&str, &str)],
) -> Ran {
    let payload = String::from_utf8(resp::array(arguments)).unwrap();
    let mut command = mosquitto(
        server,
        "mosquitto_rr",
        &[
            "-t",
            topic,
            "-e",
            "clients/rr/answer",
            "-q",
            qos,
            "-m",
            &payload,
            "-N",
            "-W",
            "20",
        ],
    );
    command.args(["-D", "publish", "correlation-data", "rr-1"]);
    for (name, value) in properties {
        command.args(["-D", "publish", "user-property", name, value]);
    }
    finish(command, b"")
}

#[test]
fn mosquitto_rr_gets_answers() {
    let server = Server::start();
    let now = statehouse_tests::Hlc::now(0).to_string();
    for qos in ["1", "2"] {
        let key = format!("key{qos}");
        let set = ask(
            &server,
            REQUEST_TOPIC,
            qos,
            &["SET", &key, "hello"],
            &[("__ts", &now)],
        );
        assert_eq!(set.code(0).text(), "+OK\r\n");
        let get = ask(&server, REQUEST_TOPIC, qos, &["GET", &key], &[]);
        assert_eq!(get.code(0).text(), "$5\r\nhello\r\n");
    }
    let get = ask(&server, PREVIEW_TOPIC, "1", &["GET", "key1"], &[]);
    assert_eq!(get.code(0).text(), "$5\r\nhello\r\n");
    let bad = ask(&server, REQUEST_TOPIC, "1", &["SET", "key1", "x"], &[]);
    assert_eq!(bad.code(0).text(), "-ERR missing timestamp\r\n");
}

/// A mosquitto_sub in the background. It is killed at the end of the test.
struct Subscriber(Child);

impl Drop for Subscriber {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Subscriber {
    /// Starts mosquitto_sub with these further arguments.
    fn start(server: &Server, arguments: &[&str]) -> Subscriber {
        let mut command = mosquitto(server, "mosquitto_sub", arguments);
        Subscriber(command.stdout(Stdio::piped()).spawn().unwrap())
    }

    /// Waits for the end of the process. Returns its output.
    fn output(&mut self) -> String {
        let mut output = String::new();
        let mut stdout = self.0.stdout.take().unwrap();
        stdout.read_to_string(&mut output).unwrap();
        output
    }
}

/// Publishes until the message has a subscriber, which receives it once.
fn publish_until_received(probe: &mut Client, topic: &str, payload: &str) {
    until(&format!("{topic} has a subscriber"), || {
        probe.publish(Publish::new(topic, payload).qos(1)).reason != 0x10
    });
}

#[test]
fn shared_subscription_alternates_between_members() {
    let server = Server::start();
    let mut publisher = server.connect("publisher");
    let mut workers = ["one", "two"].map(|own| {
        let arguments = format!("-t $share/workers/job/+ -t {own} -q 1 -C 6 -W 60");
        let worker = Subscriber::start(&server, &arguments.split(' ').collect::<Vec<_>>());
        publish_until_received(&mut publisher, own, "begin");
        worker
    });
    for n in 0..10 {
        publisher.publish(Publish::new("job/x", n.to_string()).qos(1));
    }
    let outputs = workers.each_mut().map(Subscriber::output);
    assert_eq!(
        outputs,
        ["begin\n0\n2\n4\n6\n8\n", "begin\n1\n3\n5\n7\n9\n"]
    );
}

#[test]
fn mosquitto_pub_reaches_mosquitto_sub() {
    let server = Server::start();
    let arguments = "-t room/+/light -q 1 -C 3 -W 60 -F".split(' ');
    let arguments: Vec<_> = arguments.chain(["%t %p"]).collect();
    let mut subscriber = Subscriber::start(&server, &arguments);
    publish_until_received(&mut server.connect("probe"), "room/0/light", "dim");
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
    assert_eq!(
        subscriber.output(),
        "room/0/light dim\nroom/1/light on\nroom/2/light off\n"
    );
}
