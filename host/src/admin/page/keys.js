// Keys: the tree, one key, and the live changes below a prefix.

import { follow, repeat } from "./api.js";
import { bytesOf, decoded, el, encoded, moment, panel, plain, shown, table, text } from "./dom.js";
import { tree } from "./tree.js";
import { keyView } from "./key.js";

const CHANGES_MAX = 60;
/** From one look at an open key that is not in the list of changes to the next. */
const LOOK_MS = 2000;

export function open(main, page, rest) {
  const names = tree((key) => (location.hash = `#/keys/${encoded(key)}`));
  const one = keyView(page);
  const feed = changes({
    onchange(change) {
      names.changed(change);
      one.changed(change);
    },
    onmissed() {
      names.stale();
      one.stale();
    },
  });
  let prefix = "", key = null, timer = null;
  // Another stream would hold another connection of the browser.
  const looking = setInterval(() => key !== null && !isFollowed() && !document.hidden && one.look(), LOOK_MS);

  const input = el("input", { type: "search", placeholder: "prefix or key", spellcheck: "false", autocapitalize: "none", autocomplete: "off", maxlength: 4096, "aria-label": "Prefix of the keys that are shown, or a key to open" });
  const form = el("form.find", { role: "search" }, input, el("button", { type: "submit" }, "Open key"));
  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => below(input.value), 250);
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (input.value !== "") location.hash = `#/keys/${encoded(input.value)}`;
  });

  function below(next) {
    prefix = next;
    names.show(prefix);
    feed.follow(prefix);
  }

  /** Whether the stream of the list has the changes of the open key. */
  function isFollowed() {
    const all = bytesOf(key);
    return bytesOf(prefix).every((it, at) => it === all[at]);
  }

  function go(hash) {
    key = hash === "" ? null : decoded(hash);
    main.classList.toggle("has-key", key !== null);
    names.choose(key);
    one.show(key);
  }

  main.append(el("h1.unseen", {}, "Keys"),
    el("div.columns.keys", {},
      el("div.side", {}, panel("Keys", null, form, names.element), feed.element),
      one.element));
  below("");
  go(rest);
  return {
    go,
    keepsFocus: true,
    tick: one.tick,
    close() {
      clearTimeout(timer);
      clearInterval(looking);
      feed.close();
      names.close();
      one.close();
    },
  };
}

/**
 * The last changes below a prefix, as they happen. Calls `onchange(change)` for each, and
 * `onmissed()` when there may have been others.
 */
function changes({ onchange, onmissed }) {
  const state = el("small.dim", { role: "status" });
  const pause = el("button.quiet", { type: "button", "aria-pressed": "false" }, "Pause");
  const list = table({
    caption: "Live changes, the last first", empty: "Changes of these keys appear here.", limit: CHANGES_MAX,
    keyOf: (it) => it.number,
    columns: [
      { title: "At", of: (it) => moment(it.at) },
      { title: "Change", of: (it) => el(`span.badge.${it.kind === "set" ? "good" : "warn"}`, {}, it.kind) },
      { title: "Key", of: (it) => el("a.key", { href: `#/keys/${encoded(it.key)}` }, shown(it.key, 80)) },
      { title: "Client", of: (it) => el("span.key", {}, plain(it.client ?? "–", 60)) },
    ],
  });
  let stream = null, error = null, kept = [], count = 0, isPaused = false, isCut = false, pending = null;
  pause.addEventListener("click", () => {
    isPaused = !isPaused;
    pause.setAttribute("aria-pressed", String(isPaused));
    text(pause, isPaused ? "Continue" : "Pause");
    if (!isPaused) list.show(kept);
  });

  function say() {
    text(state, error ? `No live changes: ${error.message}` : isCut ? "Some changes were too fast for this page and are left out." : "");
  }

  function take(name, document) {
    if (name === "lost") {
      isCut = true;
      say();
    }
    if (name === "lost" || name === "open") return onmissed();
    if (name !== "change") return;
    kept.unshift({ ...document, number: ++count });
    kept.length = Math.min(kept.length, CHANGES_MAX);
    onchange(document);
    pending ??= requestAnimationFrame(() => {
      pending = null;
      if (!isPaused) list.show(kept);
    });
  }

  return {
    element: panel("Live changes", el("span", {}, state, " ", pause), list.element),
    follow(prefix) {
      stream?.stop();
      [kept, isCut, error] = [[], false, null];
      say();
      list.show(kept);
      stream = repeat(async (signal, alive) => {
        await follow(`/v1/changes?prefix=${encoded(prefix)}`, signal, (name, document) => {
          alive();
          take(name, document);
        });
        return 1000;
      }, (next) => {
        error = next;
        say();
      });
    },
    close: () => stream?.stop(),
  };
}
