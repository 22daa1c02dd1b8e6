//! Certificates that are taken back while their owners are connected: these are disconnected, and nobody else is.

use std::{
    fs,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use statehouse_tests::{Lines, Publish, client::PATIENCE};

use crate::{
    papers::{Authority, Wanted},
    tls::{Encrypted, text},
};

/// A reload looks every second, and two cores may be busy.
const SOON: Duration = Duration::from_secs(5);

/// mosquitto_sub with a certificate, subscribed to `news`. It says what it hears, DISCONNECT included.
struct Subscriber {
    child: Child,
    says: Lines,
}

impl Subscriber {
    fn start(store: &Encrypted, name: &str) -> Subscriber {
        let file = |end: &str| store.directory.path().join(format!("{name}{end}"));
        // It would keep what it says to itself until that is some kilobytes.
        let mut command = Command::new("stdbuf");
        command.args(["-oL", "mosquitto_sub"]);
        command.args(["-V", "5", "-d", "-q", "1", "-t", "news", "-i", name]);
        command.args(["-h", "127.0.0.1", "-p", &store.address.port().to_string()]);
        command.arg("--cafile").arg(&store.authority.certificate);
        command.arg("--cert").arg(file(".crt"));
        command.arg("--key").arg(file(".key"));
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let says = Lines::follow(child.stdout.take().unwrap());
        let it = Subscriber { child, says };
        it.hears("SUBACK");
        it
    }

    fn hears(&self, what: &str) {
        let heard = self.says.wait(PATIENCE, |line| line.contains(what));
        assert!(heard.is_some(), "no {what:?} in {:#?}", self.says.all());
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        // It may have ended by itself.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

/// A store that takes certificates of two authorities.
struct Site {
    store: Encrypted,
    plant: Authority,
    office: Authority,
    /// What `--tls-client-ca` names.
    trusted: PathBuf,
}

impl Site {
    /// `further` are arguments after those that it takes anyway.
    fn start(further: impl FnOnce(&Authority, &Authority) -> Vec<String>) -> Site {
        let mut made = None;
        let store = Encrypted::start("mqtts", |directory, _| {
            let plant = Authority::new(directory, "plant");
            let office = Authority::new(directory, "office");
            for (by, name, serial) in [
                (&plant, "press", 7),
                (&plant, "lathe", 8),
                (&office, "desk", 7),
            ] {
                let until = 2100;
                by.client(&Wanted {
                    name,
                    until,
                    serial,
                });
            }
            let trusted = directory.join("trusted.crt");
            let both = [&plant, &office].map(|it| fs::read_to_string(&it.certificate).unwrap());
            fs::write(&trusted, both.concat()).unwrap();
            let mut arguments = vec![
                "--tls-client-ca".to_owned(),
                text(&trusted),
                // On the plain listener beside it, where the test publishes.
                "--allow-anonymous".to_owned(),
            ];
            arguments.extend(further(&plant, &office));
            made = Some((plant, office, trusted));
            arguments
        });
        let (plant, office, trusted) = made.unwrap();
        Site {
            store,
            plant,
            office,
            trusted,
        }
    }

    fn list(&self, name: &str) -> PathBuf {
        self.store.directory.path().join(name)
    }

    /// This one hears that it is not authorized, soon, and these others hear the news.
    fn expect_ended(&self, ended: &Subscriber, since: Instant, others: &[&Subscriber]) {
        // 0x87.
        ended.hears("DISCONNECT (135)");
        assert!(since.elapsed() < SOON, "it took {:?}", since.elapsed());
        let line = self.store.server.wait_for_log("is no longer valid");
        assert!(line.contains("statehouse::audit"), "{line}");
        let mut publisher = self.store.server.connect("publisher");
        publisher.publish(Publish::new("news", "still here").qos(1));
        for other in others {
            other.hears("still here");
            assert!(
                !other
                    .says
                    .all()
                    .iter()
                    .any(|line| line.contains("DISCONNECT"))
            );
        }
    }
}

#[test]
fn a_certificate_that_a_new_list_revokes_ends_its_connection() {
    let site = Site::start(|plant, office| {
        let lists = [(plant, "plant.crl"), (office, "office.crl")].map(|(by, name)| {
            let path = by.certificate.with_file_name(name);
            by.revoke(&path, &[66]);
            path
        });
        let arguments = lists
            .iter()
            .flat_map(|it| ["--tls-client-crl".to_owned(), text(it)]);
        arguments.collect()
    });
    let press = Subscriber::start(&site.store, "press");
    let lathe = Subscriber::start(&site.store, "lathe");
    // Of the same number, by another authority.
    let desk = Subscriber::start(&site.store, "desk");
    // A list that revokes nobody who is here changes nothing for them.
    site.office.revoke(&site.list("office.crl"), &[66, 67]);
    site.store.server.wait_for_log("certificates: read again");
    let since = Instant::now();
    site.plant.revoke(&site.list("plant.crl"), &[66, 7]);
    site.expect_ended(&press, since, &[&lathe, &desk]);
    // It is kept out from then on where its certificate is looked at first.
    site.store.get("nothing", Some("press")).code(3);
    site.store.server.wait_for_log("Revoked");
}

#[test]
fn an_authority_that_is_trusted_no_more_takes_its_clients_with_it() {
    let site = Site::start(|_, _| Vec::new());
    let press = Subscriber::start(&site.store, "press");
    let desk = Subscriber::start(&site.store, "desk");
    let since = Instant::now();
    fs::copy(&site.office.certificate, &site.trusted).unwrap();
    site.expect_ended(&press, since, &[&desk]);
    site.store.get("nothing", Some("press")).code(3);
    site.store.server.wait_for_log("UnknownIssuer");
}
