// Acts of the operator: each asks first, and shows the answer of the store.

import { el, oneLine, text } from "./dom.js";

const NOTICES_MAX = 4;
const id = (name) => document.getElementById(name);

/**
 * Asks, then does `act()`, which resolves to the text of the answer. A failure stays in the dialog,
 * so that the operator can try again. Resolves to whether it was done when the question ended. The
 * browser may close the dialog during the act. Its elements then belong to the next question, so
 * the answer is a notice alone.
 */
export function confirm({ title, body, yes, isDangerous = false, act }) {
  const dialog = id("ask"), form = dialog.querySelector("form"), button = id("ask-yes"), error = id("ask-error");
  text(id("ask-title"), title);
  id("ask-body").replaceChildren(...[body].flat().map((it) => (it instanceof Node ? it : el("p", {}, it))));
  button.className = isDangerous ? "danger" : "primary";
  error.hidden = true;
  return new Promise((resolve) => {
    const listeners = new AbortController(), { signal } = listeners;
    let isDone = false, isBusy = false;
    const busy = (now) => {
      isBusy = button.disabled = id("ask-no").disabled = now;
      text(button, now ? "Waiting for the store …" : yes);
    };
    // The event "close" comes later, when the next question may be open already.
    const end = () => {
      listeners.abort();
      dialog.close();
      resolve(isDone);
    };
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      error.hidden = true;
      busy(true);
      try {
        notice(await act());
        isDone = true;
      } catch (refused) {
        if (signal.aborted) return notice(refused.message, "bad");
        text(error, refused.message);
        error.hidden = false;
      }
      if (signal.aborted) return;
      busy(false);
      if (isDone) end();
    }, { signal });
    id("ask-no").addEventListener("click", end, { signal });
    dialog.addEventListener("cancel", (event) => {
      event.preventDefault();
      if (!isBusy) end();
    }, { signal });
    dialog.addEventListener("close", () => dialog.open || end(), { signal });
    busy(false);
    dialog.showModal();
    (dialog.querySelector("input,textarea,select") ?? (isDangerous ? id("ask-no") : button)).focus();
  });
}

/** Shows a result for some seconds; a reader of the screen hears it. */
export function notice(message, kind = "good") {
  const list = id("notices");
  const item = el(`p.${kind}`, {}, oneLine(message, 500), el("button.quiet", { type: "button", "aria-label": "Close", onclick: () => item.remove() }, "×"));
  list.append(item);
  while (list.childElementCount > NOTICES_MAX) list.firstElementChild.remove();
  setTimeout(() => item.remove(), 12000);
}

/** A line for an error in a view, hidden while there is none. */
export function problem() {
  const element = el("p.why", { role: "alert", hidden: true });
  return {
    element,
    show(error) {
      element.hidden = !error;
      text(element, error?.message ?? "");
    },
  };
}

/** A button that needs a role: disabled, with the reason, for other operators. */
export function button(page, role, name, onclick, kind = "") {
  const may = page.may(role);
  const title = may ? null : `This needs the role ${role}; yours is ${page.role}.`;
  return el("button", { type: "button", class: kind || null, onclick, disabled: !may, title }, name);
}

/** A field of a form with its label. */
export const field = (label, input, hint) => el("label.field", {}, el("span", {}, label), input, hint && el("small.dim", {}, hint));
