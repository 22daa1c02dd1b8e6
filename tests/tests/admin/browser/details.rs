//! What the page shows and does while a key changes, a clock is wrong, or the store is silent.

use serde_json::json;

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
            ("longest", "9223372036854775807", "in 106751991167"),
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
                 return wait(f, ms === 40000 ? 3000 : ms, ...all);
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
        for loss in losses.as_array().expect("a list") {
            let loss = loss.as_str().expect("texts");
            let expected = "The store has been silent for too long.";
            assert!(loss.starts_with(expected), "{losses}");
        }
    }
}
