// Shows stored bytes as text, JSON or hexadecimal, and the difference between two of them.

import { bytes as size, bytesOf, el, lines, same } from "./dom.js";

const TEXT_MAX = 64 << 10;
const HEX_MAX = 4 << 10;
const LINES_MAX = 4000;
/** Deeper levels are not indented further, because the length of the text would be quadratic. */
const INDENT_MAX = 32;
/** Pairs of parts that a comparison may look at. */
const PAIRS_MAX = 1_000_000;

/** The text of bytes; null if they are no UTF-8. */
export const textOf = (value) => (typeof value === "string" ? value : null);

function jsonOf(value) {
  const text = textOf(value);
  if (text === null || !/^\s*[[{]/.test(text) || text.length > TEXT_MAX) return null;
  try {
    JSON.parse(text);
  } catch {
    return null;
  }
  return indented(text);
}

/** Valid JSON with new white space. Tokens stay: a parser rounds numbers and drops members. */
function indented(text) {
  const tokens = text.match(/"(?:[^"\\]|\\.)*"|[[\]{},:]|[^\s[\]{},:"]+/g);
  const opens = (it) => it === "[" || it === "{", closes = (it) => it === "]" || it === "}";
  let depth = 0;
  const line = () => "\n" + "  ".repeat(Math.min(depth, INDENT_MAX));
  return tokens.map((it, at) => {
    if (it === ":") return ": ";
    if (it === ",") return it + line();
    if (opens(it) && !closes(tokens[at + 1])) return depth++, it + line();
    if (closes(it) && !opens(tokens[at - 1])) return depth--, line() + it;
    return it;
  }).join("");
}

/** The ways to show bytes, the best first. */
export const formsOf = (value) => [jsonOf(value) !== null && "JSON", textOf(value) !== null && "Text", "Hex"].filter(Boolean);

export function view(value, form) {
  if (form === "Hex") return hex(bytesOf(value));
  const text = form === "JSON" ? jsonOf(value) : textOf(value);
  const cut = text.length > TEXT_MAX;
  const shown = lines(text.slice(0, TEXT_MAX)).split("\n");
  const body = shown.slice(0, LINES_MAX).join("\n");
  return el("div", {},
    el("pre.value", { tabindex: 0 }, form === "JSON" ? coloured(body) : body || el("i.dim", {}, "empty")),
    (cut || shown.length > LINES_MAX) && note(bytesOf(value).length, "the beginning is shown"));
}

const note = (length, what) => el("p.note.dim", {}, `The value has ${size(length)}; ${what}. \`statehouse get\` prints all of it.`);

/** JSON with a class for each kind of word. */
function coloured(text) {
  // A cut text may end within a string.
  const words = /("(?:[^"\\]|\\.)*"?)(\s*:)?|\b(?:true|false|null)\b|-?\d[\d.eE+-]*/g;
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(words)) {
    parts.push(text.slice(end, found.index));
    const kind = found[2] ? "name" : found[1] ? "string" : "word";
    parts.push(el(`span.json-${kind}`, {}, found[1] ?? found[0]), found[2] ?? "");
    end = found.index + found[0].length;
  }
  return [...parts, text.slice(end)];
}

function hex(all) {
  const rows = [];
  for (let at = 0; at < Math.min(all.length, HEX_MAX); at += 16) {
    const row = Array.from(all.subarray(at, Math.min(at + 16, HEX_MAX)));
    const digits = row.map((it, index) => it.toString(16).padStart(2, "0") + (index === 7 ? " " : "")).join(" ");
    const signs = row.map((it) => (it > 31 && it < 127 ? String.fromCharCode(it) : "·")).join("");
    rows.push(`${at.toString(16).padStart(6, "0")}  ${digits.padEnd(48)}  ${signs}`);
  }
  return el("div", {}, el("pre.value", { tabindex: 0 }, rows.join("\n") || el("i.dim", {}, "empty")),
    all.length > HEX_MAX && note(all.length, `the first ${size(HEX_MAX)} are shown`));
}

/** The difference from `before` to `after`; null stands for no value. */
export function difference(before, after) {
  const isChange = before !== null && after !== null;
  if (isChange && same(before, after)) return el("p.dim", {}, "The value is the same as before.");
  const { sides, isCut } = comparable(before, after);
  const isOneLine = !sides.some((it) => it.includes("\n"));
  const split = (it) => (it === "" ? [] : isOneLine ? it.match(/[\w.]+|\s+|[^\w\s]/gu) ?? [] : it.split("\n"));
  const changes = compare(...sides.map(split));
  if (isChange && changes.every((it) => it[0] === "same")) {
    return el("p.dim", {}, isCut ? "The beginning is the same as before. The rest differs, and is too long for the page." : "Only white space between JSON tokens has changed.");
  }
  if (isOneLine) {
    const side = (kind) => changes.filter((it) => it[0] === "same" || it[0] === kind).map(([what, part]) => el(what === "same" ? "span" : what === "out" ? "del" : "ins", {}, lines(part)));
    return el("div.diff", {}, before !== null && el("p.out", {}, el("i", { "aria-label": "before" }, "−"), el("span", {}, side("out"))), after !== null && el("p.in", {}, el("i", { "aria-label": "after" }, "+"), el("span", {}, side("in"))), isCut && more());
  }
  const near = nearby(changes);
  const rows = near.slice(0, LINES_MAX).map(([kind, part]) => {
    const sign = { same: " ", out: "−", in: "+", gap: "⋯" }[kind];
    return el(`p.${kind}`, {}, el("i", {}, sign), el(kind === "out" ? "del" : kind === "in" ? "ins" : "span", {}, lines(part)));
  });
  return el("div.diff", {}, rows, (isCut || near.length > LINES_MAX) && more());
}

const more = () => el("p.dim", {}, el("i", {}, "⋯"), "Only the beginning is compared and shown.");

/** Both values in the first form that fits both, cut if they are too long. */
function comparable(before, after) {
  // JSON was short before it got white space, so all of it is compared.
  for (const [form, max] of [[jsonOf, Infinity], [textOf, TEXT_MAX], [hexLines, 3 * HEX_MAX]]) {
    const sides = [before, after].map((it) => (it === null ? "" : form(it)));
    if (!sides.includes(null)) return { sides: sides.map((it) => it.slice(0, max)), isCut: sides.some((it) => it.length > max) };
  }
}

/** Three signs for each byte, and one byte more than is shown. */
const hexLines = (value) => Array.from(bytesOf(value).subarray(0, HEX_MAX + 1), (it, at) => it.toString(16).padStart(2, "0") + (at % 16 === 15 ? "\n" : " ")).join("");

/** Parts as [same | out | in, part]: the longest common subsequence between common ends. */
function compare(old, now) {
  let head = 0, tail = 0;
  while (head < old.length && head < now.length && old[head] === now[head]) head++;
  while (tail < old.length - head && tail < now.length - head && old.at(-1 - tail) === now.at(-1 - tail)) tail++;
  const [a, b] = [old.slice(head, old.length - tail), now.slice(head, now.length - tail)];
  const keep = (parts) => parts.map((it) => ["same", it]);
  return [...keep(old.slice(0, head)), ...middle(a, b), ...keep(tail ? old.slice(-tail) : [])];
}

function middle(a, b) {
  if (a.length * b.length > PAIRS_MAX) return [...a.map((it) => ["out", it]), ...b.map((it) => ["in", it])];
  const width = b.length + 1, best = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      best[i * width + j] = a[i] === b[j] ? best[(i + 1) * width + j + 1] + 1 : Math.max(best[(i + 1) * width + j], best[i * width + j + 1]);
    }
  }
  const found = [];
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) (found.push(["same", a[i]]), i++, j++);
    else if (i < a.length && (j === b.length || best[(i + 1) * width + j] >= best[i * width + j + 1])) found.push(["out", a[i++]]);
    else found.push(["in", b[j++]]);
  }
  return found;
}

/** Changed lines with three lines around them. */
function nearby(changes) {
  const keep = changes.map((_, at) => changes.slice(Math.max(0, at - 3), at + 4).some((it) => it[0] !== "same"));
  const found = [];
  changes.forEach((it, at) => {
    if (keep[at]) found.push(it);
    else if (found.at(-1)?.[0] !== "gap") found.push(["gap", ""]);
  });
  return found;
}
