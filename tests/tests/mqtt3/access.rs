//! Users, rules and limits of a client. MQTT 3.1.1 has return codes for CONNECT and SUBSCRIBE only.
//! The other refusals are an acknowledgement or the end of the connection.

use std::{fs, path::Path};

use statehouse_tests::{
    Client3, Connect, Publish, Server,
    command::add_user,
    packet3::{self, FAILURE},
};

use crate::scene::{Addresses, Broker, Scene, checks};

checks! {
    not mosquitto:
    connect_without_permission_gets_code_5,
    packet_above_the_size_limit_closes,
    publish_above_the_rate_limit_closes,
    publish_without_permission_is_acknowledged_and_dropped,
    subscribe_beyond_permission_or_limit_gets_0x80_in_order,
    will_without_permission_gets_code_5,
    wrong_password_gets_code_4,
}

/// Client ids of `anna` may use the topics below `CHECK/open/`.
const RULES: &str = r#"
[[rules]]
principals.usernames = ["anna"]
brokerResources = [
  { method = "Connect" },
  { method = "Publish", topics = ["+/open/#"] },
  { method = "Subscribe", topics = ["+/open/#"] },
]
"#;

const SETTINGS: [(&str, &str); 5] = [
    ("max_packet_bytes", "65536"),
    ("max_value_bytes", "1000"),
    ("max_key_bytes", "1000"),
    ("max_client_subscriptions", "3"),
    ("max_client_rate", "50"),
];

/// Starts Statehouse with users, rules and limits. Their files are in `directory`.
pub(crate) fn start(directory: &Path) -> (Broker, Addresses) {
    let [users, rules] = ["users", "rules.toml"].map(|it| directory.join(it));
    fs::write(&rules, RULES).unwrap();
    for (user, password) in [("anna", "a"), ("bert", "b")] {
        add_user(&users, user, password).code(0);
    }
    let files = [
        ("users", users.to_str().unwrap()),
        ("rules", rules.to_str().unwrap()),
    ];
    let server = Server::restartable(&[&files[..], &SETTINGS].concat());
    let at = Addresses::only(server.address());
    (Broker::Statehouse(Box::new(server)), at)
}

fn anna(scene: &Scene<'_>, who: &str) -> Client3 {
    scene.accept(&scene.clean(who).login("anna", "a"))
}

/// The return code of a CONNACK, after which the broker closes the connection.
fn refusal(scene: &Scene<'_>, connect: &Connect) -> u8 {
    let (mut client, code) = Client3::try_connect(scene.at.plain, connect);
    assert!(code > 0, "the broker accepts {connect:?}");
    client.expect_closed();
    assert_eq!(client.drain(), []);
    code
}

fn wrong_password_gets_code_4(scene: &Scene<'_>) {
    let client = scene.clean("client");
    assert_eq!(refusal(scene, &client.clone().login("anna", "b")), 4);
    assert_eq!(refusal(scene, &client.login("nobody", "a")), 4);
}

fn connect_without_permission_gets_code_5(scene: &Scene<'_>) {
    let client = scene.clean("client");
    assert_eq!(refusal(scene, &client.clone().login("bert", "b")), 5);
    // Anonymous clients are not allowed once there are users.
    assert_eq!(refusal(scene, &client), 5);
}

fn will_without_permission_gets_code_5(scene: &Scene<'_>) {
    let will = |topic: &str| {
        let will = Publish::new(&scene.topic(topic), "x");
        scene.clean("client").will(will, 0).login("anna", "a")
    };
    assert_eq!(refusal(scene, &will("closed")), 5);
    scene.accept(&will("open/will")).disconnect();
}

fn subscribe_beyond_permission_or_limit_gets_0x80_in_order(scene: &Scene<'_>) {
    let mut client = anna(scene, "client");
    let filters = [
        "open/1", "closed", "open/#", "#", "open/2", "open/3", "open/1",
    ];
    let filters = filters.map(|it| scene.topic(it));
    let filters: Vec<_> = filters
        .iter()
        .map(|it| &**it)
        .zip([2, 2, 1, 0, 0, 1, 1])
        .collect();
    client.send(&packet3::subscribe(9, &filters));
    // The fourth subscription is beyond the limit; a replaced one is not.
    let codes = vec![2, FAILURE, 1, FAILURE, 0, FAILURE, 1];
    assert_eq!(client.next().suback3(), (9, codes));
    client.publish(Publish::new(&scene.topic("open/1"), "x").qos(2));
    assert_eq!(client.next_publish().payload, b"x");
}

/// MQTT 3.1.1 has no way to report the refusal to the client.
fn publish_without_permission_is_acknowledged_and_dropped(scene: &Scene<'_>) {
    let mut subscriber = anna(scene, "subscriber");
    assert_eq!(subscriber.subscribe(&scene.topic("open/#"), 0), 0);
    let mut client = anna(scene, "client");
    for qos in 0..=2 {
        client.publish(
            Publish::new(&scene.topic("closed"), "x")
                .qos(qos)
                .retained(),
        );
    }
    client.publish(Publish::new(&scene.topic("open/a"), "x").qos(1));
    assert_eq!(subscriber.next_publish().topic, scene.topic("open/a"));
    subscriber.expect_nothing();
}

fn packet_above_the_size_limit_closes(scene: &Scene<'_>) {
    let mut client = anna(scene, "client");
    let topic = scene.topic("open/a");
    client.publish(Publish::new(&topic, vec![0; 60_000]).qos(1));
    // The broker may close the connection after the head of the packet.
    let _ = client.try_send(&Publish::new(&topic, vec![0; 70_000]).bytes3());
    client.expect_closed();
    assert_eq!(client.drain(), []);
}

/// An acknowledgement would say that the message was accepted. The client sends it again when it
/// has connected again.
fn publish_above_the_rate_limit_closes(scene: &Scene<'_>) {
    let mut client = anna(scene, "client");
    let publish = |id: u16| {
        let mut publish = Publish::new(&scene.topic("open/a"), "x").qos(1);
        publish.packet_id = id;
        publish.bytes3()
    };
    let _ = client.try_send(&(1..=500).map(publish).collect::<Vec<_>>().concat());
    client.expect_closed();
    let acknowledged: Vec<_> = client.drain().iter().map(|it| it.ack3()).collect();
    let count = u16::try_from(acknowledged.len()).unwrap();
    assert!((1..500).contains(&count), "{count}");
    assert!(acknowledged.into_iter().eq(1..=count));
}
