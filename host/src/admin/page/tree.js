// The tree of keys by prefix. A level is read when it is opened, page by page, so that the browser
// never holds more than the operator asked for.

import { get } from "./api.js";
import { bytesOf, el, encoded, number, ofBytes, same, shown, text } from "./dom.js";

const PAGE = 100;
/** Names of one level. Beyond it the operator gives a longer prefix. */
const LEVEL_MAX = 1000;
/** From missed changes to the read of the levels that are open. */
const REFRESH_MS = 1500;
/** From a change below a prefix to the read of the number of its keys. */
const RECOUNT_MS = 3000;
const DELIMITER = "/";

/** A tree that calls `onpick(key)` for a chosen key. */
export function tree(onpick) {
  const element = el("div.tree", { role: "tree", "aria-label": "Keys by prefix" });
  let root = null, chosen = null, pending = null, recounting = null, changes = 0;
  /** Levels with a prefix whose number of keys may have changed. */
  const outdated = new Set();

  async function show(prefix) {
    root = level(prefix, 1, null);
    element.replaceChildren();
    await more(root);
  }

  const level = (prefix, depth, row) => ({ prefix, depth, row, rows: [], byName: new Map(), next: null, isOpen: true, isRead: false });

  /** Whether a level is shown. It may have been closed, and opened again, since a read began. */
  const isShown = (of) => of === root || (of.row !== null && of.row.isConnected && of.row.below === of);

  const read = (of, limit, after = "") => get(`/v1/keys?prefix=${encoded(of.prefix)}&delimiter=${encoded(DELIMITER)}&limit=${limit}${after}`);

  /** Reads the next page of a level. */
  async function more(of) {
    const after = of.next === null ? "" : `&after=${encodeURIComponent(of.next)}`;
    const lastBefore = of.rows.at(-1);
    untail(of);
    let page;
    try {
      page = await read(of, PAGE, after);
    } catch (error) {
      if (isShown(of)) tail(of, error.message, "Try again");
      return;
    }
    if (!isShown(of)) return;
    of.isRead = true;
    for (const entry of page.entries) add(of, entry, of.rows.length);
    of.next = page.next;
    end(of);
    rove();
    return of.rows[of.rows.indexOf(lastBefore) + 1];
  }

  /** Reads a level after a click. The button is removed, so the focus moves on. */
  async function moreFrom(of) {
    const first = await more(of);
    if (document.activeElement === document.body && isShown(of)) first ? rove(first) : of.last?.querySelector("button")?.focus();
  }

  /** Shows what a level leaves out. */
  function end(of) {
    untail(of);
    if (of.next !== null && of.rows.length >= LEVEL_MAX) tail(of, `The first ${number(of.rows.length)} names are shown. Type a longer prefix to see others.`);
    else if (of.next !== null) tail(of, "", "More …");
    else if (of.rows.length === 0) tail(of, of === root ? "No key begins with this prefix." : "No keys any more.");
  }

  /** Reads a level again with those below it, after changes that were missed. */
  async function again(of) {
    await reread(of);
    if (isShown(of)) for (const row of of.rows) if (row.below) await again(row.below);
  }

  /** Reads a level again. */
  async function reread(of) {
    if (!of.isRead) return;
    const began = changes;
    const page = await read(of, Math.min(LEVEL_MAX, of.rows.length + PAGE));
    if (!isShown(of)) return;
    const nameOf = (it) => (it.kind === "key" ? it.key : it.name);
    const names = new Set(page.entries.map((it) => JSON.stringify(nameOf(it))));
    const last = page.next === null ? null : nameOf(page.entries.at(-1));
    // A row that changed during the read is newer than what was read.
    const isNewer = (row) => row.change > began;
    for (const row of of.rows) {
      if (isNewer(row)) continue;
      const isRead = last === null || compare(row.key, last) <= 0;
      if (isRead) row.classList.toggle("is-gone", !names.has(JSON.stringify(row.key)));
    }
    for (const entry of page.entries) {
      const row = of.byName.get(JSON.stringify(nameOf(entry)));
      if (!row) insert(of, entry);
      else if (!row.isKey || !isNewer(row)) detail(row, entry);
    }
    if (of.next === null) of.next = page.next;
    if (!of.last) end(of);
    rove();
  }

  /** Adds a row in order, unless it belongs to the names that are not read yet. */
  function insert(of, entry) {
    const name = entry.kind === "key" ? entry.key : entry.name;
    const at = of.rows.findIndex((it) => compare(it.key, name) > 0);
    if (at < 0 && of.next !== null) return null;
    // A button that is still right keeps its focus.
    if (!of.last?.querySelector("button") || of.rows.length + 1 >= LEVEL_MAX) untail(of);
    return add(of, entry, at < 0 ? of.rows.length : at);
  }

  function untail(of) {
    of.last?.remove();
    of.last = null;
  }

  function tail(of, message, again) {
    of.last = el("div.tail.dim", { role: "none" }, message, " ", again && el("button.quiet", { type: "button", onclick: () => moreFrom(of) }, again));
    of.last.style.setProperty("--depth", of.depth);
    endOf(of).after(of.last);
  }

  /** The last row of a level with all rows below it. */
  function endOf(of) {
    const row = of.rows.at(-1);
    if (!row) return of.row ?? element.appendChild(el("span", { hidden: true }));
    return row.below?.isOpen ? row.below.last ?? endOf(row.below) : row;
  }

  function add(of, entry, at) {
    const isKey = entry.kind === "key", name = isKey ? entry.key : entry.name;
    const known = of.byName.get(JSON.stringify(name));
    if (known) return detail(known, entry);
    const label = shown(tailOf(name, of.prefix), 120) || "(empty)";
    const row = el("div.row", { role: "treeitem", "aria-level": of.depth, "aria-expanded": isKey ? null : "false", tabindex: -1, title: shown(name, 1000) },
      el("span.name", {}, label), el("small.dim"));
    row.style.setProperty("--depth", of.depth);
    Object.assign(row, { isKey, key: name, level: of });
    row.classList.add(isKey ? "is-key" : "is-prefix");
    detail(row, entry);
    row.addEventListener("click", () => (isKey ? pick(row) : toggle(row)));
    const before = at === 0 ? of.row ?? null : endOf({ ...of, rows: of.rows.slice(0, at) });
    if (before) before.after(row);
    else element.prepend(row);
    of.rows.splice(at, 0, row);
    of.byName.set(JSON.stringify(name), row);
    mark(row);
    return row;
  }

  function detail(row, entry) {
    const count = entry.kind === "prefix" ? (Number.isFinite(entry.keys) ? number(entry.keys) : "") : Number.isFinite(entry.bytes) ? `${number(entry.bytes)} B` : "";
    text(row.lastElementChild, count);
  }

  function toggle(row, open = !row.below?.isOpen) {
    row.setAttribute("aria-expanded", String(open));
    if (!open) {
      if (row.below) clear(row.below);
      row.below = null;
      // The row that took part in the order of the Tab key may have been below.
      if (!element.querySelector('.row[tabindex="0"]')) row.tabIndex = 0;
    } else if (!row.below) {
      row.below = level(row.key, row.level.depth + 1, row);
      more(row.below);
    }
  }

  function clear(of) {
    of.last?.remove();
    for (const row of of.rows) {
      if (row.below) clear(row.below);
      row.remove();
    }
    of.rows = [];
  }

  function pick(row) {
    rove(row);
    onpick(row.key);
  }

  function choose(key) {
    chosen = key;
    for (const row of element.querySelectorAll(".is-key")) mark(row);
  }

  function mark(row) {
    const isChosen = chosen !== null && row.isKey && same(row.key, chosen);
    row.setAttribute("aria-selected", String(isChosen));
  }

  /** Exactly one row takes part in the order of the Tab key. */
  function rove(to) {
    const rows = [...element.querySelectorAll(".row")];
    const now = to ?? rows.find((it) => it.tabIndex === 0) ?? rows[0];
    for (const row of rows) row.tabIndex = row === now ? 0 : -1;
    if (to) to.focus();
  }

  element.addEventListener("keydown", (event) => {
    const row = event.target.closest(".row");
    if (!row) return;
    const rows = [...element.querySelectorAll(".row")], at = rows.indexOf(row);
    const acts = {
      ArrowDown: () => rove(rows[at + 1] ?? row),
      ArrowUp: () => rove(rows[at - 1] ?? row),
      Home: () => rove(rows[0]),
      End: () => rove(rows.at(-1)),
      ArrowRight: () => !row.isKey && (row.below ? rove(rows[at + 1] ?? row) : toggle(row, true)),
      ArrowLeft: () => (row.below ? toggle(row, false) : rove(row.level.row ?? row)),
      Enter: () => (row.isKey ? pick(row) : toggle(row)),
      " ": () => (row.isKey ? pick(row) : toggle(row)),
    };
    if (!acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  });

  /** Shows a change of a key in the levels that are open. */
  function changed({ key, kind, bytes }) {
    const isSet = kind === "set", all = bytesOf(key);
    for (let of = root; of?.isRead; ) {
      const head = bytesOf(of.prefix);
      if (!head.every((it, at) => it === all[at])) return;
      const cut = all.indexOf(DELIMITER.charCodeAt(0), head.length);
      const name = cut < 0 ? key : ofBytes(all.slice(0, cut + 1));
      let row = of.byName.get(JSON.stringify(name));
      if (!row && isSet && of.rows.length < LEVEL_MAX) {
        const last = of.last;
        row = insert(of, cut < 0 ? { kind: "key", key } : { kind: "prefix", name });
        if (last && !of.last) end(of);
        rove();
      }
      if (!row) return;
      row.change = ++changes;
      if (row.isKey && isSet && Number.isFinite(bytes)) detail(row, { kind: "key", bytes });
      row.classList.toggle("is-gone", !isSet && (row.isKey || row.classList.contains("is-gone")));
      if (row.isKey || !row.below) flash(row);
      if (!row.isKey) recount(of);
      of = row.below;
    }
  }

  /** Reads the numbers of a level again soon: a change does not say whether its key is new. */
  function recount(of) {
    outdated.add(of);
    recounting ??= setTimeout(async () => {
      recounting = null;
      const levels = [...outdated].filter(isShown);
      outdated.clear();
      // The next change causes another read if this one fails.
      for (const it of levels) await reread(it).catch(() => {});
    }, RECOUNT_MS);
  }

  /** Changes were missed: reads the levels that are open again soon. */
  function stale() {
    // The next stream that opens causes another read if this one fails.
    pending ??= setTimeout(() => {
      pending = null;
      again(root).catch(() => {});
    }, REFRESH_MS);
  }

  return { element, show, choose, changed, stale, close: () => (clearTimeout(pending), clearTimeout(recounting)) };
}

function flash(row) {
  row.classList.remove("is-new");
  requestAnimationFrame(() => row.classList.add("is-new"));
}

/** A name without the delimited part of the prefix of its level. */
const tailOf = (name, prefix) => ofBytes(bytesOf(name).slice(bytesOf(prefix).lastIndexOf(DELIMITER.charCodeAt(0)) + 1));

function compare(a, b) {
  const [x, y] = [bytesOf(a), bytesOf(b)];
  for (let at = 0; at < Math.min(x.length, y.length); at++) if (x[at] !== y[at]) return x[at] - y[at];
  return x.length - y.length;
}
