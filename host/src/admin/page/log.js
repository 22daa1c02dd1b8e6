// Lists that follow the store: the log lines of policies, and the audit log.

import { get, repeat } from "./api.js";
import { el, moment, number, oneLine, panel, plain, table, text } from "./dom.js";

const KEPT_MAX = 400;
const KINDS = { error: "bad", warn: "warn", refusal: "bad", info: "good", act: "good" };

/**
 * A list that asks for what is new again and again. `path(from)` is the request, `of(answer)` its
 * new entries; `columns` are those of a table. `empty()` is the text if there are no entries.
 */
export function following({ title, path, of, columns, empty, textOf }) {
  const state = el("small.dim", { role: "status" });
  const filter = el("input", { type: "search", placeholder: "filter", "aria-label": `Filter ${title}`, maxlength: 200, spellcheck: "false" });
  const pause = el("button.quiet", { type: "button", "aria-pressed": "false" }, "Pause");
  const list = table({ caption: title, columns, empty: empty(), limit: 200, keyOf: (it) => it.number });
  // A pause keeps new entries off the list. `held` are those on it; null until the first answer.
  let kept = [], held = null, count = 0, lost = 0, from = null, isPaused = false, polling = null;

  function show() {
    if (held === null) return;
    const wanted = filter.value.toLowerCase();
    if (wanted) list.show(held.filter((it) => textOf(it).toLowerCase().includes(wanted)), null, "No line in the list matches the filter.");
    else list.show(held, null, empty());
  }

  filter.addEventListener("input", show);
  pause.addEventListener("click", () => {
    isPaused = !isPaused;
    pause.setAttribute("aria-pressed", String(isPaused));
    text(pause, isPaused ? "Continue" : "Pause");
    if (!isPaused && held !== null) held = kept;
    show();
  });

  function begin() {
    polling?.stop();
    [kept, held, lost, from] = [[], null, 0, null];
    polling = repeat(async (signal) => {
      const answer = await get(path(from), signal);
      // After a restart of the store its numbers begin again.
      from = answer.next;
      lost += answer.lost ?? 0;
      const found = of(answer).map((it) => ({ ...it, number: ++count }));
      kept = [...found.reverse(), ...kept].slice(0, KEPT_MAX);
      if (!isPaused || held === null) held = kept;
      show();
      text(state, lost ? `${number(lost)} missed` : "");
      return 200;
    }, (error) => error && text(state, error.message));
  }
  begin();
  return { element: panel(title, el("span.tools", {}, state, filter, pause), list.element), begin, close: () => polling.stop() };
}

export const level = (it) => el(`span.badge.${KINDS[it] ?? "plain"}`, {}, plain(it, 20));

export const logPanel = () => following({
  title: "Log lines of policies",
  path: (from) => (from === null ? "/v1/log" : `/v1/log?from=${from}`),
  of: (answer) => answer.lines,
  empty: () => "No policy has logged a line yet.",
  textOf: (it) => `${it.level} ${it.policy} ${it.text}`,
  columns: [
    { title: "At", of: (it) => moment(it.at_ms) },
    { title: "Level", of: (it) => level(it.level) },
    { title: "Line", of: (it) => el("span.line", {}, oneLine(it.text, 1000), el("small.dim", {}, ` ${plain(it.policy, 60)}`)) },
  ],
});
