//! Owners of client certificates. The server must derive users and attributes from the certificate,
//! and apply the rules to them.

use std::fs;

use statehouse_tests::{Background, Ran, command::finish, wait::until};

use crate::{
    authority::Authority,
    tls::{Encrypted, text},
};

const RULES: &str = r#"
[[rules]]
principals.usernames = ["press"]
brokerResources = [{ method = "Connect" }]
stateStoreResources = [{ method = "ReadWrite", keyType = "Pattern", keys = ["press/*"] }]

[[rules]]
principals.attributes = [{ building = "17" }]
brokerResources = [{ method = "Connect" }]
stateStoreResources = [{ method = "Read", keyType = "Pattern", keys = ["building/*"] }]
"#;

/// A store with these rules and owners. Its clients may present the certificates `press` and
/// `lathe`.
struct Site(Encrypted);

impl Site {
    fn start(owners: &str) -> Site {
        Site(Encrypted::start("mqtts", |directory| {
            let clients = Authority::new(directory, "building 17, ca");
            clients.client("press", 1);
            clients.client("lathe", 2);
            let rules = directory.join("rules.toml");
            fs::write(&rules, RULES).unwrap();
            let mut arguments = vec![
                "--tls-client-ca".to_owned(),
                text(&clients.certificate),
                "--rules".to_owned(),
                text(&rules),
                "--certificate-users".to_owned(),
            ];
            arguments.push(match owners {
                "cn" => owners.to_owned(),
                table => {
                    let path = directory.join("owners.toml");
                    fs::write(&path, table).unwrap();
                    text(&path)
                }
            });
            arguments
        }))
    }

    /// Runs a command of the store's own client, with this certificate.
    fn ask(&self, certificate: Option<&str>, arguments: &[&str]) -> Ran {
        finish(self.0.command(certificate, arguments), b"")
    }
}

#[test]
fn owners_table_assigns_users_and_attributes() {
    let site = Site::start(
        r#"
        [[certificate]]
        subject = "CN = press"
        user = "press"

        [[certificate]]
        subject = 'CN=building 17\, ca'
        attributes = { building = "17" }
        "#,
    );
    site.ask(Some("press"), &["set", "press/a", "v"]).code(0);
    // The authority that issued both certificates has the attribute.
    site.ask(Some("press"), &["get", "building/a"]).code(1);
    site.ask(Some("lathe"), &["get", "building/a"]).code(1);
    site.ask(Some("lathe"), &["get", "press/a"])
        .fails(4, "not authorized");
    site.ask(Some("lathe"), &["set", "building/a", "v"]).code(4);
    let anonymous = site.ask(None, &["get", "building/a"]);
    assert_ne!(anonymous.code, Some(1), "{anonymous:?}");
    site.0
        .server
        .wait_for_log("anonymous clients are not let in");
}

/// Regression: a user or an attribute in the question removed the other one of the connection.
#[test]
fn explain_takes_the_rest_of_the_identity_from_the_connection() {
    let site = Site::start(
        r#"
        [[certificate]]
        subject = "CN=press"
        user = "press"

        [[certificate]]
        subject = 'CN=building 17\, ca'
        attributes = { building = "17" }
        "#,
    );
    let watch = ["watch", "press/a", "--client-id", "press-4"];
    let _watching = Background::start(&mut site.0.command(Some("press"), &watch));
    let explain = |more: &[&str]| {
        let explain = ["authz", "explain", "press-4", "GET"];
        site.0.server.run(&[&explain[..], more].concat())
    };
    until("the client is connected", || {
        let text = explain(&["press/a"]).text();
        text.contains("press-4 is connected; asked about as the user press, building=17")
    });
    explain(&["press/a", "--attribute", "line=1"]).code(0);
    explain(&["building/a", "--attribute", "line=1"]).code(1);
    explain(&["building/a", "--user", "other"]).code(0);
    explain(&["press/a", "--user", "other"]).code(1);
}

#[test]
fn common_name_is_used_as_the_user_name() {
    let site = Site::start("cn");
    site.ask(Some("press"), &["set", "press/a", "v"]).code(0);
    site.ask(Some("press"), &["get", "building/a"]).code(4);
    // No rule names this user.
    let lathe = site.ask(Some("lathe"), &["get", "building/a"]);
    assert_ne!(lathe.code, Some(1), "{lathe:?}");
    site.0.server.wait_for_log("user=\"lathe\"");
}
