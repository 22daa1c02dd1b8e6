//! A browser that shows the page of a store under load, and what an operator does in each view.

use std::{
    io::{Read, Write},
    net::TcpListener,
    ops::{Deref, DerefMut},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use serde_json::json;
use statehouse_tests::{Browser, Server, WallClock, policies, server::own_address};

pub(super) const TOKEN: &str = "a token of twenty-two bytes";

/// A name that would be markup, and that reverses the characters behind it.
const HOSTILE_KEY: &str = "<img src=x onerror=alert(1)>\u{202e}gpj.exe";

/// A browser that shows the page of a store.
pub(super) struct Screen {
    /// Dropped before the server ends.
    pub(super) load: Option<Load>,
    pub(super) server: Server,
    browser: Browser,
    url: String,
    /// The system clock of the store.
    pub(super) clock: WallClock,
}

/// A client that reads and writes until it is dropped.
pub(super) struct Load {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Load {
    fn on(server: &Server) -> Load {
        let mut store = server.store("plc-1");
        for key in [
            "line1/oven/setpoint",
            "line1/oven/state",
            "line2/state",
            HOSTILE_KEY,
        ] {
            store.set(key, r#"{"value": 180, "unit": "C"}"#);
        }
        let is_over = Arc::new(AtomicBool::new(false));
        let flag = is_over.clone();
        let thread = thread::spawn(move || {
            while !flag.load(Ordering::Relaxed) {
                store.set("line1/oven/state", "running");
                store.get("line1/oven/setpoint");
                // The standard policy has no such command.
                store.ask(&["TALLY", "line2/state"]);
                thread::sleep(Duration::from_millis(10));
            }
        });
        Load {
            is_over,
            thread: Some(thread),
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        if !thread::panicking() {
            ended.expect("a load has a thread").unwrap();
        }
    }
}

/// A page of another origin on the same machine. Browsers already keep pages of other machines from
/// a loopback address.
fn elsewhere() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    thread::spawn(move || {
        for mut socket in listener.incoming().map_while(Result::ok) {
            let page = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n<title>elsewhere</title>";
            // The browser may close the connection early.
            _ = socket.read(&mut [0; 4096]);
            _ = socket.write_all(page.as_bytes());
        }
    });
    url
}

impl Deref for Screen {
    type Target = Browser;

    fn deref(&self) -> &Browser {
        &self.browser
    }
}

impl DerefMut for Screen {
    fn deref_mut(&mut self) -> &mut Browser {
        &mut self.browser
    }
}

impl Screen {
    /// A store, its load, and a browser that is logged in.
    pub(super) fn start() -> Screen {
        let admin = own_address().to_string();
        let settings = [
            ("admin", &*admin),
            ("admin_token", TOKEN),
            ("slow_threshold", "1ms"),
        ];
        let clock = WallClock::right();
        let server = Server::restartable_in(&settings, &clock.environment());
        let load = Some(Load::on(&server));
        let url = format!("http://{admin}");
        let mut browser = Browser::show(&format!("{url}/"));
        browser.resize(1440, 900);
        Screen {
            server,
            browser,
            url,
            load,
            clock,
        }
    }

    /// Opens a view by its link.
    pub(super) fn view(&mut self, name: &str) {
        self.click(name);
        let view = format!("main.view-{}", name.to_lowercase());
        self.wait(&format!("document.querySelector({})", json!(view)));
    }

    /// Sets the field that a selector finds.
    pub(super) fn fill(&mut self, selector: &str, value: &str) {
        let script = format!(
            "(() => {{ const it = document.querySelector({}); if (!it) return false; it.value = {}; it.dispatchEvent(new Event('input')); it.dispatchEvent(new Event('change')); return true; }})()",
            json!(selector),
            json!(value)
        );
        self.wait(&script);
    }

    /// Asserts that nothing failed apart from requests with these statuses or errors, and that the
    /// page asked its own host only.
    pub(super) fn check(&mut self, expected: &[&str]) {
        let troubles = self.browser.troubles();
        let is_expected = |it: &String| {
            it.starts_with("network: ") && expected.iter().any(|expected| it.contains(expected))
        };
        let other: Vec<_> = troubles.iter().filter(|it| !is_expected(it)).collect();
        assert!(other.is_empty(), "{other:#?}");
        let own = format!("{}/", self.url);
        let foreign = self.browser.requests().iter();
        let foreign: Vec<_> = foreign.filter(|it| !it.starts_with(&own)).collect();
        assert!(foreign.is_empty(), "{foreign:?}");
        assert_eq!(
            self.evaluate("document.querySelectorAll('main img').length"),
            0
        );
    }

    pub(super) fn overview(&mut self) {
        self.see("requests/s");
        self.wait("parseInt(document.querySelector('.sum b').textContent) > 0");
        for stage in ["queue", "policy", "flush", "send"] {
            let time =
                format!("/\\d/.test(document.querySelector('.stage.{stage} .big').textContent)");
            self.wait(&time);
        }
        self.wait("document.querySelectorAll('.curves path.line').length === 7");
        // A hot key leads to its view.
        self.wait("document.querySelector('.hot a.key')");
        // Disk, keys, connections and files as bars, each with its limit.
        for name in ["Disk", "Keys", "Bytes", "Connections", "Open files"] {
            self.wait(&format!(
                "/ of /.test(document.querySelector('[role=meter][aria-label=\"{name}\"]:not([hidden])')?.ariaValueText)"
            ));
        }
        // Slow requests name their stages, key, client and policy.
        self.see("from 1.00\u{a0}ms on");
        for text in ["flush ", "line1/oven/", "plc-1", "standard@"] {
            self.wait(&format!(
                "[...document.querySelectorAll('table')].some((it) => it.caption?.textContent.startsWith('Slow requests') && it.outerHTML.includes('{text}'))"
            ));
        }
    }

    /// Reads, changes and deletes keys.
    pub(super) fn keys(&mut self) {
        self.view("Keys");
        for name in ["line1/", "oven/", "setpoint"] {
            self.click(name);
        }
        self.see("last writer\nplc-1");
        self.see("\"value\": 180");
        self.click("Hex");
        self.see("7b 22 76");
        // The name is text, and what would hide a part of it is visible.
        self.see("<img src=x onerror=alert(1)>\\u{202e}gpj.exe");
        self.see("live");
        // A change of another client.
        let mut other = self.server.store("hmi-7");
        other.set("line1/oven/setpoint", r#"{"value": 185, "unit": "C"}"#);
        // First, because later changes soon replace it in the list.
        self.wait(
            "[...document.querySelectorAll('.side td')].some((it) => it.textContent === 'hmi-7')",
        );
        self.see("last writer\nhmi-7");
        self.click("Newer changes: read again");
        self.wait("document.querySelector('.diff .in')?.textContent.includes('185')");

        self.click("Edit");
        self.fill(".editor textarea", "21.5");
        self.click("Review …");
        self.see("Change this key?");
        assert_ne!(other.get("line1/oven/setpoint"), Some(b"21.5".to_vec()));
        self.click("Change it");
        self.see("Written: line1/oven/setpoint has version");
        assert_eq!(other.get("line1/oven/setpoint"), Some(b"21.5".to_vec()));

        // A change in between is not overwritten, and the operator learns why.
        self.click("Edit");
        other.set("line1/oven/setpoint", "22");
        self.fill(".editor textarea", "30");
        self.click("Review …");
        self.click("Change it");
        self.wait("document.querySelector('#ask-error').textContent.length > 20");
        assert_eq!(other.get("line1/oven/setpoint"), Some(b"22".to_vec()));
        for _ in 0..2 {
            self.click("Cancel");
        }
        // The page deletes the version that it shows.
        self.see_value("22");
        self.click("Delete");
        self.click("Delete it");
        self.see("There is no such key now.");
        assert_eq!(other.get("line1/oven/setpoint"), None);

        // A lock with a fencing token.
        let fence = other.set("line2/state", "stopped").to_string();
        let lock = ["SET", "lock", "hmi-7", "NX", "PX", "600000"];
        let lock = other.command(&lock).with("__ft", &fence);
        let version = other.call(&lock).version().unwrap();
        self.evaluate("location.hash = '#/keys/lock'");
        for (name, value) in [
            ("version", version.to_string()),
            ("expires", "in ".to_owned()),
            ("last writer", "hmi-7".to_owned()),
            ("lock held by", "hmi-7".to_owned()),
            ("fencing token", fence),
        ] {
            self.wait(&format!(
                "[...document.querySelectorAll('.facts div')].some((it) => it.children[0].textContent === '{name}' && it.children[1].textContent.startsWith('{value}'))"
            ));
        }
    }

    /// Hides the tab, or shows it again.
    fn hide(&mut self, is_hidden: bool) {
        self.evaluate(&format!(
            "Object.defineProperty(document, 'hidden', {{ value: {is_hidden}, configurable: true }});
             document.dispatchEvent(new Event('visibilitychange'))"
        ));
    }

    /// Waits until the open key has this value. Its history may show it earlier.
    pub(super) fn see_value(&mut self, value: &str) {
        self.wait(&format!(
            "document.querySelector('section[aria-label=\"Value\"]').innerText.includes('{value}')"
        ));
    }

    /// Waits until the tree has this many rows with a label.
    fn see_rows(&mut self, label: &str, count: usize) {
        self.wait(&format!(
            "[...document.querySelectorAll('.row .name')].filter((it) => it.textContent === '{label}').length === {count}"
        ));
    }

    /// Changes of the open key that no stream of the page delivers.
    pub(super) fn missed_changes(&mut self) {
        let mut other = self.server.store("hmi-7");
        other.set("valve/state", "first");
        self.view("Keys");
        self.evaluate("location.hash = '#/keys/valve%2fstate'");
        self.see_value("first");
        self.click("valve/");
        self.see_rows("state", 1);
        self.hide(true);
        other.set("valve/state", "second");
        other.set("valve/other", "new");
        self.hide(false);
        self.see_value("second");
        self.see_rows("other", 1);
        other.set("valve/state", "a longer value");
        self.wait(
            "[...document.querySelectorAll('.row')].some((it) => it.textContent === 'state14 B')",
        );

        self.fill(".find input", "line1/");
        self.see_rows("oven/", 1);
        other.set("valve/state", "third");
        self.see_value("third");

        self.click("Edit");
        other.set("valve/state", "fourth");
        // The page gets the change while the form is open.
        thread::sleep(Duration::from_secs(2));
        self.click("Cancel");
        self.see_value("fourth");
    }

    /// Values that a parser of JSON would change, and changes that it would not see.
    pub(super) fn exact_values(&mut self) {
        let mut other = self.server.store("hmi-7");
        for value in [
            r#"{"id":9007199254740992,"x":1.00,"x":1e400}"#,
            r#"{"id":9007199254740993,"x":1.00,"x":1e400}"#,
            r#"{ "id": 9007199254740993, "x": 1.00, "x": 1e400 }"#,
        ] {
            other.set("exact", value);
        }
        self.evaluate("location.hash = '#/keys/exact'");
        for line in ["\"id\": 9007199254740993,", "\"x\": 1.00,", "\"x\": 1e400"] {
            self.see_value(line);
        }
        self.see("Only white space between JSON tokens has changed.");
        self.evaluate("document.querySelectorAll('.history summary')[1].click()");
        self.wait("document.querySelector('.diff .in')?.textContent.includes('9007199254740993')");
        self.wait("document.querySelector('.diff .out')?.textContent.includes('9007199254740992')");
    }

    /// Rows, their labels, and the focus.
    pub(super) fn tree(&mut self) {
        self.evaluate(
            "{
               const row = [...document.querySelectorAll('.row')].find((it) => it.textContent.startsWith('oven/'));
               for (let click = 0; click < 5; click++) row.click();
             }",
        );
        self.see_rows("setpoint", 1);
        thread::sleep(Duration::from_secs(1));
        self.see_rows("setpoint", 1);
        // One row takes part in the order of the Tab key, also after it was closed.
        self.click("setpoint");
        self.click("oven/");
        self.see_rows("setpoint", 0);
        let stops = "document.querySelectorAll('.row[tabindex=\"0\"]').length";
        assert_eq!(self.evaluate(stops), json!(1));
        // A stream that opens causes another read of the level, with room for 100 names more.
        self.intercept(
            "const answer = await real(), limit = path.match(/^.v1.keys.*limit=(\\d+)/)?.[1];
             if (limit) setTimeout(() => (window.limits ??= []).push(limit), 200);
             return answer;",
        );
        self.fill(".find input", "valve/state");
        self.see_rows("state", 1);
        self.wait("limits.includes('101')");

        let mut other = self.server.store("hmi-8");
        for number in 0..101 {
            other.set(format!("many/{number:03}"), "v");
        }
        self.fill(".find input", "many/");
        self.see_rows("099", 1);
        self.wait("limits.includes('200')");
        self.intercept_no_more();
        self.evaluate("document.querySelector('.tail button').focus()");
        other.set("many/050a", "v");
        self.see_rows("050a", 1);
        let is_focused = "document.activeElement === document.querySelector('.tail button')";
        assert_eq!(self.evaluate(is_focused), json!(true));
        self.click("More …");
        self.wait("document.activeElement.textContent.startsWith('100')");

        self.evaluate("location.hash = '#/keys/' + 'k'.repeat(6000)");
        self.see("Use the command line");
    }

    /// Browsers remove `..` from a path.
    pub(super) fn client_with_the_name_of_a_directory(&mut self) {
        let _client = self.server.store("..");
        self.view("Clients");
        self.wait("[...document.querySelectorAll('td')].some((it) => it.textContent === '..')");
        self.evaluate("[...document.querySelectorAll('tbody tr')].find((it) => it.cells[0].textContent === '..').querySelector('button').click()");
        self.click("Disconnect it");
        self.see("Disconnected: ...");
    }

    /// Clicks a button, confirms, and waits for the answer.
    pub(super) fn act(&mut self, button: &str, confirm: &str, answer: &str) {
        self.click(button);
        self.click(confirm);
        self.see(answer);
        self.wait("!document.querySelector('dialog').open");
    }

    /// Chooses a file, and confirms that it is loaded.
    pub(super) fn load_policy(&mut self, path: &str) {
        self.browser.choose_file(path);
        self.click("Load it");
        self.see("is loaded.");
    }

    /// Chooses a file that is no policy.
    pub(super) fn load_unsafe_policy(&mut self) {
        let path = self.server.directory().join("no-policy.wasm");
        std::fs::write(&path, policies::INVALID[1].1).unwrap();
        self.browser.choose_file(path.to_str().unwrap());
        self.click("Load it");
        self.wait("document.querySelector('#ask-error').textContent.length > 20");
        self.click("Cancel");
    }

    /// Opens a key with the keyboard alone.
    pub(super) fn keyboard(&mut self) {
        self.view("Keys");
        self.wait("document.querySelector('.row')");
        self.evaluate("document.querySelector('.row').focus()");
        for (key, then) in [
            (
                "End",
                "document.activeElement.textContent.startsWith('line2/')",
            ),
            (
                "ArrowRight",
                "document.querySelectorAll('[aria-level=\"2\"]').length === 1",
            ),
            (
                "ArrowDown",
                "document.activeElement.textContent.startsWith('state')",
            ),
            (
                "Enter",
                "document.querySelector('.head h2')?.textContent === 'line2/state'",
            ),
            (
                "ArrowLeft",
                "document.activeElement.textContent.startsWith('line2/')",
            ),
            (
                "ArrowLeft",
                "document.querySelectorAll('[aria-level=\"2\"]').length === 0",
            ),
        ] {
            self.browser.press(key);
            self.wait(then);
        }
        self.click("Delete");
        self.browser.press("Escape");
        self.wait("!document.querySelector('dialog').open");
    }

    /// The page of another origin can read and do nothing, even with the token.
    pub(super) fn stranger(&mut self) {
        let own = format!("{}/v1/rollback", self.url);
        self.browser.open(&elsewhere());
        self.wait("document.title === 'elsewhere'");
        for how in [
            format!("{{method: 'POST', headers: {{Authorization: 'Bearer {TOKEN}'}}}}"),
            "{method: 'POST', mode: 'no-cors'}".to_owned(),
        ] {
            let script = format!("fetch('{own}', {how}).then((it) => it.type, () => 'refused')");
            let seen = self.evaluate(&script);
            assert!(
                ["refused", "opaque"].contains(&seen.as_str().unwrap()),
                "{seen}"
            );
        }
        let refused = "requests of web pages of other origins are refused";
        self.server.wait_for_log(refused);
    }

    /// Opens the question before a disconnection.
    pub(super) fn clients_dialog(&mut self) {
        self.view("Clients");
        self.see("plc-1");
        self.click("Disconnect");
        self.see("Disconnect this client?");
    }

    /// A policy that fails, and with which message.
    pub(super) fn failing_policy(&mut self) {
        for arguments in [
            ["policy", "load", policies::faulty()].as_slice(),
            &["policy", "route", "lab/", "faulty"],
        ] {
            self.server.run(arguments).code(0);
        }
        let failed = self.server.store("lab").ask(&["SET", "lab/a", "panic"]);
        assert_eq!(failed.text(), "-ERR internal error\\r\\n");
        let find = "[...document.querySelectorAll('tbody button')].find((it) => it.textContent.startsWith('faulty'))";
        self.wait(find);
        self.evaluate(&format!("{find}.click()"));
        self.wait(
            "[...document.querySelectorAll('.facts dd')].some((it) => it.textContent.includes('a panic on request'))",
        );
    }

    /// The acts of operators, and the refusals alone.
    pub(super) fn events(&mut self) {
        self.view("Events");
        self.see("path=/v1/clients?id=victim");
        self.fill("main select", "refusal");
        self.see("administer");
        self.wait("!document.body.innerText.includes('path=/v1/clients?id=victim')");
        self.fill("main select", "");
        self.see("path=/v1/clients?id=victim");
    }

    /// Ends a connection.
    pub(super) fn clients(&mut self) {
        let mut victim = self.server.store("victim");
        victim.watch("line2/state");
        victim.ask(&["SET", "lock2", "victim", "NX", "PX", "600000"]);
        self.view("Clients");
        self.wait("[...document.querySelectorAll('td')].some((it) => it.textContent === 'plc-1')");
        self.fill(".tools input", "victim");
        self.wait("document.querySelectorAll('tbody tr').length === 1");
        for (column, value) in [
            ("Watches", "1"),
            ("Locks", "1"),
            ("Queued", "0"),
            ("Keys", "1"),
        ] {
            self.wait(&format!(
                "(() => {{ const at = [...document.querySelectorAll('thead th')].findIndex((it) => it.textContent.trim() === '{column}'); return document.querySelectorAll('tbody td')[at]?.textContent === '{value}'; }})()"
            ));
        }
        self.click("Disconnect");
        self.click("Disconnect it");
        self.see("Disconnected: victim.");
    }
}
