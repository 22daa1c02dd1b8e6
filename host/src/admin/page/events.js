// The audit log: refusals, and the acts of operators.

import { el, moment, oneLine, plain } from "./dom.js";
import { following, level } from "./log.js";

const KINDS = [["", "all kinds"], ["refusal", "refusals"], ["act", "acts"]];
/** Fields that have a column of their own. */
const OWN = ["what", "client", "user", "peer", "why"];

export function open(main) {
  const kinds = el("select", { "aria-label": "Kind of events" }, KINDS.map(([value, name]) => el("option", { value }, name)));
  const field = (name, max) => (it) => plain(it.fields[name] ?? "", max).replace(/^-$/, "");
  const list = following({
    title: "Events",
    path: (from) => `/v1/events?${[from !== null && `from=${from}`, kinds.value && `kind=${kinds.value}`].filter(Boolean).join("&")}`,
    of: (answer) => answer.events,
    empty: () => (kinds.value ? "There is no event of this kind since the start." : "Nothing was refused, and no operator has acted, since the start."),
    textOf: (it) => `${it.kind} ${it.text} ${Object.values(it.fields).join(" ")}`,
    columns: [
      { title: "At", of: (it) => moment(it.at_ms) },
      { title: "Kind", of: (it) => level(it.kind) },
      { title: "What", of: (it) => el("span", {}, oneLine(it.fields.what ?? it.text, 100)) },
      { title: "Client", of: field("client", 60) },
      { title: "User", of: field("user", 60) },
      { title: "Address", of: field("peer", 60) },
      { title: "More", of: (it) => el("span.line", {}, oneLine(it.fields.why ?? rest(it), 500)) },
    ],
  });
  kinds.addEventListener("change", list.begin);
  list.element.querySelector(".tools").prepend(kinds);
  main.append(el("h1.unseen", {}, "Events"), list.element);
  return { close: list.close };
}

const rest = (it) => Object.entries(it.fields).filter(([name]) => !OWN.includes(name)).map((it) => it.join("=")).join(" ");
