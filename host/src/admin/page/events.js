// The audit log: refusals, and the acts of operators.

import { el, moment, plain } from "./dom.js";
import { following, level } from "./log.js";

export function open(main) {
  const kinds = el("select", { "aria-label": "Kind of events" }, [["", "all kinds"], ["refused", "refusals"], ["admin", "acts of operators"]].map(([value, name]) => el("option", { value }, name)));
  const list = following({
    title: "Events",
    path: (from) => `/v1/events?${[from !== null && `from=${from}`, kinds.value && `kind=${kinds.value}`].filter(Boolean).join("&")}`,
    of: (answer) => answer.events,
    empty: "Nothing was refused, and no operator has acted, since the start.",
    textOf: (it) => JSON.stringify(it),
    columns: [
      { title: "At", of: (it) => moment(it.at_ms) },
      { title: "Kind", of: (it) => level(it.kind) },
      { title: "What", of: (it) => plain(it.what, 60) },
      { title: "Client", of: (it) => plain(it.client ?? "", 60) },
      { title: "User", of: (it) => plain(it.user ?? "", 60) },
      { title: "Address", of: (it) => plain(it.peer ?? "", 60) },
      { title: "Why", of: (it) => el("span.line", {}, plain(it.why ?? "", 400)) },
    ],
  });
  kinds.addEventListener("change", list.begin);
  list.element.querySelector(".tools").prepend(kinds);
  main.append(el("h1.unseen", {}, "Events"), list.element);
  return { close: list.close };
}
