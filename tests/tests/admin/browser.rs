//! The page of the admin API in a real browser, with a store under load: each view, each action,
//! what it shows of failures, and that it neither fails nor asks another host.

mod details;
mod screen;

use std::{thread, time::Duration};

use serde_json::json;
use statehouse_tests::policies;

use screen::{Screen, TOKEN};

#[test]
fn page_shows_the_store_changes_keys_and_survives_losses() {
    let mut screen = Screen::start();
    screen.log_in("a wrong token");
    screen.see("This is not the token of this store.");
    screen.check(&["401"]);
    screen.log_in(TOKEN);
    screen.overview();
    screen.check(&[]);
    screen.keys();
    screen.check(&["404", "409"]);
    screen.clients();
    screen.view("Policies");
    screen.see("all requests");
    screen.failing_policy();
    screen.canary_of_half_a_percent();
    screen.events();
    screen.paused_events();
    // A reload keeps the login; the secret is in the storage of this tab only.
    screen.evaluate("location.reload()");
    screen.see("path=/v1/clients?id=victim");
    let places = "[document.cookie, Object.keys(localStorage).length, location.search, Object.keys(sessionStorage).length]";
    assert_eq!(screen.evaluate(places), json!(["", 0, "", 1]));
    // The live change of the deleted key may arrive after the answer, and the page reads it again.
    screen.check(&["404"]);

    // Without a network the page says so, and continues when it is back.
    screen.view("Clients");
    screen.cut_off(true);
    screen.see("The store does not answer.");
    screen.cut_off(false);
    screen.wait("document.querySelector('main .why').hidden");
    screen.view("Events");
    screen.check(&["ERR_INTERNET_DISCONNECTED"]);

    // A restart of the store ends the session. The login leads back to the same view.
    screen.load = None;
    screen.server.stop();
    screen.see("not connected");
    screen.server.restart();
    screen.see("The session has ended");
    screen.log_in(TOKEN);
    screen.wait("document.querySelector('main.view-events')");
    screen.click("Log out");
    screen.wait("!document.querySelector('#login').hidden && sessionStorage.length === 0");
    screen.check(&["ERR_", "401"]);
    screen.stranger();
}

/// Streams rest while the tab is hidden, and end every few minutes. What they miss is read again.
#[test]
fn page_shows_changes_that_its_streams_missed() {
    let mut screen = Screen::start();
    screen.log_in(TOKEN);
    screen.missed_changes();
    screen.tree();
    screen.client_with_the_name_of_a_directory();
    screen.exact_values();
    screen.check(&["431"]);
}

/// A key, a clock or a connection that is not as the page expects.
#[test]
fn page_edits_what_it_shows_and_notices_a_silent_store() {
    let mut screen = Screen::start();
    screen.log_in(TOKEN);
    screen.edit_of_an_old_version();
    screen.check(&["409"]);
    screen.edits_of_long_expiries();
    screen.counts_of_prefixes();
    screen.figures_of_a_policy();
    screen.filters_and_unknown_owners();
    screen.wrong_clocks();
    screen.check(&[]);
    screen.silent_store();
    screen.check(&["ERR_"]);
}

/// Answers that come late, that are cut, or that are refused; names that look alike.
#[test]
fn page_shows_what_it_knows_and_no_more() {
    let mut screen = Screen::start();
    screen.log_in(TOKEN);
    screen.closed_question();
    screen.long_history();
    screen.names_that_look_alike();
    screen.hot_keys_with_one_beginning();
    screen.foreign_broker();
    screen.held_connections();
    screen.check(&["404", "409"]);
    screen.resumed_session();
    screen.check(&[]);
}

/// All that an operator does with policies; roles; narrow windows; the keyboard.
#[test]
#[ignore = "a policy is built, and each view is opened several times"]
fn page_changes_policies_and_fits_a_phone() {
    let policy = policies::marked("page");
    let policy = policy.to_str().unwrap();
    let mut screen = Screen::start();
    screen.log_in(TOKEN);
    screen.view("Policies");
    screen.load_policy(policy);
    let find = "[...document.querySelectorAll('tbody button')].find((it) => it.textContent.startsWith('marked'))";
    screen.wait(find);
    let name = screen.evaluate(&format!("{find}.textContent"));
    let name = name.as_str().unwrap().to_owned();
    screen.click(&name);

    screen.act("Compare …", "Compare", "The comparison runs.");
    screen.see("same");
    screen.wait("document.querySelector('.example')");
    screen.evaluate("document.querySelector('.example').open = true");
    screen.see("candidate");
    screen.click("End the comparison");
    screen.see("The last counts and examples stay until the next comparison");
    screen.click("End it");
    screen.see("The comparison has ended.");
    let last = screen.server.run(&["policy", "diff"]);
    last.prints(&["candidate marked-page"]);

    screen.act("Canary …", "Start the canary", "The canary runs.");
    screen.see("5 % of the clients, always the same");
    screen.act("End the canary", "End it", "The canary has ended.");

    screen.click("Route …");
    screen.fill("dialog input", "lab/");
    screen.click("Set the route");
    screen.see("keys below lab/");
    screen.act("Remove the route", "Remove it", "The route is removed.");

    screen.act("Promote", "Promote it", "answers now.");
    screen.wait("document.querySelector('.role.active').textContent.includes('marked-page')");
    // Then no previous policy is left, and a rollback returns to the built-in one.
    let active = "document.querySelector('.role.active b').textContent";
    for (act, name) in [
        (["policy", "promote", "builtin"].as_slice(), "standard"),
        (["policy", "rollback"].as_slice(), "marked-page"),
    ] {
        screen.server.run(act).code(0);
        screen.wait(&format!("{active}.includes('{name}')"));
    }
    let back =
        "[...document.querySelectorAll('.role.active button')].map((it) => it.textContent)[0]";
    let back = screen.evaluate(back);
    screen.act(
        back.as_str().unwrap(),
        "Roll back",
        "The previous policy answers again.",
    );
    screen.act("Unload", "Unload it", "is unloaded.");
    screen.check(&[]);

    // A refusal stays in the dialog, with its reason.
    screen.load_unsafe_policy();
    screen.check(&["422"]);

    for (width, height) in [(360, 740), (800, 600), (1440, 900)] {
        screen.resize(width, height);
        for view in ["Overview", "Keys", "Policies", "Clients", "Events"] {
            screen.view(view);
            screen.wait("document.querySelector('main').childElementCount > 1");
            let wide =
                "document.documentElement.scrollWidth - document.documentElement.clientWidth";
            let wide = screen.evaluate(wide);
            assert_eq!(wide, json!(0), "{view} is wider than {width}");
        }
    }
    screen.keyboard();
    screen.check(&[]);
}

/// What axe-core finds in the page as it is shown, apart from advice.
fn barriers(screen: &mut Screen, place: &str, found: &mut Vec<String>) {
    let script = "axe.run(document, { resultTypes: ['violations'] }).then((it) => it.violations
        .filter((it) => ['serious', 'critical'].includes(it.impact))
        .map((it) => `${it.id}: ${it.nodes.slice(0, 3).map((it) => `${it.html} ${it.any.map((it) => it.message)}`).join(' | ')}`))";
    let violations = screen.evaluate(script);
    let violations = violations.as_array().expect("axe-core returns a list");
    found.extend(violations.iter().map(|it| format!("{place}: {it}")));
}

/// Each view, a dialog and the login, light and dark, wide and narrow.
#[test]
#[ignore = "axe-core is installed by tests/run --all"]
fn page_has_no_serious_accessibility_barrier() {
    let axe = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../target/axe/node_modules/axe-core/axe.min.js"
    );
    let axe = std::fs::read_to_string(axe).expect("tests/run --all installs axe-core");
    let mut screen = Screen::start();
    let mut found = Vec::new();
    screen.wait("!document.querySelector('#login').hidden");
    screen.evaluate(&format!("{axe}; 0"));
    barriers(&mut screen, "login", &mut found);
    screen.log_in(TOKEN);
    screen.overview();
    for (scheme, width) in [("light", 1440), ("dark", 1440), ("light", 390)] {
        let feature = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        let how = json!({ "features": feature });
        screen.send("Emulation.setEmulatedMedia", how);
        screen.resize(width, 900);
        for view in ["overview", "keys", "policies", "clients", "events"] {
            screen.evaluate(&format!("location.hash = '#/{view}'"));
            screen.wait(&format!("document.querySelector('main.view-{view}')"));
            // Rows and figures have arrived.
            thread::sleep(Duration::from_secs(1));
            barriers(&mut screen, &format!("{view} {scheme} {width}"), &mut found);
        }
    }
    screen.resize(1440, 900);
    screen.clients_dialog();
    barriers(&mut screen, "dialog", &mut found);
    // A test that never looks would find nothing either. While a dialog is open, axe-core examines
    // nothing behind it.
    screen.evaluate("document.querySelector('dialog[open] button').textContent = ''");
    let mut broken = Vec::new();
    barriers(&mut screen, "broken", &mut broken);
    assert!(
        broken.iter().any(|it| it.contains("button-name")),
        "{broken:#?}"
    );
    assert!(found.is_empty(), "{found:#?}");
}
