// Builds elements, tables and texts. Stored bytes and names are hostile: they reach the document as
// text only, without control and direction characters.

const SVG = "http://www.w3.org/2000/svg";

/** Creates an element: `el("p.dim", { title: "x", onclick: f }, "text", child)`. */
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name.split(".")[0]), name, attributes, children);
}

/** The same for SVG. */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name.split(".")[0]), name, attributes, children);
}

function fill(node, name, attributes, children) {
  const classes = name.split(".").slice(1);
  if (classes.length) node.classList.add(...classes);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((it) => it !== null && it !== undefined && it !== false));
  return node;
}

/** Sets a text if it changed, so that selections survive. */
export function text(node, value) {
  const shown = String(value ?? "");
  if (node.textContent !== shown) node.textContent = shown;
  return node;
}

/** Characters that change how others are shown, or that are not shown. */
const UNSEEN = /[\p{Cc}\p{Default_Ignorable_Code_Point}\u2028\u2029\u2800\ufff9-\ufffb]/gu;
/**
 * The same in names, and the spaces that HTML leaves out or that look like a plain one. A single
 * plain space between other characters stays.
 */
const UNSEEN_IN_NAMES = new RegExp(`${UNSEEN.source}|(?! )\\p{Zs}|^ | $|(?<= ) | (?= )`, "gu");
const UNSEEN_BUT_LINES = new RegExp(`(?![\\t\\n])${UNSEEN.source}`, "gu");

const escaped = (it) => "\\u{" + it.codePointAt(0).toString(16) + "}";

function cut(value, max, isCut) {
  const whole = String(value ?? "");
  return isCut || whole.length > max ? whole.slice(0, max) + "…" : whole;
}

/**
 * A name as one visible line, at most `max` characters. `isCut` says that it is only the beginning.
 * Backslashes are escaped too, so that no name looks like the escapes of another one.
 */
export const plain = (value, max = 200, isCut = false) => cut(value, max, isCut).replaceAll("\\", "\\\\").replace(UNSEEN_IN_NAMES, escaped);

export const nameOf = (policy) => `${plain(policy.name, 60)}@${plain(policy.version, 30)}`;

/** A message as one visible line. Keeps backslashes, because it may quote names that are escaped. */
export const oneLine = (value, max = 200) => cut(value, max, false).replace(UNSEEN, escaped);

/** A text of several lines. */
export const lines = (value) => String(value).replace(UNSEEN_BUT_LINES, escaped);

// Bytes of the API: a string if they are UTF-8, else { base64 }.

const utf8 = new TextEncoder();
const strict = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

export function bytesOf(value) {
  if (value === null || value === undefined) return null;
  if (typeof value === "string") return utf8.encode(value);
  return Uint8Array.from(atob(value.base64), (it) => it.charCodeAt(0));
}

/** Bytes as one visible line, as `plain` shows text. */
export function shown(value, max = 200, isCut = false) {
  if (value === null || value === undefined) return "";
  if (typeof value === "string") return plain(value, max, isCut);
  const bytes = bytesOf(value);
  const rest = isCut || bytes.length > max ? "…" : "";
  return Array.from(bytes.subarray(0, max), (it) =>
    it === 0x5c ? "\\\\" : it > 32 && it < 127 ? String.fromCharCode(it) : "\\x" + it.toString(16).padStart(2, "0")).join("") + rest;
}

/** Bytes for a URL. */
export const encoded = (value) =>
  Array.from(bytesOf(value), (it) => "%" + it.toString(16).padStart(2, "0")).join("");

/** Percent-encoded bytes as the API gives them; null if they are malformed. */
export function decoded(text) {
  const bytes = [];
  for (const [it, hex] of text.matchAll(/%([0-9a-f]{2})|[^%]|%/gi)) {
    if (hex) bytes.push(parseInt(hex, 16));
    else if (it === "%") return null;
    else bytes.push(...utf8.encode(it));
  }
  return ofBytes(Uint8Array.from(bytes));
}

/** Bytes as the API gives them. */
export function ofBytes(bytes) {
  try {
    return strict.decode(bytes);
  } catch {
    return { base64: btoa(Array.from(bytes, (it) => String.fromCharCode(it)).join("")) };
  }
}

export const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

// Numbers. A narrow space groups digits, as in the documents of this project.

export function number(value, digits = 0) {
  if (!Number.isFinite(value)) return "–";
  const [whole, rest] = value.toFixed(digits).split(".");
  const grouped = whole.replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");
  return rest ? grouped + "." + rest : grouped;
}

const scaled = (value, digits) => number(value, value >= 100 ? 0 : value >= 10 ? Math.min(1, digits) : digits);

export const rate = (value) => (value < 10 && value % 1 ? number(value, 1) : number(value));

export function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  return (unit ? scaled(value, 1) : number(value)) + "\u00a0" + units[unit];
}

export function micros(value) {
  if (!Number.isFinite(value)) return "–";
  if (value < 1000) return scaled(value, value % 1 ? 1 : 0) + "\u00a0µs";
  if (value < 1e6) return scaled(value / 1e3, 2) + "\u00a0ms";
  return scaled(value / 1e6, 2) + "\u00a0s";
}

export function span(ms) {
  const s = Math.max(0, Math.floor(ms / 1000));
  if (s < 60) return s + "\u00a0s";
  if (s < 3600) return Math.floor(s / 60) + "\u00a0min " + (s % 60) + "\u00a0s";
  if (s < 86400) return Math.floor(s / 3600) + "\u00a0h " + Math.floor((s % 3600) / 60) + "\u00a0min";
  return Math.floor(s / 86400) + "\u00a0d " + Math.floor((s % 86400) / 3600) + "\u00a0h";
}

/** A moment in local time; the title has the date and UTC. */
export function moment(ms) {
  const at = new Date(ms);
  if (!Number.isFinite(at.getTime())) return el("span", {}, "–");
  const two = (it) => String(it).padStart(2, "0");
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} `;
  const time = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  const isToday = at.toDateString() === new Date().toDateString();
  return el("time", { datetime: at.toISOString(), title: at.toISOString() }, (isToday ? "" : day) + time);
}

/**
 * A table that keeps its rows. A column is { title, of: (item) => text or element, number: bool,
 * by: (item) => what to sort by }. Until the first `show` it says nothing, since nothing is known.
 */
export function table({ caption, columns, keyOf, empty, limit = 200, onpick }) {
  const rows = new Map();
  const body = el("tbody");
  const note = el("p.note.dim", { hidden: true });
  let sorted = null, last = [];
  const heads = columns.map((column, index) => {
    const head = el("th", { scope: "col", class: column.number ? "number" : null });
    head.append(column.by ? el("button.quiet", { type: "button", onclick: () => sort(index) }, column.title) : column.title);
    return head;
  });

  function sort(index) {
    const was = sorted?.index === index ? sorted.down : null;
    const first = Boolean(columns[index].number);
    sorted = was === null ? { index, down: first } : { index, down: !was };
    heads.forEach((head, at) =>
      at === index ? head.setAttribute("aria-sort", sorted.down ? "descending" : "ascending") : head.removeAttribute("aria-sort"));
    show(...last);
  }

  function ordered(items) {
    if (!sorted) return items;
    const by = columns[sorted.index].by, sign = sorted.down ? -1 : 1;
    const compare = (a, b) => (a === b ? 0 : (a ?? "") < (b ?? "") ? -1 : 1);
    return [...items].sort((a, b) => sign * compare(by(a), by(b)));
  }

  /** Shows items, of which there are `of` in all, or says why there are `none`. */
  function show(items, of = null, none = empty) {
    last = [items, of, none];
    const kept = ordered(items).slice(0, limit), seen = new Set();
    kept.forEach((item, at) => {
      const key = keyOf(item, at);
      seen.add(key);
      let row = rows.get(key);
      if (!row) rows.set(key, (row = el("tr", {}, columns.map((it) => el("td", { class: it.number ? "number" : null, "data-title": it.title })))));
      row.item = item;
      columns.forEach((column, index) => set(row.cells[index], column.of(item)));
      if (body.children[at] !== row) body.insertBefore(row, body.children[at] ?? null);
    });
    for (const [key, row] of rows) if (!seen.has(key)) (row.remove(), rows.delete(key));
    const count = Math.max(of ?? 0, items.length);
    note.hidden = kept.length > 0 && count <= kept.length;
    text(note, kept.length === 0 ? none : `${number(kept.length)} of ${number(count)} are shown.`);
    whole.hidden = kept.length === 0;
  }

  if (onpick) body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (row && !event.target.closest("button,a,input")) onpick(row.item);
  });
  const whole = el("table", { class: onpick ? "picks" : null }, el("caption.unseen", {}, caption), el("thead", {}, el("tr", {}, heads)), body);
  whole.hidden = true;
  return { element: el("div.table", {}, whole, note), show };
}

function set(cell, value) {
  if (!(value instanceof Node)) return text(cell, value);
  const old = cell.firstElementChild;
  if (old && cell.childNodes.length === 1 && old.isEqualNode(value)) return cell;
  cell.replaceChildren(value);
  return cell;
}

/** A panel with a title, and what stands beside the title. */
export function panel(title, beside, ...children) {
  return el("section.panel", { "aria-label": title }, el("header", {}, el("h2", {}, title), beside), children);
}
