//! Other projects' clients with MQTT 3.1.1: each publishes and subscribes at every QoS, has a
//! retained message and a will, and resumes its session over a reconnect and a restart.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use statehouse_tests::{Background, Client3, Publish, command::finish};

use crate::scene::{Scene, checks};

checks! {
    mosquitto_clients_at_their_default_version,
    mqtt_js_client,
    paho_c_client,
    paho_python_client,
}

/// A client that has subscribed to the wills of a check.
fn wills(scene: &Scene<'_>) -> Client3 {
    let mut wills = scene.connect("wills");
    assert_eq!(wills.subscribe(&scene.topic("will"), 1), 1);
    wills
}

/// Publishes a message at QoS 1 and one at QoS 2 for a session without a connection.
fn queue_messages(scene: &Scene<'_>) {
    let mut publisher = scene.connect("publisher");
    for qos in 1..=2 {
        let topic = scene.topic(&format!("q{qos}"));
        publisher.publish(Publish::new(&topic, format!("queued {qos}")).qos(qos));
    }
}

/// Runs a program of `clients/` before and after a restart of the broker.
fn library(scene: &Scene<'_>, program: &dyn Fn() -> Command) {
    let at = scene.at.plain;
    let command = |part: &str| {
        let mut command = program();
        command.args([at.ip().to_string(), at.port().to_string()]);
        command.args([scene.name, part]);
        command
    };
    let mut wills = wills(scene);
    let first = Background::start(&mut command("first"));
    first.wait_for("ready");
    wills.expect_nothing();
    drop(first);
    assert_eq!(wills.next_publish().payload, b"died");
    queue_messages(scene);
    scene.restart();
    let ran = finish(command("second"), b"").code(0);
    assert_eq!(ran.text(), "done\n");
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn script(name: &str) -> PathBuf {
    workspace().join("tests/tests/mqtt3/clients").join(name)
}

fn paho_python_client(scene: &Scene<'_>) {
    let installed = workspace().join("target/venv/bin/python").into_os_string();
    let python = std::env::var_os("STATEHOUSE_TEST_PYTHON").unwrap_or(installed);
    library(scene, &|| {
        let mut command = Command::new(&python);
        command.arg("-B").arg(script("paho_python.py"));
        command
    });
}

fn mqtt_js_client(scene: &Scene<'_>) {
    library(scene, &|| {
        let mut command = Command::new("node");
        command.arg(script("mqtt_js.mjs"));
        command
    });
}

fn paho_c_client(scene: &Scene<'_>) {
    let program = scene.directory.join("paho_c");
    let mut compiler = Command::new("cc");
    compiler.args(["-Wall", "-Werror", "-o"]).arg(&program);
    compiler.arg(script("paho_c.c")).arg("-lpaho-mqtt3c");
    finish(compiler, b"").code(0);
    library(scene, &|| Command::new(&program));
}

/// The default of Debian's mosquitto_pub and mosquitto_sub is MQTT 3.1.1.
fn mosquitto_clients_at_their_default_version(scene: &Scene<'_>) {
    let at = scene.at.plain;
    let (host, port) = (at.ip().to_string(), at.port().to_string());
    let address = ["-h", &host, "-p", &port];
    let client = |program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        command.args(address).args(arguments);
        command
    };
    let topics = ["q0", "q1", "q2", "retained", "will"].map(|it| scene.topic(it));
    let [q0, q1, q2, retained, will] = topics.each_ref().map(|it| &**it);
    let id = scene.id("client");
    let lasting = ["-c", "-i", &id, "-q", "2", "-t", q0, "-t", q1, "-t", q2];
    let lasting = [&lasting[..], &["-F", "%q %r %p"]].concat();
    let dying = ["--will-topic", will, "--will-payload", "died"];
    let dying = [&dying[..], &["--will-qos", "1", "--will-retain", "-d"]].concat();
    let publish = |topic: &str, qos: &str, payload: &str, further: &[&str]| {
        let arguments = [&["-t", topic, "-q", qos, "-m", payload], further].concat();
        finish(client("mosquitto_pub", &arguments), b"").code(0);
    };
    let receive = |arguments: &[&str]| {
        finish(client("mosquitto_sub", arguments), b"")
            .code(0)
            .text()
    };

    let mut wills = wills(scene);
    // mosquitto_sub writes its log to a pipe at its end only.
    let first = [&["-oL", "mosquitto_sub"], &address[..], &lasting, &dying].concat();
    let mut stdbuf = Command::new("stdbuf");
    stdbuf.args(first);
    let first = Background::start(&mut stdbuf);
    first.wait_for("Subscribed");
    for (topic, qos) in [(q0, "0"), (q1, "1"), (q2, "2")] {
        publish(topic, qos, "hello", &[]);
        first.wait_for(&format!("{qos} 0 hello"));
    }
    publish(retained, "1", "kept", &["-r"]);
    let got = receive(&["-t", retained, "-q", "2", "-C", "1", "-F", "%q %r %p"]);
    assert_eq!(got, "1 1 kept\n");
    wills.expect_nothing();
    drop(first);
    assert_eq!(wills.next_publish().payload, b"died");
    queue_messages(scene);
    scene.restart();
    let got = receive(&[&lasting[..], &["-C", "2"]].concat());
    assert_eq!(got, "1 0 queued 1\n2 0 queued 2\n");
    let got = receive(&["-t", will, "-q", "1", "-C", "1", "-F", "%q %r %p"]);
    assert_eq!(got, "1 1 died\n");
}
