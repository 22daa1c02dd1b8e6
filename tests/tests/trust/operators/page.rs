//! The page of the admin API, for users with different roles.

use serde_json::Value as Json;
use statehouse_tests::Browser;

use super::plant::{PASSWORD, Plant};

/// Logs in to the page by a name and a password.
fn log_in(browser: &mut Browser, user: &str, password: &str) {
    browser.wait(
        "!document.querySelector('#login').hidden && !document.querySelector('#by-user').hidden",
    );
    browser.evaluate(&format!(
        "document.querySelector('#name').value = '{user}'; document.querySelector('#password').value = '{password}'; document.querySelector('#login-form').requestSubmit()"
    ));
}

/// Whether the button with this text exists and may be pressed.
fn button(text: &str, is_enabled: bool) -> String {
    format!(
        "[...document.querySelectorAll('main button')].some((it) => it.textContent === '{text}' && it.disabled === {})",
        !is_enabled
    )
}

#[test]
fn page_lets_users_do_what_their_role_allows() {
    let plant = Plant::start();
    plant.server.store("plc").set("valve", "open");
    let mut browser = Browser::show_untrusted(&format!("{}/#/keys/valve", plant.url()));
    log_in(&mut browser, "reader", "wrong horse");
    browser.wait("document.querySelector('#login-why').textContent.includes('password is wrong')");
    log_in(&mut browser, "reader", PASSWORD);
    browser.wait("document.querySelector('#user').textContent === 'reader · read'");
    for act in ["Edit", "Delete"] {
        browser.wait(&button(act, false));
        let why = format!(
            "[...document.querySelectorAll('main button')].find((it) => it.textContent === '{act}').title"
        );
        let why = browser.evaluate(&why);
        assert!(why.as_str().unwrap().contains("operate"), "{act}: {why}");
    }
    browser.click("Log out");

    log_in(&mut browser, "operator", PASSWORD);
    browser.wait("document.querySelector('#user').textContent === 'operator · operate'");
    browser.wait(&button("Delete", true));
    browser.click("Delete");
    browser.click("Delete it");
    browser.see("There is no such key now.");
    assert_eq!(plant.server.store("plc").get("valve"), None);
    let (_, history) = plant.as_user("reader", "GET", "/v1/history?key=valve");
    let history: Json = serde_json::from_str(&history).unwrap();
    assert_eq!(history["changes"][0]["user"], "operator", "{history}");
}
