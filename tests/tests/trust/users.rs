//! Users with passwords. The server must accept correct passwords only, must refuse others with a
//! reason, and must limit guesses without delaying other clients.

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use statehouse_tests::{
    Client, Connect, Ran, Server,
    client::PATIENCE,
    command,
    command::{finish, subcommands},
    packet::{Ack, Publish, kind},
    run, run_in,
    store::{Store, hex},
};
use tempfile::TempDir;

use crate::official;

const OK: u8 = 0;
const BAD_CLIENT_ID: u8 = 0x85;
const WRONG: u8 = 0x86;
const NOT_AUTHORIZED: u8 = 0x87;
const BUSY: u8 = 0x89;
const TOO_OFTEN: u8 = 0x9F;

/// A users file in a directory of its own.
struct UsersFile {
    directory: TempDir,
}

impl UsersFile {
    fn new(users: &[(&str, &str)]) -> UsersFile {
        let file = UsersFile {
            directory: tempfile::tempdir().unwrap(),
        };
        for (name, password) in users {
            file.add(name, password).code(0);
        }
        file
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("users")
    }

    fn user(&self, arguments: &[&str], stdin: &str) -> Ran {
        let path = self.path();
        let mut all = vec!["user"];
        all.extend(arguments);
        all.extend(["--users", path.to_str().unwrap()]);
        run(&all, stdin.as_bytes())
    }

    fn add(&self, name: &str, password: &str) -> Ran {
        self.user(&["add", name, "--password-stdin"], password)
    }

    fn server(&self, further: &[&str]) -> Server {
        let path = self.path();
        let mut arguments = vec!["--users", path.to_str().unwrap()];
        arguments.extend(further);
        Server::with("", &arguments)
    }
}

fn take_connack(client: &mut Client) -> Ack {
    client
        .take("CONNACK", |it| it.kind() == kind::CONNACK)
        .ack()
}

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

/// Connects from another address of loopback.
fn open_from(from: IpAddr, server: SocketAddr) -> Client {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let stream = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::new(from, 0)).unwrap();
        socket.connect(server).await.unwrap().into_std().unwrap()
    });
    stream.set_nonblocking(false).unwrap();
    Client::on(stream)
}

#[test]
fn only_correct_passwords_are_accepted_others_get_a_reason() {
    let file = UsersFile::new(&[("anna", "secret"), ("bert", "Geheim: ü 1\n")]);
    let server = file.server(&[]);
    for (user, password, expected) in [
        (Some("anna"), Some("secret"), OK),
        (Some("anna"), Some("secret"), OK),
        (Some("bert"), Some("Geheim: ü 1"), OK),
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
fn thousand_password_guesses_delay_no_other_client() {
    let file = UsersFile::new(&[("anna", "secret")]);
    let server = file.server(&[]);
    let before = server.memory_kib();
    let address = server.address();
    let connect = login("guess", Some("anna"), Some("wrong")).bytes();
    let mut guesses: Vec<_> = (0..1000)
        .map(|_| {
            let mut client = Client::open(address);
            client.send(&connect);
            client
        })
        .collect();
    // A client from another address connects while the guesses wait for their answers. The server
    // refuses a CONNECT after ten seconds, so an accepted client has not waited long.
    let mut other = open_from("127.0.0.2".parse().unwrap(), address);
    other.send(&login("anna", Some("anna"), Some("secret")).bytes());
    let answer = take_connack(&mut other);
    let memory = server.memory_kib();
    assert_eq!(answer.reason, OK, "{}", answer.text());
    assert!(memory < before + 100 * 1024, "{before} KiB, then {memory}");
    let reasons: Vec<_> = guesses
        .iter_mut()
        .map(|it| take_connack(it).reason)
        .collect();
    let count = |reason| reasons.iter().filter(|it| **it == reason).count();
    assert_eq!(count(OK), 0);
    assert!(count(WRONG) < 60, "{} were checked", count(WRONG));
    assert!(count(TOO_OFTEN) > 900, "{reasons:x?}");
    // The server has verified anna's password before, so it accepts anna even from the address of
    // the guesses.
    connected(&server, "another", "anna", "secret").ping();
    other.ping();
}

/// The flood fills the queue of password checks, and uses up the allowed guesses of the user and of
/// one address.
#[test]
fn wrong_password_flood_does_not_refuse_a_verified_user() {
    let file = UsersFile::new(&[("anna", "secret")]);
    let server = file.server(&[]);
    let address = server.address();
    connected(&server, "first", "anna", "secret").disconnect();
    let mut flood: Vec<_> = (0..400_u16)
        .map(|number| {
            // No address reaches its limit, except the address of the user.
            let from = match number {
                0..40 => address.ip(),
                _ => IpAddr::from([127, 0, 1, (number / 15) as u8]),
            };
            open_from(from, address)
        })
        .collect();
    // All connections are open before the first guess, so that the guesses outrun their checks.
    for (number, client) in flood.iter_mut().enumerate() {
        let name = format!("name-{number}");
        let user = if number % 2 == 0 { "anna" } else { &name };
        client.send(&login(&name, Some(user), Some("wrong")).bytes());
    }
    for attempt in 0..50 {
        let connect = login(&format!("again-{attempt}"), Some("anna"), Some("secret"));
        assert_eq!(connack(&server, &connect).reason, OK, "attempt {attempt}");
    }
    // The last guesses found the queue full, so their answers arrive at once.
    let last = flood[350..].iter_mut();
    let reasons: Vec<_> = last.map(|it| take_connack(it).reason).collect();
    assert!(
        reasons.contains(&BUSY),
        "the queue was never full: {reasons:x?}"
    );
    assert!(
        reasons.contains(&TOO_OFTEN) && !reasons.contains(&OK),
        "{reasons:x?}"
    );
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
    server.kill();
    server.restart();
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
    server.signal("HUP");
    server.wait_for_log("SIGHUP");
    let end = Instant::now() + PATIENCE;
    let back = || connack(&server, &login("anna", Some("anna"), Some("back"))).reason;
    while back() != OK {
        assert!(Instant::now() < end, "anna is still refused");
        thread::sleep(Duration::from_millis(300));
    }
    carl.ping();
}

#[test]
fn official_client_logs_in_with_its_password() {
    let file = UsersFile::new(&[("anna", "secret")]);
    let server = file.server(&[]);
    let credentials = |password: &'static str| {
        move |it: azure_iot_operations_mqtt::aio::connection_settings::MqttConnectionSettingsBuilder| {
            it.username("anna".to_owned()).password(password.to_owned())
        }
    };
    official::with_client(&server, "official", credentials("secret"), async |store| {
        official::set(&store, "key", "value").await;
    });
    let refused = official::with_client(&server, "guesser", credentials("wrong"), async |store| {
        official::is_answered(&store, Duration::from_secs(2)).await
    });
    assert!(!refused);
    server.wait_for_log("client=guesser");
}

#[test]
fn mosquitto_pub_logs_in_with_its_password() {
    let file = UsersFile::new(&[("anna", "secret")]);
    let server = file.server(&[]);
    let port = server.port().to_string();
    let publish = |login: &[&str]| {
        let mut command = Command::new("mosquitto_pub");
        command.args(["-V", "5", "-h", "127.0.0.1", "-p", &port, "-q", "1"]);
        command.args(["-t", "topic", "-m", "hello"]).args(login);
        finish(command, b"")
    };
    publish(&["-u", "anna", "-P", "secret"]).code(0);
    let wrong = publish(&["-u", "anna", "-P", "wrong"]);
    assert_ne!(wrong.code, Some(0));
    wrong.says("user name or password");
    let anonymous = publish(&[]);
    assert_ne!(anonymous.code, Some(0));
    anonymous.says("authori");
}

#[test]
fn command_with_a_wrong_password_is_refused_in_words() {
    let file = UsersFile::new(&[("anna", "secret")]);
    let server = file.server(&[]);
    let port = server.port().to_string();
    let get = |password: &str| {
        let mut command = command(&["get", "k", "--user", "anna", "--port", &port]);
        command.env("STATEHOUSE_PASSWORD", password);
        finish(command, b"")
    };
    get("secret").code(1).says("k does not exist");
    get("wrong").code(4).says("wrong user name or password");
    let anonymous = finish(command(&["get", "k", "--port", &port]), b"");
    anonymous.code(4).says("not authorized");
}

/// Every command that logs in at the broker of a store.
const LOGGING_IN: [&[&str]; 13] = [
    &["bench", "--duration", "1s"],
    &["call", "GET", "k"],
    &["del", "k"],
    &["export"],
    &["get", "k"],
    &["import"],
    &["lock", "k", "--status"],
    &[
        "policy",
        "push",
        "--key",
        "k.key",
        "--store",
        "s",
        "--rollback",
    ],
    &["scan"],
    &["set", "k", "v"],
    &["vdel", "k", "v"],
    &["watch", "k"],
    &["lock", "k", "--holder", "h", "--", "true"],
];

#[test]
fn every_command_refuses_a_wrong_password_in_words() {
    let logs_in = |flags: &str| {
        flags.contains("[--user]") && (flags.contains("[--port]") || flags.contains("[--broker]"))
    };
    for (name, _) in subcommands().iter().filter(|(_, flags)| logs_in(flags)) {
        let has = |it: &&[&str]| format!("{} ", it.join(" ")).starts_with(&format!("{name} "));
        assert!(LOGGING_IN.iter().any(has), "{name} is not tested");
    }
    let file = UsersFile::new(&[("anna", "secret")]);
    let server = file.server(&[]);
    let here = file.directory.path();
    run_in(here, &["policy", "keygen", "k"], b"").code(0);
    for arguments in LOGGING_IN {
        let place = match arguments[1..].first() {
            Some(&"push") => [
                "--broker".to_owned(),
                format!("127.0.0.1:{}", server.port()),
            ],
            _ => ["--port".to_owned(), server.port().to_string()],
        };
        // Options come first, since `--` in the arguments would end them.
        let at = if arguments[0] == "policy" { 2 } else { 1 };
        let mut command = command(&arguments[..at]);
        command.args(&place).args(["--user", "anna"]);
        command.args(&arguments[at..]).current_dir(here);
        command.env("STATEHOUSE_PASSWORD", "wrong");
        let ran = finish(command, b"").code(4);
        assert!(ran.stdout.is_empty(), "{ran:?}");
        ran.says("wrong user name or password");
    }
    // The store does not check further passwords from this address for a while.
    let mut attempts = (0..17).map(|_| {
        let mut get = command(&["get", "k", "--user", "bert", "--port"]);
        get.arg(server.port().to_string());
        get.env("STATEHOUSE_PASSWORD", "wrong");
        finish(get, b"").code(4)
    });
    let is_wrong = |ran: &Ran| ran.stderr.contains("wrong user name or password");
    let often = attempts.find(|ran| !is_wrong(ran)).unwrap();
    assert!(often.stderr.contains("too many logins failed"), "{often:?}");
    assert!(!often.stderr.contains("statehouse serve"), "{often:?}");
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

#[test]
fn user_command_maintains_the_users_file() {
    let file = UsersFile::new(&[]);
    file.add("anna", "secret").code(0).says("added anna");
    assert_eq!(mode(&file.path()), 0o600);
    let text = fs::read_to_string(file.path()).unwrap();
    assert!(
        text.starts_with("anna:$argon2id$v=19$m=19456,t=2,p=1$"),
        "{text}"
    );
    assert!(!text.contains("secret"));
    fs::write(file.path(), format!("# people\n{text}\n")).unwrap();
    fs::set_permissions(file.path(), fs::Permissions::from_mode(0o640)).unwrap();
    file.add("bert", "secret\nmore").code(0);
    file.add("anna", "other").code(0).says("changed anna");
    assert_eq!(file.user(&["list"], "").code(0).text(), "anna\nbert\n");
    let changed = fs::read_to_string(file.path()).unwrap();
    assert!(
        changed.starts_with("# people\nanna:$argon2id$"),
        "{changed}"
    );
    assert!(
        !changed.contains(text.trim()),
        "the old hash must be removed"
    );
    // The command keeps the permissions of the file.
    assert_eq!(mode(&file.path()), 0o640);
    // A changed password keeps the role, and a changed role keeps the password.
    let line = |name: &str| {
        let text = fs::read_to_string(file.path()).unwrap();
        let mut lines = text.lines().filter_map(|line| line.strip_prefix(name));
        lines.next().unwrap().to_owned()
    };
    let plain = line("anna:");
    file.user(&["role", "anna", "operate"], "").code(0);
    assert_eq!(line("anna:"), format!("{plain}:operate"));
    file.add("anna", "third").code(0);
    assert!(line("anna:").ends_with(":operate") && !line("anna:").contains(&plain));
    let listed = file.user(&["list"], "").code(0).text();
    assert_eq!(listed, "anna\toperate\nbert\n");
    file.user(&["role", "anna", "none"], "").code(0);
    assert_eq!(file.user(&["list"], "").code(0).text(), "anna\nbert\n");
    file.user(&["role", "carl", "read"], "")
        .code(1)
        .says("no user carl");
    file.user(&["role", "anna", "root"], "")
        .code(2)
        .says("no role");
    file.user(&["remove", "anna"], "").code(0);
    file.user(&["remove", "anna"], "")
        .code(1)
        .says("no user anna");
    assert_eq!(file.user(&["list"], "").code(0).text(), "bert\n");

    file.add("", "secret").code(2).says("a user name has");
    file.add("a:b", "secret").code(2).says("a user name has");
    file.add("carl", "").code(2).says("the password is empty");
    file.add("carl", "\nsecret")
        .code(2)
        .says("the password is empty");
    let long = "x".repeat(2000);
    file.add("carl", &long).code(2).says("at most 1024 bytes");
    file.user(&["add", "carl"], "secret")
        .code(2)
        .says("--password-stdin");
    assert_eq!(file.user(&["list"], "").code(0).text(), "bert\n");
}

#[test]
fn bad_users_file_prevents_the_start_with_advice() {
    let file = UsersFile::new(&[("anna", "secret")]);
    let path = file.path();
    let serve = || {
        let mut serve = command(&["serve", "--listen", "127.0.0.1:0", "--users"]);
        serve.arg(&path).current_dir(file.directory.path());
        finish(serve, b"").code(2)
    };
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    serve().says("chmod 600");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(&path, "anna:secret\n").unwrap();
    serve().says("line 1 of").says("statehouse user add");
    fs::remove_file(&path).unwrap();
    serve().says("cannot read");
    let behind = [
        "serve",
        "--broker",
        "mqtt://127.0.0.1:1",
        "--users",
        "users",
    ];
    run(&behind, b"").code(2).says("configure them there");
}
