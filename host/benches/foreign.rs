//! Compares a store behind a foreign broker with a minimal native responder that echoes every
//! request. One run uses a Mosquitto with its defaults and then one with `set_tcp_nodelay true`.
//! The load of clients is the same for all:
//!
//! * `echo`: rumqttc as in its documentation, with the window of the store. It publishes the answer
//!   to the Response Topic and then acknowledges the request. It has no state, and loses its
//!   current work when a connection breaks.
//! * `memory`: `statehouse serve --broker` with `--durability memory`.
//! * `durable`: the same, with every write on disk before its answer.
//! * `embedded`: the store as its own broker, in memory.
//!
//! ```text
//! cargo bench -p statehouse --bench foreign                 # some minutes
//! cargo bench -p statehouse --bench foreign -- --rounds 9   # more rounds, tighter medians
//! cargo bench -p statehouse --bench foreign -- --seconds 1  # shorter ones
//! ```
//!
//! Rounds alternate, so that a noisy neighbour affects all targets. With its defaults, Mosquitto
//! delays an answer for some 40 ms until the client acknowledges the TCP segment of the previous
//! PUBACK (Nagle's algorithm). With few requests in flight, this delay dominates the result of
//! every responder.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use common::{Client, Running, Server, resp, run_clients};
use rumqttc::NetworkOptions;
use rumqttc::v5::mqttbytes::QoS;
use rumqttc::v5::mqttbytes::v5::{ConnectProperties, Packet, Publish, PublishProperties};
use rumqttc::v5::{AsyncClient, Event, MqttOptions};
use servers::{Figures, Process, mosquitto};
use statehouse_core::request::REQUEST_TOPIC;
use tokio::sync::mpsc;

mod common;
#[path = "rivals/servers.rs"]
#[allow(dead_code, reason = "only Mosquitto is started here")]
mod servers;

/// Clients, and requests in flight of each. Mosquitto queues at most a thousand in total.
const LOADS: [(usize, usize); 3] = [(1, 1), (50, 1), (50, 16)];
/// The default of `--broker-window`.
const WINDOW: u16 = 64;
/// The client id of all responders, so that the benchmark can clear their session.
const RESPONDER: &str = "bench-responder";
const WARM_UP: Duration = Duration::from_millis(500);

#[derive(Clone, Copy, PartialEq)]
enum Target {
    Echo,
    Memory,
    Durable,
    Embedded,
}

const TARGETS: [(&str, Target); 4] = [
    ("echo", Target::Echo),
    ("memory", Target::Memory),
    ("durable", Target::Durable),
    ("embedded", Target::Embedded),
];

fn main() {
    let (mut rounds, mut seconds) = (5, 3.0);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut number = || {
            let number = arguments.next().and_then(|it| it.parse::<f64>().ok());
            number.unwrap_or_else(|| panic!("{argument} takes a number"))
        };
        match argument.as_str() {
            "--rounds" => rounds = number() as usize,
            "--seconds" => seconds = number(),
            // This program again, as the responder.
            "--echo" => return echo(arguments.next().expect("--echo takes a port")),
            // Cargo adds this argument.
            "--bench" => {}
            other => panic!("unknown argument {other}; there are --rounds N and --seconds N"),
        }
    }
    // On a real disk, because the default temporary directory is in memory on some systems.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let round = Duration::from_secs_f64(seconds);
    println!(
        "SET of 64 bytes, a key for each client; medians of {rounds} rounds of {round:?}; the ratio is that of requests/s, round by round"
    );
    for (name, nodelay) in [("Mosquitto's defaults", false), ("set_tcp_nodelay", true)] {
        let broker = mosquitto(directory.path(), nodelay);
        let broker = broker.expect("Debian's package mosquitto is installed");
        println!("\n{name}\n");
        println!("| clients | in flight | | requests/s | p50 us | p99 us | ratio to echo |");
        println!("|---|---|---|---|---|---|---|");
        for (clients, in_flight) in LOADS {
            let load = |address: &str| load(address, clients, in_flight, round);
            for row in compare(&broker, directory.path(), rounds, load) {
                println!("| {clients} | {in_flight} {row}");
            }
        }
    }
}

/// Runs all targets under the same load. Returns a row for each.
fn compare(
    broker: &Process,
    directory: &Path,
    rounds: usize,
    load: impl Fn(&str) -> Figures,
) -> Vec<String> {
    let mut figures: [Vec<Figures>; 4] = Default::default();
    for _ in 0..rounds {
        for ((_, target), figures) in TARGETS.into_iter().zip(&mut figures) {
            let place = directory.join("place");
            std::fs::create_dir(&place).expect("a new directory");
            figures.push(measure(target, broker, &place, &load));
            std::fs::remove_dir_all(&place).expect("the directory of the store");
        }
    }
    let echoed = figures[0].clone();
    let rows = TARGETS
        .into_iter()
        .zip(figures)
        .map(|((name, _), figures)| {
            let ratios = figures.iter().zip(&echoed);
            let ratios = ratios.map(|(it, echo)| it.per_second / echo.per_second);
            let of = |figure: fn(&Figures) -> f64| median(figures.iter().map(figure).collect());
            format!(
                "| {name} | {:.0} | {:.0} | {:.0} | {:.2} |",
                of(|it| it.per_second),
                of(|it| it.p50_us),
                of(|it| it.p99_us),
                median(ratios.collect())
            )
        });
    rows.collect()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Starts a target, runs one round on it, and clears its session at the broker.
fn measure(
    target: Target,
    broker: &Process,
    place: &Path,
    load: impl Fn(&str) -> Figures,
) -> Figures {
    let url = format!("mqtt://{}", broker.address);
    let attached = |durability| {
        let arguments = ["--broker", &url, "--broker-client-id", RESPONDER];
        start_responder(
            Command::new(env!("CARGO_BIN_EXE_statehouse"))
                .args(["serve", "--log-filter", "warn", "--durability", durability])
                .args(arguments),
            place,
        )
    };
    let echo = || {
        let program = std::env::current_exe().expect("this program has a path");
        let port = broker.address.port().to_string();
        start_responder(Command::new(program).args(["--echo", &port]), place)
    };
    let (responder, server) = match target {
        Target::Echo => (Some(echo()), None),
        Target::Memory => (Some(attached("memory")), None),
        Target::Durable => (Some(attached("always")), None),
        Target::Embedded => {
            let server = Server::start(place, &["--durability", "memory"]);
            (None, Some(server))
        }
    };
    let broker = broker.address.to_string();
    let figures = load(server.as_ref().map_or(&broker, |it| &it.address));
    drop(responder);
    if target != Target::Embedded {
        // The session of this responder would queue the requests to the next one.
        drop(Client::connect(&broker, RESPONDER));
    }
    figures
}

/// Runs this many clients with `in_flight` requests each.
fn load(address: &str, clients: usize, in_flight: usize, round: Duration) -> Figures {
    let client = |id: usize| {
        let mut client = Client::connect(address, &format!("client{id}"));
        let set = resp(&[b"SET", format!("bench/{id}").as_bytes(), &[b'v'; 64]]);
        move || client.round_trips(std::iter::repeat_n(&set[..], in_flight))
    };
    let (micros, took) = run_clients(clients, client, WARM_UP, || thread::sleep(round));
    Figures {
        per_second: (micros.len() * in_flight) as f64 / took.as_secs_f64(),
        p50_us: micros[micros.len() / 2],
        p99_us: micros[micros.len() * 99 / 100],
        cpu_us: None,
    }
}

/// Starts a process that answers requests at the broker, and waits for its line `ready`.
fn start_responder(command: &mut Command, place: &Path) -> Running {
    let mut process = command
        .current_dir(place)
        .stdout(Stdio::piped())
        .spawn()
        .expect("cargo built the binary before the benchmark");
    let output = process.stdout.take().expect("it is piped");
    let mut lines = BufReader::new(output).lines().map_while(Result::ok);
    assert!(lines.any(|line| line == "ready"), "{command:?} ended");
    Running(process)
}

/// Answers every request with its own payload. Runs until it is killed.
fn echo(port: String) {
    let port = port.parse().expect("a port is a number");
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .expect("threads");
    runtime.block_on(async {
        let mut options = MqttOptions::new(RESPONDER, "127.0.0.1", port);
        let mut properties = ConnectProperties::new();
        properties.receive_maximum = Some(WINDOW);
        let mut network = NetworkOptions::new();
        network.set_tcp_nodelay(true);
        options
            .set_manual_acks(true)
            .set_connect_properties(properties)
            .set_network_options(network)
            .set_outgoing_inflight_upper_limit(WINDOW);
        let (client, mut events) = AsyncClient::new(options, 4096);
        // Unbounded, because the polling loop must not wait for the client, and Mosquitto 2.0 sends
        // more than the window.
        let (requests, received) = mpsc::unbounded_channel();
        tokio::spawn(answer(client.clone(), received));
        loop {
            match events.poll().await.expect("the broker stays") {
                Event::Incoming(Packet::ConnAck(_)) => {
                    let subscribed = client.subscribe(REQUEST_TOPIC, QoS::AtLeastOnce).await;
                    subscribed.expect("an empty queue has room");
                }
                Event::Incoming(Packet::SubAck(_)) => println!("ready"),
                Event::Incoming(Packet::Publish(request)) => {
                    requests.send(request).expect("the answering task runs");
                }
                _ => {}
            }
        }
    });
}

async fn answer(client: AsyncClient, mut requests: mpsc::UnboundedReceiver<Publish>) {
    while let Some(request) = requests.recv().await {
        let asked = request.properties.clone().unwrap_or_default();
        let topic = asked.response_topic.expect("requests have one");
        let properties = PublishProperties {
            correlation_data: asked.correlation_data,
            user_properties: asked.user_properties,
            ..PublishProperties::default()
        };
        let payload = request.payload.clone();
        let answered = client
            .publish_with_properties(topic, QoS::AtLeastOnce, false, payload, properties)
            .await;
        answered.expect("the polling loop runs");
        client.ack(&request).await.expect("the polling loop runs");
    }
}
