// Policies: which one answers what, the comparison with a candidate, canaries and routes.

import { LONG_MS, ask, get, json, repeat } from "./api.js";
import { button, confirm, field, problem } from "./act.js";
import { bytes, el, encoded, moment, nameOf, number, oneLine, panel, plain, shown, span, table, text } from "./dom.js";
import { comparison } from "./shadow.js";
import { logPanel } from "./log.js";

const ROLE_NAMES = { active: "good", canary: "copper", shadow: "blue", routed: "good", previous: "" };

export function open(main, page) {
  const trouble = problem(), roles = el("div.roles"), card = el("div"), shadow = comparison(), logs = logPanel();
  let listing = null, chosen = null, facts = null, drawn = "";
  const list = table({
    caption: "Loaded policies", empty: "No policy is loaded.", limit: 64,
    keyOf: (it) => it.digest, onpick: (it) => pick(it.digest),
    columns: [
      { title: "Policy", of: (it) => el("button.quiet.key", { type: "button", "aria-pressed": String(it.digest === chosen), onclick: () => pick(it.digest) }, nameOf(it)), by: (it) => it.name },
      { title: "Roles", of: badges },
      { title: "Requests", number: true, of: (it) => number(it.requests), by: (it) => it.requests },
      { title: "Failures", number: true, of: (it) => el("span", { class: failures(it) ? "is-bad" : null }, number(failures(it))), by: failures },
      { title: "Fuel, mean", number: true, of: (it) => number(it.fuel_mean), by: (it) => it.fuel_mean },
      { title: "Size", number: true, of: (it) => bytes(it.bytes), by: (it) => it.bytes },
    ],
  });
  const file = el("input", { type: "file", accept: ".wasm", class: "unseen", tabindex: -1, onchange: load, "aria-label": "File of a policy" });
  const loading = button(page, "ship", "Load a file …", () => file.click());
  main.append(el("h1.unseen", {}, "Policies"), trouble.element,
    panel("Who answers", null, roles),
    el("div.columns.two", {}, panel("Loaded policies", el("span", {}, file, loading), list.element, card), logs.element),
    shadow.element);

  const polling = repeat(async (signal) => {
    await read(signal);
    return 3000;
  }, (error) => trouble.show(error));

  async function read(signal) {
    listing = await get("/v1/policies", signal);
    shadow.show(listing.assignment.shadow ? await get("/v1/shadow", signal) : null);
    list.show(listing.policies);
    const now = JSON.stringify([listing.assignment, listing.policies.map((it) => it.digest)]);
    if (now !== drawn) (drawn = now), drawRoles(), drawCard();
    else refreshCard();
  }

  /** Asks, acts, and shows the new state at once. */
  async function act(question) {
    if (await confirm(question)) (drawn = ""), polling.now();
  }

  const nameOfDigest = (digest) => {
    const found = listing.policies.find((it) => it.digest === digest);
    return found ? nameOf(found) : `${hexOf(digest).slice(0, 12)} (missing)`;
  };

  function drawRoles() {
    const { active, canary, shadow: candidate, routes, guard, guard_before = [], origins = [] } = listing.assignment;
    const before = beforeActive();
    const since = (digest) => origins.find((it) => it.policy === digest)?.assigned;
    const swap = listing.swaps.at(-1);
    const rows = [
      role("active", nameOfDigest(active), el("span", {}, canary?.rule.percent ? `${100 - canary.rule.percent} % of the clients` : routes.length || canary ? "all other requests" : "all requests", actText(since(active))),
        before && button(page, "operate", `Roll back to ${nameOfDigest(before)}`, rollBack)),
      ...routes.map((it) => role("routed", nameOfDigest(it.policy), el("span", {}, "keys below ", el("span.key", {}, shown(it.prefix, 60))),
        button(page, "operate", "Remove the route", () => unroute(it)))),
      canary && role("canary", nameOfDigest(canary.policy), el("span", {}, ruleText(canary.rule), actText(since(canary.policy))),
        button(page, "operate", "Promote", () => promote(canary.policy)), button(page, "operate", "End the canary", endCanary)),
      candidate && role("shadow", nameOfDigest(candidate.policy), `re-executes ${number(candidate.per_mille / 10, candidate.per_mille % 10 ? 1 : 0)} % of the requests; its answers are discarded`,
        button(page, "operate", "Promote", () => promote(candidate.policy)), button(page, "operate", "End the comparison", endShadow)),
    ];
    const share = canary?.rule.percent;
    const bar = share && el("div.split", { role: "img", "aria-label": `${share} % of the clients have the canary` }, el("i.good", {}, `${100 - share} %`), el("i.copper", {}, `${share} %`));
    if (bar) [...bar.children].forEach((it, at) => it.style.setProperty("flex-basis", `${at ? share : 100 - share}%`));
    const warnings = [guard, ...guard_before].filter(Boolean).map((it) => el("p.why", {}, `The guard ${it.canary ? "ended the canary of" : "rolled back"} ${nameOfDigest(it.policy)} at `, moment(it.now_ms), `: ${oneLine(it.why, 400)}`));
    const last = swap && el("p.note.dim", {}, "Last change of the active policy: ", moment(swap.at_ms), swap.gap_us === null ? "." : `, with a gap of ${number(swap.gap_us)} µs between two requests.`);
    roles.replaceChildren(...[...warnings, bar, ...rows, last].filter(Boolean));
  }

  /** The policy that a rollback returns to, as the store chooses it. */
  function beforeActive() {
    const { active, built_in, previous } = listing.assignment;
    return previous[0] ?? (active === built_in ? null : built_in);
  }

  const role = (kind, name, about, ...acts) => el(`div.role.${kind}`, {},
    el(`span.badge.${ROLE_NAMES[kind] || "plain"}`, {}, kind), el("b.key", {}, name), el("span.dim", {}, about), el("span.acts", {}, acts));

  function pick(digest) {
    chosen = chosen === digest ? null : digest;
    list.show(listing.policies);
    drawCard();
  }

  /** What is known of the chosen policy, and what can be done with it. */
  function drawCard() {
    const it = chosenPolicy();
    if (!it) return card.replaceChildren(el("p.note.dim", {}, "Choose a policy to see its figures and to give it a role."));
    facts = about(it);
    const isActive = it.roles.includes("active");
    card.replaceChildren(el("section.card", { "aria-label": nameOf(it) }, el("h3", {}, nameOf(it)), facts,
      el("p.acts", {}, !isActive && [
        button(page, "operate", "Promote", () => promote(it.digest), "primary"),
        button(page, "operate", "Compare …", () => compare(it)),
        button(page, "operate", "Canary …", () => canary(it)),
        button(page, "operate", "Route …", () => route(it)),
      ], isActive && button(page, "operate", "Route …", () => route(it)),
      !it.built_in && it.roles.length === 0 && button(page, "operate", "Unload", () => unload(it), "danger"))));
  }

  /** Shows new figures, and keeps the buttons and their focus. */
  function refreshCard() {
    const it = chosenPolicy(), next = it && about(it);
    if (!next || facts.isEqualNode(next)) return;
    facts.replaceWith(next);
    facts = next;
  }

  const chosenPolicy = () => listing.policies.find((one) => one.digest === chosen);

  function about(it) {
    const origin = listing.assignment.origins?.find((one) => one.policy === it.digest);
    const entries = [
      ["digest", el("span.key", {}, hexOf(it.digest))],
      ["loaded", it.built_in ? "part of the program" : origin?.loaded && el("span", {}, actText(origin.loaded, ""))],
      ["signed by", origin?.signed_by && plain(origin.signed_by, 80)],
      ["commands", it.commands.filter((one) => one.requests).map((one) => `${plain(one.name, 30)} ${number(one.requests)}`).join(", ") || "none yet"],
      ["failures", failures(it) ? Object.entries(it.failures).filter((one) => one[1]).map(([name, count]) => `${name} ${number(count)}`).join(", ") : "none"],
      ["last failure", it.last_failure && el("span.is-bad", {}, moment(it.last_failure.at_ms), ` ${oneLine(it.last_failure.why, 600)}`)],
      ["fuel", `mean ${number(it.fuel_mean)}, highest ${number(it.fuel_max)}`],
      ["not deterministic", it.impure || it.duplicates_different ? el("span.is-bad", {}, `${number(it.impure)} calls, ${number(it.duplicates_different)} duplicates`) : null],
    ].filter((one) => one[1]);
    return el("dl.facts", {}, entries.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }

  // Acts.

  const selected = (digest) => encodeURIComponent(hexOf(digest));
  const report = (what) => async (work) => (await work, what);

  function promote(digest) {
    const name = nameOfDigest(digest);
    return act({
      title: `Promote ${name}?`, yes: "Promote it",
      body: [`It answers all requests without a route from the next request on, in place of ${nameOfDigest(listing.assignment.active)}. No request is lost.`, "A rollback returns to the policy before."],
      act: () => report(`${name} answers now.`)(ask("POST", `/v1/policies/${selected(digest)}/promote`)),
    });
  }

  const rollBack = () => act({
    title: "Roll back?", yes: "Roll back",
    body: `${nameOfDigest(beforeActive())} answers again from the next request on, in place of ${nameOfDigest(listing.assignment.active)}.`,
    act: () => report("The previous policy answers again.")(ask("POST", "/v1/rollback")),
  });

  const endCanary = () => act({
    title: "End the canary?", yes: "End it", body: "The active policy answers its clients from the next request on.",
    act: () => report("The canary has ended.")(ask("DELETE", "/v1/canary")),
  });

  const endShadow = () => act({
    title: "End the comparison?", yes: "End it", body: "Clients do not notice. The last counts and examples stay until the next comparison: `statehouse policy diff`.",
    act: () => report("The comparison has ended.")(ask("DELETE", "/v1/shadow")),
  });

  const unroute = (it) => act({
    title: "Remove the route?", yes: "Remove it", body: ["The active policy answers requests for keys below this prefix:", el("p.key", {}, shown(it.prefix))],
    act: () => report("The route is removed.")(ask("DELETE", `/v1/routes?prefix=${encoded(it.prefix)}`)),
  });

  const unload = (it) => act({
    title: `Unload ${nameOf(it)}?`, yes: "Unload it", isDangerous: true, body: "It can have a role again after its file is loaded again.",
    act: () => report(`${nameOf(it)} is unloaded.`)(ask("DELETE", `/v1/policies/${selected(it.digest)}`)),
  });

  function compare(it) {
    const share = el("input", { type: "number", min: 0.1, max: 100, step: 0.1, value: 100, required: true });
    return act({
      title: `Compare ${nameOf(it)} with the active policy?`, yes: "Compare",
      body: ["It re-executes copies of live requests. Its answers and writes are discarded, so clients do not notice.", field("Share of the requests, in %", share)],
      act: () => report("The comparison runs.")(json("PUT", "/v1/shadow", { policy: hexOf(it.digest), per_mille: Math.round(Number(share.value) * 10) })),
    });
  }

  function canary(it) {
    const kind = el("select", {}, ["percent", "clients", "keys"].map((one) => el("option", { value: one }, { percent: "a percentage of clients", clients: "clients by pattern", keys: "keys by pattern" }[one])));
    // A text field ignores the limits of numbers.
    const value = el("input", { type: "number", min: 1, max: 100, step: 1, required: true, value: "5", maxlength: 1024, spellcheck: "false" });
    kind.addEventListener("change", () => {
      const isPercent = kind.value === "percent";
      value.type = isPercent ? "number" : "text";
      value.value = isPercent ? "5" : "";
    });
    return act({
      title: `Let ${nameOf(it)} answer some requests?`, yes: "Start the canary",
      body: ["It answers these clients or keys for real. The guard ends the canary if it fails too often.", field("For", kind), field("Percentage or pattern", value, "5, or a pattern such as line1/*")],
      act: () => {
        const rule = { [kind.value]: kind.value === "percent" ? Number(value.value) : value.value };
        return report("The canary runs.")(json("PUT", "/v1/canary", { policy: hexOf(it.digest), rule }));
      },
    });
  }

  function route(it) {
    const prefix = el("input", { required: true, maxlength: 1024, spellcheck: "false", placeholder: "line1/" });
    return act({
      title: `Route keys to ${nameOf(it)}?`, yes: "Set the route",
      body: ["It answers all requests for keys below the prefix. The longest prefix wins.", field("Prefix", prefix)],
      act: () => report("The route is set.")(json("PUT", `/v1/routes?prefix=${encoded(prefix.value)}`, { policy: hexOf(it.digest) })),
    });
  }

  function load() {
    const [chosenFile] = file.files;
    file.value = "";
    if (!chosenFile) return;
    act({
      title: "Load this policy?", yes: "Load it",
      body: [`${plain(chosenFile.name, 100)}, ${bytes(chosenFile.size)}. The store checks and compiles it. It gets no role and answers nothing yet.`],
      act: () => report(`${plain(chosenFile.name, 100)} is loaded.`)(ask("POST", "/v1/policies", { body: chosenFile, within: LONG_MS })),
    });
  }

  return {
    close() {
      polling.stop();
      logs.close();
    },
  };
}

const hexOf = (digest) => digest.replace(/^blake3:/, "");
const failures = (it) => Object.values(it.failures ?? {}).reduce((sum, one) => sum + one, 0);
const badges = (it) => el("span", {}, it.roles.map((one) => el(`span.badge.${ROLE_NAMES[one] || "plain"}`, {}, one)), it.built_in && el("span.badge.plain", {}, "built in"));

function ruleText(rule) {
  if (rule.percent !== undefined) return `${rule.percent} % of the clients, always the same`;
  return rule.clients !== undefined ? `clients like ${plain(rule.clients)}` : `keys like ${plain(rule.keys)}`;
}

const PATHS = { admin: "an operator", directory: "a file in the drop directory", order: "a signed order", setting: "a setting", guard: "the guard" };

function actText(act, lead = "; since ") {
  if (!act) return "";
  const by = act.user ? `by ${plain(act.user, 60)}` : `by ${PATHS[act.path] ?? plain(act.path, 30)}`;
  return el("span", {}, lead, moment(act.at_ms), ` ${by}`);
}
