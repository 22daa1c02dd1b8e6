//! Users with passwords. The server must accept correct passwords only, must refuse others with a
//! reason, and must limit guesses without delaying other clients.

mod file;
mod guesses;
mod programs;

use std::{fs, thread};

use statehouse_tests::{
    Client, Connect, Server,
    client::PATIENCE,
    command::{command, finish_within},
    packet::{Ack, Publish, kind},
    store::{Store, hex},
    wait::until,
};

use file::UsersFile;

const OK: u8 = 0;
const BAD_CLIENT_ID: u8 = 0x85;
const WRONG: u8 = 0x86;
const NOT_AUTHORIZED: u8 = 0x87;
const BUSY: u8 = 0x89;
const TOO_OFTEN: u8 = 0x9F;

fn login(id: &str, user: Option<&str>, password: Option<&str>) -> Connect {
    let mut connect = Connect::new(id);
    connect.user_name = user.map(Into::into);
    connect.password = password.map(Into::into);
    connect
}

fn connack(server: &Server, connect: &Connect) -> Ack {
    Client::try_connect(server.address(), connect).1
}

fn connected(server: &Server, id: &str, user: &str, password: &str) -> Client {
    Client::connect(server.address(), &login(id, Some(user), Some(password)))
}

#[test]
fn only_correct_passwords_are_accepted_others_get_a_reason() {
    let file = UsersFile::new(&[
        ("anna", "secret"),
        ("bert", "Geheim: ü 1\n"),
        // Regression: the byte order mark was a part of the password.
        ("carl", "\u{feff}Geheim\r\n"),
    ]);
    let server = file.server(&[]);
    for (user, password, expected) in [
        (Some("anna"), Some("secret"), OK),
        (Some("anna"), Some("secret"), OK),
        (Some("bert"), Some("Geheim: ü 1"), OK),
        (Some("carl"), Some("Geheim"), OK),
        (Some("anna"), Some("Secret"), WRONG),
        (Some("anna"), Some(""), WRONG),
        (Some("anna"), None, WRONG),
        (Some("bert"), Some("secret"), WRONG),
        (Some("nobody"), Some("secret"), WRONG),
        // A password without a user name, which MQTT 5 allows.
        (None, Some("secret"), WRONG),
        (None, None, NOT_AUTHORIZED),
    ] {
        let answer = connack(&server, &login("a", user, password));
        assert_eq!(answer.reason, expected, "{user:?} {password:?}");
        assert_eq!(answer.text().is_empty(), expected == OK);
    }
    let anonymous = connack(&server, &Connect::new("a"));
    assert!(anonymous.text().contains("user name and a password"));
    server.wait_for_log("anonymous clients are not let in");
    let log = server.stderr().join("\n");
    assert!(log.contains("statehouse::audit"), "{log}");
    assert!(!log.contains("secret") && !log.contains("Geheim"), "{log}");
}

#[test]
fn allow_anonymous_accepts_clients_without_a_password() {
    let file = UsersFile::new(&[("anna", "secret")]);
    let server = file.server(&["--allow-anonymous"]);
    assert_eq!(connack(&server, &Connect::new("a")).reason, OK);
    assert_eq!(
        connack(&server, &login("a", Some("anna"), Some("x"))).reason,
        WRONG
    );
}

#[test]
fn hostile_user_names_and_client_ids_are_refused() {
    let file = UsersFile::new(&[("anna", "secret")]);
    let server = file.server(&[]);
    let before = server.memory_kib();
    // Each is a class of faults that brokers had: wildcards as patterns, lengths, names that are
    // paths.
    let long = "x".repeat(60_000);
    for name in ["#", "+", "$", "*", "anna/#", "../users", "anna:", "", &long] {
        let answer = connack(&server, &login("a", Some(name), Some("secret")));
        assert_eq!(answer.reason, WRONG, "{name}");
    }
    let answer = connack(&server, &login("a", Some("anna"), Some(&long)));
    assert_eq!(answer.reason, WRONG);
    let answer = connack(&server, &login(&long, Some("anna"), Some("secret")));
    assert_eq!(answer.reason, BAD_CLIENT_ID);
    // U+0000 in any string of CONNECT is malformed (section 1.5.4).
    for connect in [
        login("a\0", Some("anna"), Some("secret")),
        login("a", Some("anna\0"), Some("secret")),
    ] {
        assert_eq!(connack(&server, &connect).reason, 0x81);
    }
    // A client id is a plain name, too, and never a pattern.
    for id in ["#", "+", "clients/other"] {
        connected(&server, id, "anna", "secret").disconnect();
    }
    assert!(server.memory_kib() < before + 64 * 1024);
    let longest = server.stderr().iter().map(String::len).max();
    assert!(longest.unwrap() < 2000, "{longest:?}");
}

#[test]
fn subscription_to_foreign_answers_is_refused() {
    let file = UsersFile::new(&[("anna", "secret")]);
    let server = file.server(&[]);
    let mut client = connected(&server, "me", "anna", "secret");
    for (filter, expected) in [
        ("clients/me/answers", 1),
        ("news/#", 1),
        ("clients/you/answers", NOT_AUTHORIZED),
        ("clients/+/answers", NOT_AUTHORIZED),
        ("#", NOT_AUTHORIZED),
        ("$share/group/clients/you/answers", NOT_AUTHORIZED),
        ("$share/group/clients/me/answers", 1),
    ] {
        assert_eq!(client.subscribe(filter, 1), expected, "{filter}");
    }
}

/// The response topics of the Go client contain its client id in hexadecimal. Another client may
/// have that text as its client id.
#[test]
fn client_id_equal_to_foreign_hex_gets_no_foreign_answers() {
    let file = UsersFile::new(&[("anna", "a"), ("eve", "e")]);
    let server = file.server(&[]);
    let name = hex(b"press-4");
    let mut clients =
        [("press-4", "anna", "a"), (&*name, "eve", "e")].map(|(id, user, password)| {
            let mut client = connected(&server, id, user, password);
            let granted = client.subscribe(&format!("clients/{name}/#"), 1);
            assert_eq!(granted, 1, "{id} owns the topic");
            let granted = client.subscribe(&format!("$share/g/clients/{name}/#"), 1);
            assert_eq!(granted, 1, "{id} owns the topic");
            Store::on(client, id)
        });
    for requester in [0, 1] {
        for _ in 0..3 {
            let mut request = clients[requester].command(&["GET", "key"]);
            request.response_topic = Some(format!("clients/{name}/answers"));
            let id = clients[requester].client.start(request.publish());
            // One answer for its subscription, and one for its group.
            for _ in 0..2 {
                clients[requester].client.take_publish("clients/");
            }
            clients[requester].client.take_ack(kind::PUBACK, id);
        }
        clients[1 - requester].client.expect_nothing();
    }
}

/// A session must never be resumed by another user, even over a crash.
#[test]
fn session_is_resumed_only_by_its_user() {
    let file = UsersFile::new(&[("anna", "a"), ("bert", "b")]);
    let mut server = file.server(&["--allow-anonymous"]);
    let resume = |server: &Server, user: Option<&str>| {
        let mut connect = Connect::resume("press", 600);
        connect.user_name = user.map(Into::into);
        connect.password = user.map(|user| user[..1].into());
        Client::connect(server.address(), &connect)
    };
    let mut anna = resume(&server, Some("anna"));
    assert_eq!(anna.subscribe("news", 1), 1);
    anna.abort();
    server.kill_and_restart();
    let mut publisher = server.connect("publisher");
    let news = |publisher: &mut Client| {
        let publish = Publish::new("news", "secret").qos(1);
        publisher.publish(publish).reason
    };
    assert_eq!(news(&mut publisher), OK);
    let mut anna = resume(&server, Some("anna"));
    assert!(anna.session_present());
    assert_eq!(anna.take_publish("news").payload, b"secret");
    anna.abort();
    assert_eq!(news(&mut publisher), OK);
    // An anonymous client is another user, too.
    for user in [Some("bert"), None] {
        let mut other = resume(&server, user);
        assert!(!other.session_present(), "{user:?}");
        other.expect_nothing();
        assert_eq!(other.subscribe("news", 1), 1);
        other.abort();
    }
    // The first authenticated user takes over a session of an anonymous client.
    assert!(resume(&server, Some("bert")).session_present());
    assert!(!resume(&server, Some("anna")).session_present());
}

/// Regression: the command tried again for ever without a word, and its attempts counted against
/// other users of the address.
#[test]
fn watch_of_a_removed_user_ends() {
    let file = UsersFile::new(&[("anna", "a")]);
    let server = file.server(&[]);
    let port = server.port().to_string();
    let mut watch = command(&["watch", "key", "--user", "anna", "--port", &port]);
    watch.env("STATEHOUSE_PASSWORD", "a");
    let removed = thread::spawn(move || finish_within(watch, b"", PATIENCE));
    until("the user watches", || server.metric("watches") == 1);
    file.user(&["remove", "anna"], "").code(0);
    let ended = removed.join().unwrap().code(4);
    ended.says("wrong user name or password");
}

#[test]
fn changed_users_file_disconnects_affected_clients() {
    let file = UsersFile::new(&[("anna", "a"), ("bert", "b"), ("carl", "c")]);
    let server = file.server(&[]);
    let mut anna = connected(&server, "anna", "anna", "a");
    let mut bert = connected(&server, "bert", "bert", "b");
    let mut carl = connected(&server, "carl", "carl", "c");
    file.user(&["remove", "anna"], "").code(0);
    anna.expect_disconnect(NOT_AUTHORIZED);
    let again = || connack(&server, &login("anna", Some("anna"), Some("a"))).reason;
    assert_eq!(again(), WRONG);
    // A changed password ends the connections that used the old one.
    file.add("bert", "new").code(0);
    bert.expect_disconnect(NOT_AUTHORIZED);
    connected(&server, "bert", "bert", "new").disconnect();
    // A malformed file changes nothing.
    let good = fs::read(file.path()).unwrap();
    fs::write(file.path(), "carl:no hash\n").unwrap();
    server.wait_for_log("line 1 of ");
    carl.ping();
    connected(&server, "bert", "bert", "new").disconnect();
    // SIGHUP makes the server read the file at once.
    fs::write(file.path(), good).unwrap();
    file.add("anna", "back").code(0);
    server.reload();
    connected(&server, "anna", "anna", "back").disconnect();
    carl.ping();
}
