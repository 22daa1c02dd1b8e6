// One key: its value, what is known about it, its history, and how to change it.

import { Refused, ask, get, past } from "./api.js";
import { button, confirm, field, problem } from "./act.js";
import { bytes as size, el, encoded, moment, number, oneLine, panel, plain, same, shown, span, text } from "./dom.js";
import { difference, formsOf, textOf, view } from "./bytes.js";

const HISTORY_MAX = 40;
/** A value that an editor of text can hold well. */
const EDIT_MAX = 64 << 10;
/** The longest expiry in ms: the last number here that is less than 2⁶³, the limit of SET. */
const EXPIRY_MAX = 2 ** 63 - 1024;
/** From a change to the read that shows it: several changes within this time cause one read. */
const REFRESH_MS = 700;
const RETRY_MS = 3000;

export function keyView(page) {
  const element = el("div.one");
  let key = null, found = null, form = null, isEditing = false, turn = 0, looks = 0, reads = 0, pending = null, expiry = null, drawn = null;

  /** Reads the key, and shows it. */
  async function show(next) {
    if (!same(next, key)) [form, isEditing, found, drawn] = [null, false, null, null];
    key = next;
    if (key === null) return void element.replaceChildren(el("p.pick.dim", {}, "Choose a key to see its value, its history and its watchers."));
    const own = ++turn, look = ++looks;
    try {
      const next = await read();
      if (own !== turn || look !== looks) return;
      found = next;
      if (!isEditing) draw();
    } catch (error) {
      if (own === turn) fail(error);
    }
  }

  /** What the store knows of the key; null if there is no such key. */
  async function read() {
    reads++;
    try {
      return await get(`/v1/key?key=${encoded(key)}`);
    } catch (error) {
      if (error instanceof Refused && error.status === 404) return null;
      throw error;
    } finally {
      reads--;
    }
  }

  /** Shows a live change, and keeps what the operator has opened. */
  async function refresh() {
    const own = turn, look = ++looks;
    let next;
    try {
      next = await read();
    } catch {
      if (own === turn) soon(RETRY_MS);
      return;
    }
    if (own !== turn || look !== looks || isEditing || (drawn && same(next, found))) return;
    const isOther = !drawn || !next || !found || !same(formsOf(next.value), formsOf(found.value));
    found = next;
    if (isOther) return draw();
    const facts = about();
    drawn.facts.replaceWith(facts);
    drawn.facts = facts;
    drawn.body.replaceChildren(view(found.value, form));
    drawn.newer.hidden = false;
  }

  /** Reads the key soon, since it may have changed. */
  function soon(wait) {
    if (key === null) return;
    pending ??= setTimeout(() => {
      pending = null;
      refresh();
    }, wait);
  }

  function fail(error) {
    drawn = null;
    const line = problem();
    line.show(error);
    element.replaceChildren(panel(shown(key, 60), el("button", { type: "button", onclick: () => show(key) }, "Try again"), line.element));
  }

  function draw() {
    const title = el("h2.key", { title: shown(key, 4096) }, shown(key, 400));
    const back = el("a.back", { href: "#/keys" }, "‹ all keys");
    const acts = el("span.acts", {},
      button(page, "operate", found ? "Edit" : "Create", edit),
      found && button(page, "operate", "Delete", remove, "danger"));
    drawn = { facts: found ? about() : el("p", {}, "There is no such key now. Its history may still be known.") };
    const head = el("section.panel.head", { "aria-label": "Key" }, back, el("header", {}, title, acts), drawn.facts);
    element.replaceChildren(head, ...(found ? [value()] : []), history());
  }

  function about() {
    const { version, expires_ms: expires, bytes, fencing_token: fence, client, watches } = found;
    const holds = expires && client && textOf(found.value) === client;
    const entries = [
      ["version", el("span.key", {}, plain(version))],
      ["written", moment(parseInt(version, 10))],
      ["expires", expires ? (expiry = el("span", { "data-at": expires })) : "never"],
      ["size", size(bytes)],
      ["last writer", plain(client || "unknown", 60)],
      holds && ["lock held by", plain(client, 60)],
      ["watched by", `${number(watches)} watch${watches === 1 ? "" : "es"}`],
      fence && ["fencing token", el("span.key", {}, plain(fence))],
    ].filter(Boolean);
    if (!expires) expiry = null;
    tick();
    return el("dl.facts", {}, entries.map(([name, it]) => el("div", {}, el("dt", {}, name), el("dd", {}, it))));
  }

  function tick() {
    if (expiry) text(expiry, `in ${span(Number(expiry.dataset.at) - page.now())}`);
  }

  function value() {
    const forms = formsOf(found.value);
    form = forms.includes(form) ? form : forms[0];
    const body = (drawn.body = el("div", {}, view(found.value, form)));
    const cut = found.truncated && el("p.note.dim", {}, `The beginning of ${size(found.bytes)} is shown. \`statehouse get\` prints all of it.`);
    const choice = el("span.choice", { role: "radiogroup", "aria-label": "Show as" }, forms.map((it) => el("label", {},
      el("input", { type: "radio", name: "form", checked: it === form, onchange: () => body.replaceChildren(view(found.value, (form = it))) }), it)));
    return panel("Value", choice, body, cut);
  }

  function history() {
    const list = el("div.history"), own = turn;
    const newer = (drawn.newer = el("button.small", { type: "button", hidden: true, onclick: () => load() }, "Newer changes: read again"));
    const load = async () => {
      newer.hidden = true;
      try {
        // One change more than is shown, for the difference of the oldest one.
        const all = await past(`/v1/history?key=${encoded(key)}&limit=${HISTORY_MAX + 1}`);
        if (own === turn) list.replaceChildren(...changes(all));
      } catch (error) {
        list.replaceChildren(el("p.dim", {}, oneLine(error.message, 500)));
      }
    };
    load();
    return panel("History", el("span", {}, newer, " ", el("small.dim", {}, "newest first; open a change to see its difference")), list);
  }

  function changes({ changes: all, beginning }) {
    // What was before the oldest of these changes: why it is unknown, or its entry if it had one.
    const { before, absent_before: isAbsent } = beginning;
    const unknown = all.length < beginning.changes ? "The value before is not shown: the answer of the store has no room for it."
      : before || isAbsent ? null : "The value before is older than the history.";
    const first = unknown === null && before ? { event: "set", version: before.version, truncated: true } : null;
    const rows = all.slice(0, HISTORY_MAX).map((it, at) => {
      const head = el("summary", {},
        moment(Date.parse(it.time)), el(`span.badge.${it.event === "set" ? "good" : "warn"}`, {}, it.event),
        el("span.by", {}, plain(it.client || "the store", 60), it.user && el("span.dim", {}, ` ${plain(it.user, 40)}`)),
        el("small.dim", {}, [it.policy && `${plain(it.policy.name, 30)}@${plain(it.policy.version, 20)}`, Number.isFinite(it.bytes) && `${number(it.bytes)} B`].filter(Boolean).join(" · ")));
      const body = el("div");
      const details = el("details", { open: at === 0 }, head, body);
      const fill = () => details.open && !body.hasChildNodes() && compare(body, it, all[at + 1] ?? first, at === all.length - 1 ? unknown : null);
      details.addEventListener("toggle", fill);
      if (at === 0) fill();
      return details;
    });
    const until = beginning.since ? `The history reaches back to ${beginning.since}.` : "";
    const cut = rows.length < beginning.changes ? ` ${number(rows.length)} of ${number(beginning.changes)} changes are shown.` : "";
    return [...rows, el("p.note.dim", {}, rows.length ? until + cut : `No change is known. ${until}`)];
  }

  /** Shows the difference from the change before, or the value alone if that is `unknown`. */
  async function compare(body, now, before, unknown) {
    body.append(el("p.key.dim", {}, `version ${plain(now.version)}, record ${number(now.record)}`));
    try {
      const [old, after] = await Promise.all([whole(before), whole(now)]);
      if (unknown === null) return body.append(difference(old, after));
      body.append(after === null ? "" : view(after, formsOf(after)[0]), el("p.note.dim", {}, unknown));
    } catch (error) {
      body.append(el("p.why", {}, oneLine(error.message, 500)));
    }
  }

  /** The whole value of a change; null if the change left none. */
  async function whole(change) {
    if (!change || change.event !== "set") return null;
    if (!change.truncated) return change.value;
    return (await past(`/v1/value?key=${encoded(key)}&as_of=${encodeURIComponent(change.version)}`)).value;
  }

  // Changes by the operator.

  /** An act is for the key and the version that the operator saw. Both may change meanwhile. */
  function edit() {
    const target = key, base = found;
    const old = base ? textOf(base.value) : "";
    const why = base?.truncated ? "This value is too long for the page." : old === null ? "This value is no text." : old.length > EDIT_MAX ? "This value is too long for the page." : old.includes("\r") ? "This value has carriage returns, which a browser would change." : null;
    if (why) return confirm({ title: "Edit in a terminal", body: `${why} Use \`statehouse set\`.`, yes: "Close", act: async () => "Nothing was changed." });
    isEditing = true;
    const area = el("textarea", { rows: 10, spellcheck: "false", maxlength: EDIT_MAX, "aria-label": "New value" }, old);
    const left = () => base.expires_ms - page.now();
    const seconds = base?.expires_ms ? Math.max(1, Math.round(left() / 1000)) : null;
    const expires = el("input", { type: "number", value: seconds, min: 1, step: 1, placeholder: "never", inputmode: "numeric" });
    const fence = el("input", { type: "text", value: base?.fencing_token ?? null, maxlength: 256, spellcheck: "false" });
    const guard = el("input", { type: "checkbox", checked: true });
    // The key may have changed since. What was drawn before is not on the page any more.
    const stop = () => {
      [isEditing, drawn] = [false, null];
      show(target);
    };
    const form = el("form.editor", {}, area,
      el("div.fields", {}, field("Expires after, in seconds", expires), base?.fencing_token && field("Fencing token", fence, "Only a token as high as the last one may write."),
        base && el("label.tick", {}, guard, " Only if it still has this version")),
      el("p.acts", {}, el("button.primary", { type: "submit" }, "Review …"), el("button", { type: "button", onclick: stop }, "Cancel")));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const query = [`key=${encoded(target)}`];
      // An expiry that was not touched stays: the field rounds it, and the operator takes time.
      const isKept = seconds !== null && expires.value === expires.defaultValue;
      const given = Number(expires.value) * 1000;
      const px = expires.value ? () => Math.min(EXPIRY_MAX, Math.max(1, Math.round(isKept ? left() : given))) : null;
      if (!base || guard.checked) query.push(`if_version=${base ? encodeURIComponent(base.version) : "none"}`);
      if (base?.fencing_token && fence.value) query.push(`fence=${encodeURIComponent(fence.value)}`);
      if (await write(target, base, query, area.value, px) && same(target, key)) stop();
    });
    element.replaceChildren(element.firstElementChild, panel(base ? "New value" : "Value of the new key", null, form));
    area.focus();
  }

  const write = (target, base, query, value, px) => confirm({
    title: base ? "Change this key?" : "Create this key?",
    body: [el("p.key", {}, shown(target, 400)), difference(base?.value ?? null, value), px === null ? "It never expires." : `It expires ${span(px())} after the write.`,
      "The write goes through the active policy, as that of any client. Its record names the client `$operator`, and your user if you have one."],
    yes: base ? "Change it" : "Create it",
    act: async () => {
      const all = px === null ? query : [...query, `px=${px()}`];
      const answer = await ask("PUT", `/v1/key?${all.join("&")}`, { body: value });
      return `Written: ${shown(target, 60)} has version ${answer.version}.`;
    },
  });

  async function remove() {
    const target = key, base = found;
    const fence = el("input", { type: "text", value: base.fencing_token ?? null, maxlength: 256, spellcheck: "false" });
    const isDone = await confirm({
      title: "Delete this key?", yes: "Delete it", isDangerous: true,
      body: [el("p.key", {}, shown(target, 400)), `Clients that watch it are notified (${number(base.watches)} now). The history keeps its values.`, ...(base.fencing_token ? [field("Fencing token", fence)] : [])],
      act: async () => {
        const query = [`key=${encoded(target)}`, `if_version=${encodeURIComponent(base.version)}`];
        if (base.fencing_token && fence.value) query.push(`fence=${encodeURIComponent(fence.value)}`);
        await ask("DELETE", `/v1/key?${query.join("&")}`);
        return `Deleted: ${shown(target, 60)}.`;
      },
    });
    if (isDone && same(target, key)) show(target);
  }

  return {
    element,
    show,
    tick,
    /** A live change. */
    changed: (change) => same(change.key, key) && soon(REFRESH_MS),
    /** Changes were missed. */
    stale: () => soon(REFRESH_MS),
    /** Reads the key if no read is under way: reads of a store that is silent must not pile up. */
    look: () => reads > 0 || soon(0),
    close() {
      clearTimeout(pending);
      turn++;
    },
  };
}
