//! A real browser, headless, driven over the DevTools protocol on two pipes. It records what went
//! wrong in its pages, and which addresses they asked.

use std::{
    collections::VecDeque,
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value as Json, json};
use tempfile::TempDir;

use crate::lines::Lines;

/// A browser takes some seconds to start, and many if every core is busy.
pub const BROWSER_PATIENCE: Duration = Duration::from_secs(120);

/// A browser with one page, which drop ends.
pub struct Browser {
    child: Child,
    commands: ChildStdin,
    messages: Receiver<Json>,
    log: Lines,
    /// The page, once the browser is attached to it.
    session: Option<String>,
    sent: u64,
    troubles: VecDeque<String>,
    requests: Vec<String>,
    _profile: TempDir,
}

impl Browser {
    /// Starts a browser that shows this page.
    pub fn show(url: &str) -> Browser {
        let mut browser = Browser::start();
        browser.open(url);
        browser
    }

    /// Starts a browser that shows this page, whatever the certificate of its host is.
    pub fn show_untrusted(url: &str) -> Browser {
        let mut browser = Browser::start();
        let how = json!({ "ignore": true });
        browser.send("Security.setIgnoreCertificateErrors", how);
        browser.open(url);
        browser
    }

    fn start() -> Browser {
        let profile = tempfile::tempdir().unwrap();
        // The browser reads commands from descriptor 3 and writes messages to descriptor 4.
        let script = "exec chromium \"$@\" about:blank 3<&0 4>&1 </dev/null >/dev/null";
        let mut child = Command::new("sh")
            .args(["-c", script, "sh", "--headless", "--no-sandbox"])
            .args(["--disable-gpu", "--disable-dev-shm-usage"])
            .args(["--enable-logging=stderr", "--no-first-run"])
            .args(["--disable-background-networking", "--remote-debugging-pipe"])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("a shell exists");
        let log = Lines::follow(child.stderr.take().unwrap());
        let (sender, messages) = mpsc::channel();
        let output = child.stdout.take().unwrap();
        thread::spawn(move || {
            for message in BufReader::new(output).split(0).map_while(Result::ok) {
                let message = serde_json::from_slice(&message).expect("messages are JSON");
                if sender.send(message).is_err() {
                    return;
                }
            }
        });
        let mut browser = Browser {
            commands: child.stdin.take().unwrap(),
            child,
            messages,
            log,
            session: None,
            sent: 0,
            troubles: VecDeque::new(),
            requests: Vec::new(),
            _profile: profile,
        };
        let page = browser.send("Target.createTarget", json!({ "url": "about:blank" }));
        let how = json!({ "targetId": page["targetId"], "flatten": true });
        let attached = browser.send("Target.attachToTarget", how);
        browser.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.send(&format!("{domain}.enable"), json!({}));
        }
        browser
    }

    /// Opens another page in place of the present one.
    pub fn open(&mut self, url: &str) {
        self.send("Page.navigate", json!({ "url": url }));
    }

    /// Sends a command of the protocol. Returns its result.
    pub fn send(&mut self, method: &str, params: Json) -> Json {
        self.sent += 1;
        let mut command = json!({ "id": self.sent, "method": method, "params": params });
        if let Some(session) = &self.session {
            command["sessionId"] = json!(session);
        }
        let mut bytes = command.to_string().into_bytes();
        bytes.push(0);
        let written = self.commands.write_all(&bytes);
        written.expect("tests/run installs chromium, and it runs");
        loop {
            let message = self.messages.recv_timeout(BROWSER_PATIENCE);
            let message = message.unwrap_or_else(|_| panic!("the browser does not do {method}"));
            if message["id"] == self.sent {
                assert!(message["error"].is_null(), "{method}: {}", message["error"]);
                return message["result"].clone();
            }
            self.note(&message);
        }
    }

    fn note(&mut self, message: &Json) {
        let event = &message["params"];
        let trouble = match message["method"].as_str().unwrap_or_default() {
            "Network.requestWillBeSent" => {
                let url = event["request"]["url"].as_str().unwrap_or_default();
                self.requests.push(url.to_owned());
                return;
            }
            "Runtime.exceptionThrown" => format!("exception: {}", event["exceptionDetails"]),
            "Runtime.consoleAPICalled"
                if event["type"] == "error" || event["type"] == "warning" =>
            {
                format!("console: {}", event["args"])
            }
            "Log.entryAdded" if event["entry"]["level"] == "error" => {
                let entry = &event["entry"];
                let text = |name: &str| entry[name].as_str().unwrap_or_default().to_owned();
                format!("{}: {} {}", text("source"), text("text"), text("url"))
            }
            _ => return,
        };
        self.troubles.push_back(trouble);
    }

    /// Takes the errors since the last call: those on the console, exceptions, violations of the
    /// content security policy, and requests that failed.
    pub fn troubles(&mut self) -> Vec<String> {
        // Events before the answer to a command are read with it.
        self.send("Runtime.evaluate", json!({ "expression": "0" }));
        self.troubles.drain(..).collect()
    }

    /// The addresses that pages asked so far.
    pub fn requests(&self) -> &[String] {
        &self.requests
    }

    /// Evaluates an expression in the page, and waits if its value is a promise.
    pub fn evaluate(&mut self, script: &str) -> Json {
        let how = json!({ "expression": script, "awaitPromise": true, "returnByValue": true });
        let done = self.send("Runtime.evaluate", how);
        let failed = &done["exceptionDetails"];
        assert!(failed.is_null(), "{script}: {failed}");
        done["result"]["value"].clone()
    }

    /// Waits until an expression is true in the page. It may fail until then.
    pub fn wait(&mut self, script: &str) {
        let end = Instant::now() + BROWSER_PATIENCE / 4;
        let look = format!(
            "(() => {{ try {{ return Boolean({script}); }} catch {{ return false; }} }})()"
        );
        while self.evaluate(&look) != json!(true) {
            if Instant::now() > end {
                let page = self.evaluate("document.body.innerText");
                let troubles = self.troubles();
                panic!("the page never has {script}\n{troubles:#?}\n{page}");
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until the page shows this text.
    pub fn see(&mut self, text: &str) {
        self.wait(&format!(
            "document.body.innerText.includes({})",
            json!(text)
        ));
    }

    /// Clicks the button, link or row with this text, in the dialog if one is open. Waits until it
    /// can be clicked.
    pub fn click(&mut self, text: &str) {
        let script = format!(
            "(() => {{
              const place = document.querySelector('dialog[open]') ?? document;
              const all = [...place.querySelectorAll('button, a, label, summary, [role=treeitem]')];
              const found = all.find((it) => (it.querySelector('.name') ?? it).textContent.trim() === {} && it.offsetParent && !it.disabled);
              found?.click();
              return found;
            }})()",
            json!(text)
        );
        self.wait(&script);
    }

    /// Logs in to the page of the admin API with its token.
    pub fn log_in(&mut self, token: &str) {
        self.wait("!document.querySelector('#login').hidden");
        self.evaluate(&format!(
            "document.querySelector('#token').value = {}; document.querySelector('#login-form').requestSubmit()",
            json!(token)
        ));
    }

    /// Presses a key that is no character.
    pub fn press(&mut self, key: &str) {
        for kind in ["rawKeyDown", "keyUp"] {
            let code = if key == "Escape" { 27 } else { 0 };
            let how =
                json!({ "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code });
            self.send("Input.dispatchKeyEvent", how);
        }
    }

    /// Chooses a file for the first input of files.
    pub fn choose_file(&mut self, path: &str) {
        let document = self.send("DOM.getDocument", json!({}));
        let how = json!({ "nodeId": document["root"]["nodeId"], "selector": "input[type=file]" });
        let found = self.send("DOM.querySelector", how);
        let how = json!({ "nodeId": found["nodeId"], "files": [path] });
        self.send("DOM.setFileInputFiles", how);
    }

    /// Shows the page in a window of this size.
    pub fn resize(&mut self, width: u32, height: u32) {
        let how = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600 });
        self.send("Emulation.setDeviceMetricsOverride", how);
    }

    /// Cuts the page off the network, or ends that.
    pub fn cut_off(&mut self, is_cut_off: bool) {
        let how = json!({ "offline": is_cut_off, "latency": 0, "downloadThroughput": -1, "uploadThroughput": -1 });
        self.send("Network.emulateNetworkConditions", how);
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
        if thread::panicking() {
            // A browser without a desktop logs much that does not matter.
            let fatal = self.log.all().into_iter().filter(|it| it.contains("FATAL"));
            fatal
                .chain(self.troubles.drain(..))
                .for_each(|it| eprintln!("{it}"));
        }
    }
}
