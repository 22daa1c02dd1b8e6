//! What the page shows and does while a key changes, a clock is wrong, or the store is silent.

use serde_json::json;
use statehouse_tests::wait::until;

use super::screen::Screen;

/// The value of a fact of the key or policy that is open, as an expression.
fn fact(name: &str) -> String {
    format!(
        "[...document.querySelectorAll('.facts div')].find((it) => it.children[0].textContent === '{name}')?.children[1].textContent"
    )
}

impl Screen {
    /// Clicks a button whose text begins with these words.
    fn click_beginning(&mut self, words: &str) {
        let words = json!(words);
        let script = format!(
            "(() => {{ const it = [...document.querySelectorAll('main button')].find((it) => it.textContent.startsWith({words})); it?.click(); return it; }})()"
        );
        self.wait(&script);
    }

    /// Lets a function with this body answer the requests of the page. `real()` asks the store.
    pub(super) fn intercept(&mut self, body: &str) {
        self.evaluate(&format!(
            "{{
               window.untouched ??= fetch;
               window.fetch = async (url, options) => {{
                 const real = () => untouched(url, options), path = String(url);
                 {body}
               }};
               0;
             }}"
        ));
    }

    /// Ends [`intercept`](Self::intercept).
    pub(super) fn intercept_no_more(&mut self) {
        self.evaluate("window.fetch = untouched; 0");
    }

    /// Opens a key by its link.
    fn open_key(&mut self, key: &str) {
        let path = format!("#/keys/{key}");
        self.evaluate(&format!("location.hash = {}", json!(path)));
        self.wait(&format!(
            "document.querySelector('.head h2')?.textContent === {}",
            json!(key)
        ));
    }

    /// The browser closes a dialog at the second Escape, also one that waits for the store. Its
    /// answer must not change the next question.
    pub(super) fn closed_question(&mut self) {
        let mut other = self.server.store("hmi-7");
        other.set("asked", "v");
        other.set("asked-next", "v");
        self.view("Keys");
        self.intercept(
            "if (options.method !== 'DELETE') return real();
             await new Promise((go) => (window.go = go));
             return window.isRefused ? new Response('{\"error\": \"refused late\"}', { status: 403 }) : real();",
        );
        let question = "['#ask-yes', '#ask-error'].map((it) => document.querySelector(it)).map((it) => [it.textContent, it.disabled ?? it.hidden])";
        for (is_refused, notice) in [(true, "refused late"), (false, "Deleted: asked.")] {
            self.evaluate(&format!(
                "window.go = null; window.isRefused = {is_refused}"
            ));
            self.open_key("asked");
            self.click("Delete");
            self.click("Delete it");
            self.wait("go && document.querySelector('#ask-yes').disabled");
            self.evaluate("document.querySelector('#ask').close()");
            self.open_key("asked-next");
            self.click("Edit");
            self.fill(".editor textarea", "changed");
            self.click("Review …");
            self.see("Change this key?");
            let asked = self.evaluate(question);
            assert_eq!(asked[0], json!(["Change it", false]));
            self.evaluate("go()");
            self.see(notice);
            assert_eq!(self.evaluate(question), asked);
            let is_open = "document.querySelector('#ask').open";
            assert_eq!(self.evaluate(is_open), json!(true));
            for _ in 0..2 {
                self.click("Cancel");
            }
        }
        self.intercept_no_more();
        assert_eq!(other.get("asked"), None);
        assert_eq!(other.get("asked-next"), Some(b"v".to_vec()));
    }

    /// The change before the oldest one that is shown, and changes before which nothing is known.
    pub(super) fn long_history(&mut self) {
        let mut other = self.server.store("hmi-7");
        for number in 0..45 {
            other.set("often", format!("v{number}"));
        }
        let open_oldest = "[...document.querySelectorAll('.history summary')].at(-1).click()";
        let of_oldest = |selector: &str| {
            format!(
                "[...document.querySelectorAll('.history details')].at(-1).querySelector('{selector}')"
            )
        };
        self.open_key("often");
        self.see("40 of 45 changes are shown.");
        self.evaluate(open_oldest);
        for (side, value) in [(".diff .out", "v4"), (".diff .in", "v5")] {
            let side = of_oldest(side);
            self.wait(&format!("{side}.textContent.endsWith('{value}')"));
        }
        for (beginning, note) in [
            (
                "{ changes: 9, absent_before: true }",
                "The value before is not shown",
            ),
            (
                "{ changes: 2, absent_before: false }",
                "The value before is older than the history.",
            ),
        ] {
            self.intercept(&format!(
                "const answer = await real();
                 if (!path.startsWith('/v1/history')) return answer;
                 const all = await answer.json();
                 const changes = all.changes.slice(0, 2), beginning = {{ ...all.beginning, ...{beginning} }};
                 return new Response(JSON.stringify({{ changes, beginning }}));"
            ));
            self.evaluate("location.hash = '#/keys'");
            self.wait("document.querySelector('.pick')");
            self.open_key("often");
            self.wait("document.querySelectorAll('.history details').length === 2");
            self.evaluate(open_oldest);
            self.see(note);
            let is_value = format!("{}.textContent === 'v43'", of_oldest("pre"));
            assert_eq!(self.evaluate(&is_value), json!(true));
            let difference = self.evaluate(&of_oldest(".diff"));
            assert!(difference.is_null(), "{difference}");
        }
        self.intercept_no_more();
    }

    /// A name with an invisible character, and the name that is the text of its escape. Spaces that
    /// HTML leaves out, or that look like a plain one.
    pub(super) fn names_that_look_alike(&mut self) {
        let mut other = self.server.store("hmi-7");
        let keys = [
            ("\u{feff}z", "\\u{feff}z", "invisible"),
            ("\\u{feff}z", "\\\\u{feff}z", "escape"),
            ("a b", "a b", "single"),
            ("a  b", "a\\u{20}\\u{20}b", "double"),
            ("a b ", "a b\\u{20}", "trailing"),
            ("a\u{a0}b", "a\\u{a0}b", "no-break"),
            (" ", "\\u{20}", "blank"),
        ];
        for (key, _, value) in keys {
            other.set(key, value);
        }
        self.view("Keys");
        for (_, name, value) in keys {
            self.click(name);
            self.see_value(value);
            let title = self.evaluate("document.querySelector('.head h2').textContent");
            assert_eq!(title, json!(name));
        }
    }

    /// Keys whose beginnings are equal, as far as the store keeps them.
    pub(super) fn hot_keys_with_one_beginning(&mut self) {
        let mut other = self.server.store("hmi-7");
        let keys = ["1", "2"].map(|end| "k".repeat(300) + end);
        for key in &keys {
            other.set(key, "v");
        }
        self.view("Overview");
        let rows = "[...document.querySelectorAll('.hot tbody tr')].filter((it) => it.cells[0].textContent === 'k'.repeat(60) + '…').length";
        until("both keys are shown", || {
            for key in &keys {
                for _ in 0..20 {
                    other.get(key);
                }
            }
            self.evaluate(rows) == json!(2)
        });
    }

    /// Behind a foreign broker the store knows clients that own keys, and no connections.
    pub(super) fn foreign_broker(&mut self) {
        self.evaluate("window.go = null");
        self.intercept(
            "if (path.startsWith('/v1/usage')) await new Promise((go) => (window.go = go));
             if (!path.startsWith('/v1/clients')) return real();
             return new Response('{\"error\": \"ask the foreign broker\"}', { status: 409 });",
        );
        self.view("Clients");
        self.wait("go");
        // Nothing is known before the first answer.
        let text = self.evaluate("document.querySelector('main').innerText");
        assert!(!text.to_string().contains("No client"), "{text}");
        self.evaluate("go()");
        self.wait(
            "(() => {
               const at = (name) => [...document.querySelectorAll('thead th')].findIndex((it) => it.textContent.trim() === name);
               const row = [...document.querySelectorAll('tbody tr')].find((it) => it.cells[0].textContent === 'plc-1');
               return row.cells[at('Keys')].textContent === '4' && row.cells[at('Connected')].textContent === '–';
             })()",
        );
        self.see("The foreign broker has the connections.");
        self.wait("document.querySelector('main .why').hidden");
        self.intercept_no_more();
    }

    /// A window holds one connection of the browser. If there is none for a stream, the page says
    /// so. If there is none for an act, the page gives it up, since it must not take effect later.
    pub(super) fn held_connections(&mut self) {
        let mut other = self.server.store("hmi-7");
        other.set("held", "first");
        self.evaluate("window.held = new Set(); 0");
        self.intercept(
            "if (['/v1/changes', '/v1/live'].some((it) => path.startsWith(it))) {
               held.add(path);
               options.signal.addEventListener('abort', () => held.delete(path));
             }
             return real();",
        );
        self.view("Keys");
        self.open_key("held");
        let stream = "/v1/changes?prefix=%6c%69%6e%65%31%2f";
        self.fill(".find input", "line1/");
        self.wait(&format!("held.has('{stream}')"));
        assert_eq!(self.evaluate("[...held]"), json!([stream]));

        // A deletion is for the version that the operator saw.
        self.click("Delete");
        self.see("Delete this key?");
        other.set("held", "second");
        self.click("Delete it");
        self.see("the key was not changed: its version is");
        self.click("Cancel");
        self.see_value("second");

        self.intercept(
            "if (options.method !== 'DELETE' && !path.startsWith('/v1/changes')) return real();
             return new Promise((_, fail) => {
               const { signal } = options;
               signal.addEventListener('abort', () => fail(signal.reason));
             });",
        );
        self.evaluate(
            "{
               const wait = setTimeout, within = AbortSignal.timeout.bind(AbortSignal);
               window.setTimeout = (f, ms, ...all) => wait(f, Math.min(ms, 3000), ...all);
               AbortSignal.timeout = (ms) => within(Math.min(ms, 3000));
               0;
             }",
        );
        self.fill(".find input", "");
        self.see("No live changes: The store does not answer.");
        self.click("Delete");
        self.click("Delete it");
        self.see("It is not known whether this took effect");
        self.click("Cancel");
        self.intercept_no_more();
        assert_eq!(other.get("held"), Some(b"second".to_vec()));
    }

    /// A reload, after which the store refuses the session for a while.
    pub(super) fn resumed_session(&mut self) {
        let source = "{
            const real = fetch;
            window.isFull = true;
            window.asked = 0;
            window.fetch = async (url, options) => {
              if (String(url) !== '/v1/session' || !isFull) return real(url, options);
              asked++;
              return new Response('{\"error\": \"too many connections\"}', { status: 503 });
            };
          }";
        let how = json!({ "source": source });
        let script = self.send("Page.addScriptToEvaluateOnNewDocument", how);
        self.evaluate("location.reload()");
        self.see("too many connections. The next attempt is in");
        let asked = self.evaluate("asked");
        self.click("Try now");
        self.wait(&format!("asked > {asked}"));
        self.check(&[]);
        self.evaluate("isFull = false");
        self.wait("document.querySelector('#link').textContent === 'live'");
        let how = json!({ "identifier": script["identifier"] });
        self.send("Page.removeScriptToEvaluateOnNewDocument", how);
    }

    /// A pause keeps new entries off the list, and not those that a filter or a kind chooses.
    pub(super) fn paused_events(&mut self) {
        let act = "path=/v1/clients?id=victim";
        self.see(act);
        self.click("Pause");
        self.fill("main select", "refusal");
        self.see("administer");
        self.wait(&format!("!document.body.innerText.includes('{act}')"));
        self.fill("main .tools input", "no such text");
        self.see("No line in the list matches the filter.");
        self.fill("main .tools input", "");
        self.fill("main select", "");
        self.see(act);
        self.server.run(&["clients", "kick", "stranger"]).code(1);
        let text = self.evaluate("document.querySelector('main').innerText");
        assert!(!text.to_string().contains("stranger"), "{text}");
        self.click("Continue");
        self.see("stranger");
    }

    /// A canary takes whole percentages of the clients. A policy without a role is chosen.
    pub(super) fn canary_of_half_a_percent(&mut self) {
        self.click("Canary …");
        self.fill("dialog input", "0.5");
        self.click("Start the canary");
        let is_refused = "document.querySelector('dialog input:invalid').validity.stepMismatch && !document.querySelector('#ask-yes').disabled";
        assert_eq!(self.evaluate(is_refused), json!(true));
        self.fill("dialog select", "clients");
        self.wait("(({ type, value }) => type === 'text' && value === '')(document.querySelector('dialog input'))");
        self.click("Cancel");
    }

    /// A change is for the version that the editor shows, also if the page reads the key meanwhile.
    pub(super) fn edit_of_an_old_version(&mut self) {
        let mut other = self.server.store("hmi-7");
        other.set("edited", "first");
        self.view("Keys");
        // Another form of the link than the one of the tree.
        self.evaluate("location.hash = '#/keys/edited'");
        self.see_value("first");
        // Counts reads of keys that have ended and been shown.
        self.evaluate(
            "{
               window.reads = 0;
               const real = fetch;
               window.fetch = async (...all) => {
                 const answer = await real(...all);
                 if (String(all[0]).startsWith('/v1/key?')) setTimeout(() => reads++, 200);
                 return answer;
               };
               0;
             }",
        );
        self.click("Edit");
        other.set("edited", "second");
        self.click("edited");
        // One after the click, and one after the change.
        self.wait("reads >= 2");
        self.fill(".editor textarea", "third");
        self.click("Review …");
        self.see("It never expires.");
        self.click("Change it");
        self.wait("document.querySelector('#ask-error').textContent.length > 20");
        assert_eq!(other.get("edited"), Some(b"second".to_vec()));
        for _ in 0..2 {
            self.click("Cancel");
        }
        self.see_value("second");
    }

    /// Expiries beyond a year, up to the longest.
    pub(super) fn edits_of_long_expiries(&mut self) {
        let mut other = self.server.store("hmi-7");
        self.view("Keys");
        for (key, px, expires) in [
            ("long", "34560000000", "in 399"),
            ("longest", "9223372036854775807", "in 1067519"),
        ] {
            let set = other.ask(&["SET", key, "first", "PX", px]);
            assert_eq!(set.payload(), b"+OK\r\n");
            self.evaluate(&format!("location.hash = '#/keys/{key}'"));
            let is_shown = format!("{}?.startsWith('{expires}')", fact("expires"));
            self.wait(&is_shown);
            self.click("Edit");
            self.fill(".editor textarea", "second");
            self.click("Review …");
            self.click("Change it");
            self.see(&format!("Written: {key} has version"));
            assert_eq!(other.get(key), Some(b"second".to_vec()));
            self.see_value("second");
            self.wait(&is_shown);
        }
    }

    /// The number of keys below a prefix that is closed.
    pub(super) fn counts_of_prefixes(&mut self) {
        let mut other = self.server.store("hmi-7");
        let row = |count: usize| {
            format!(
                "[...document.querySelectorAll('.row')].some((it) => it.textContent === 'counted/{count}')"
            )
        };
        for number in 0..3 {
            other.set(format!("counted/{number}"), "v");
        }
        self.wait(&row(3));
        other.set("counted/3", "v");
        self.wait(&row(4));
        other.ask(&["DEL", "counted/3"]);
        self.wait(&row(3));
    }

    /// The figures of a chosen policy grow, and its buttons keep the focus.
    pub(super) fn figures_of_a_policy(&mut self) {
        self.view("Policies");
        self.click_beginning("standard@");
        let commands = fact("commands");
        self.wait(&format!("{commands}.includes('GET ')"));
        let first = self.evaluate(&commands);
        let focus = "document.querySelector('.card .acts button').focus()";
        self.evaluate(focus);
        self.wait(&format!("{commands} !== {first}"));
        let focused = "document.activeElement === document.querySelector('.card .acts button')";
        assert_eq!(self.evaluate(focused), json!(true));
    }

    /// Lists without a match, and clients whose keys the store does not list.
    pub(super) fn filters_and_unknown_owners(&mut self) {
        for (view, text) in [
            ("Clients", "No client in the list matches the filter."),
            ("Events", "No line in the list matches the filter."),
        ] {
            self.view(view);
            self.fill("main .tools input", "no such text");
            self.see(text);
        }
        self.evaluate(
            "{
               window.real = fetch;
               window.fetch = async (...all) => {
                 const answer = await real(...all);
                 if (!String(all[0]).startsWith('/v1/usage')) return answer;
                 const usage = await answer.json();
                 return new Response(JSON.stringify({ ...usage, clients: [], owners: 1 }));
               };
               0;
             }",
        );
        self.view("Clients");
        self.wait(
            "(() => {
               const at = [...document.querySelectorAll('thead th')].findIndex((it) => it.textContent.trim() === 'Keys');
               const row = [...document.querySelectorAll('tbody tr')].find((it) => it.cells[0].textContent === 'plc-1');
               return row.cells[at].textContent === '–' && row.cells[at + 1].textContent === '–';
             })()",
        );
        self.evaluate("window.fetch = real; 0");
    }

    /// The time that a key has left is that of the store, also if the clocks of the browser and of
    /// the store's machine are wrong.
    pub(super) fn wrong_clocks(&mut self) {
        self.clock.set(-3600);
        self.wait("document.querySelector('#ready').textContent.startsWith('not ready')");
        self.view("Clients");
        self.wait(
            "(() => {
               const row = [...document.querySelectorAll('tbody tr')].find((it) => it.cells[0].textContent === 'plc-1');
               return row && /^\\d+\\s(s|min)/.test(row.cells[4].textContent);
             })()",
        );
        self.evaluate(
            "{
               const now = Date.now.bind(Date);
               Date.now = () => now() + 10 * 60 * 1000;
               0;
             }",
        );
        let mut other = self.server.store("hmi-7");
        let set = other.ask(&["SET", "timed", "first", "PX", "3580000"]);
        assert_eq!(set.payload(), b"+OK\r\n");
        self.view("Keys");
        self.evaluate("location.hash = '#/keys/timed'");
        let expires = format!("/^in 5[5-9]/.test({})", fact("expires"));
        self.wait(&expires);
        self.click("Edit");
        self.fill(".editor textarea", "second");
        self.click("Review …");
        self.wait("/It expires 5[5-9]/.test(document.body.innerText)");
        self.click("Change it");
        self.see("Written: timed has version");
        self.see_value("second");
        self.wait(&expires);
    }

    /// A stopped process closes no connection, and answers nothing.
    pub(super) fn silent_store(&mut self) {
        self.load = None;
        self.view("Clients");
        self.wait("document.querySelector('main .tools small').textContent.includes('connected')");
        // Shorter time limits, and the errors of the stream of the overview.
        self.evaluate(
            "{
               const wait = setTimeout, within = AbortSignal.timeout.bind(AbortSignal);
               window.losses = [];
               window.setTimeout = (f, ms, ...all) => {
                 if (ms === 40000) window.isShort = true;
                 return wait(f, Math.min(ms, 3000), ...all);
               };
               AbortSignal.timeout = (ms) => within(Math.min(ms, 3000));
               const lost = document.querySelector('#lost');
               new MutationObserver(() => losses.push(lost.textContent)).observe(lost, { childList: true });
             }",
        );
        self.wait("isShort");
        self.server.signal("STOP");
        self.wait("!document.querySelector('main .why').hidden");
        self.see("The store does not answer.");
        // The stream that was open, and one that does not begin.
        self.wait("losses.length >= 2");
        self.server.signal("CONT");
        self.wait(
            "document.querySelector('main .why').hidden && document.querySelector('#lost').hidden",
        );
        let losses = self.evaluate("losses");
        for (at, loss) in losses.as_array().expect("a list").iter().enumerate() {
            let loss = loss.as_str().expect("texts");
            let expected = match at {
                0 => "The store has been silent for too long.",
                _ => "The store does not answer.",
            };
            assert!(loss.starts_with(expected), "{losses}");
        }
    }
}
