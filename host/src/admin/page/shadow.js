// The comparison of a candidate with the active policy: sums, commands, and examples side by side.

import { el, lines, moment, nameOf, number, oneLine, panel, plain, text } from "./dom.js";
import { parts } from "./draw.js";

const EXAMPLES_MAX = 40;

const VERDICTS = [
  ["same", "same", "good"],
  ["different_answer", "another response", "bad"],
  ["different_effect", "other writes", "copper"],
  ["failed", "candidate failed", "bad-2"],
  ["not_comparable", "not comparable", "plain"],
  ["skipped", "skipped", "plain-2"],
];

export function comparison() {
  const about = el("small.dim"), body = el("div");
  const element = panel("Comparison with the candidate", about, body);
  let drawn = "";

  function show(report) {
    const now = JSON.stringify(report);
    if (now === drawn) return;
    drawn = now;
    if (!report) {
      text(about, "");
      return body.replaceChildren(el("p.note.dim", {}, "No comparison runs. Choose a loaded policy and “Compare …”: it re-executes copies of live requests, and this shows where it differs."));
    }
    text(about, `${nameOf(report.policy)} against ${nameOf(report.against)}`);
    const open = new Set([...body.querySelectorAll("details[open]")].map((it) => it.dataset.id));
    const entries = VERDICTS.map(([name, label, kind]) => [kind, report[name], label]);
    const sums = el("p.legend", {}, entries.map(([kind, value, label]) => el("span", {}, el(`i.key.of-${kind}`), label, " ", el("b", {}, number(value)))));
    const reasons = Object.entries(report.reasons).map(([why, count]) => `${plain(why)} ${number(count)}`).join("; ");
    body.replaceChildren(
      el("div.verdicts", {}, parts(entries.map(([kind, value, label]) => [`of-${kind}`, value, `${label}: ${number(value)}`]), entries.map((it) => `${it[2]} ${it[1]}`).join(", ")), sums),
      commands(report.commands),
      reasons ? el("p.note.dim", {}, `Not comparable because: ${reasons}`) : "",
      ...report.examples.slice(-EXAMPLES_MAX).reverse().map((it) => example(it, open)),
      report.examples.length === 0 ? el("p.note.dim", {}, `No difference in ${number(report.compared)} requests.`) : "");
  }

  return { element, show };
}

const commands = (all) => el("p.chips", {}, Object.entries(all).slice(0, 30).map(([name, { compared, different }]) =>
  el("span", { class: different ? "chip is-bad" : "chip" }, `${plain(name, 30)} ${number(different)} of ${number(compared)} differ`)));

/** A request with both results; what differs is marked. */
function example(it, open) {
  const id = `${it.now_ms} ${it.client} ${it.request.join(" ")}`;
  const rows = [
    ["response", it.active.answer, it.candidate.answer],
    ["version", it.active.version, it.candidate.version],
    ["writes", it.active.writes.join("\n"), it.candidate.writes.join("\n")],
    ["failure", it.active.failure, it.candidate.failure],
  ].filter((row) => row[1] || row[2]);
  const cell = (value, other) => el("pre", { class: value === other ? null : "is-different" }, value ? lines(value).slice(0, 4000) : "–");
  return el("details.example", { "data-id": id, open: open.has(id) },
    el("summary", {}, el("span.badge.copper", {}, plain(it.kind).replaceAll("_", " ")), el("code", {}, oneLine(it.request.join(" "), 160)), el("small.dim", {}, plain(it.client, 60), " · ", moment(it.now_ms))),
    el("div.sides", {},
      el("span"), el("b", {}, "active"), el("b", {}, "candidate"),
      rows.flatMap(([name, active, candidate]) => [el("span.dim", {}, name), cell(active, candidate), cell(candidate, active)])));
}
