// Logs in, follows the overview of the store, and shows one view at a time.

import { BEGIN_MS, Lost, Refused, follow, get, hasSession, logIn, logOut, onEnd, repeat } from "./api.js";
import { el, plain, text } from "./dom.js";
import * as overview from "./overview.js";
import * as keys from "./keys.js";
import * as policies from "./policies.js";
import * as clients from "./clients.js";
import * as events from "./events.js";
import * as cluster from "./cluster.js";

const VIEWS = { overview, keys, policies, clients, events, cluster };

/**
 * Views that hold a connection, for a stream or a long wait. A browser has six for all windows of
 * the page. While all are held, an act waits in the browser. So a window must not hold two.
 */
const HOLDERS = ["keys", "policies", "events"];

const ROLES = ["read", "operate", "ship"];
const SAMPLES_MAX = 360;

const id = (name) => document.getElementById(name);
/**
 * What all views share. `samples` are the rates and times of the last minutes. `now()` is the time
 * of the store, by which keys expire. `wall()` is the clock of its machine. Both may differ from
 * the clock of this machine, and from each other after a clock was set.
 */
const page = {
  samples: [], doc: null, role: "read", ahead: 0, wallAhead: 0,
  may: (role) => ROLES.indexOf(page.role) >= ROLES.indexOf(role),
  now: () => Date.now() + page.ahead,
  wall: () => Date.now() + page.wallAhead,
};
/** `live` follows the overview, or resumes the session before. */
let view = null, live = null;

// The session.

function showLogin(why) {
  live?.stop();
  view?.close?.();
  [live, view, page.doc] = [null, null, null];
  page.samples.length = 0;
  document.body.classList.add("is-out");
  id("main").replaceChildren();
  id("lost").hidden = true;
  id("login").hidden = false;
  text(id("login-host"), location.host);
  trouble(why);
  const isSafe = location.protocol === "https:";
  id("login-kind").hidden = !isSafe;
  chooseLogin(isSafe ? id("login-form").elements.kind.value : "token");
}

function trouble(why) {
  id("login-why").hidden = !why;
  text(id("login-why"), why);
}

function chooseLogin(kind) {
  id("by-user").hidden = kind !== "user";
  id("by-token").hidden = kind !== "token";
  (kind === "user" ? id("name") : id("token")).focus();
}

/** The header of the login. A Unix socket, which `ssh -L` puts at an address, needs none. */
function credentials() {
  const token = id("token").value.trim();
  if (!id("by-token").hidden) return token && `Bearer ${token}`;
  const bytes = new TextEncoder().encode(`${id("name").value}:${id("password").value}`);
  return `Basic ${btoa(String.fromCharCode(...bytes))}`;
}

/** Why a login failed, and what to do. */
function loginTrouble(error) {
  if (!(error instanceof Refused) || error.status !== 401) return error.message;
  return id("by-token").hidden
    ? "The user name or the password is wrong, or the user has no role. An operator gives roles with `statehouse user role`."
    : "This is not the token of this store. Copy it from the file `admin` in the data directory; a restart of the store may have changed it.";
}

id("login-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const button = event.target.querySelector("button");
  button.disabled = true;
  trouble("");
  try {
    // Other characters cannot be in a header, and so not in a token.
    const shown = credentials();
    if (/[^\x20-\x7e]/.test(shown)) throw new Refused(401, "");
    start(await logIn(shown));
  } catch (error) {
    trouble(loginTrouble(error));
  } finally {
    button.disabled = false;
    id("token").value = id("password").value = "";
  }
});
id("login-kind").addEventListener("change", (event) => chooseLogin(event.target.value));
id("leave").addEventListener("click", async () => {
  live?.stop();
  await logOut().catch(() => {});
  showLogin("");
});
onEnd(showLogin);

function start(session) {
  page.role = session.role;
  document.body.classList.remove("is-out");
  id("login").hidden = true;
  text(id("user"), `${session.user ? plain(session.user, 40) : "token"} · ${session.role}`);
  route();
  connect();
}

// The overview: a stream, or many requests while the view holds a connection.

const isHolder = () => HOLDERS.includes(view?.name);

function connect() {
  live?.stop();
  live = repeat(async (signal, alive) => {
    if (isHolder()) {
      take(await get("/v1/overview", signal, BEGIN_MS));
      return 1000;
    }
    await follow("/v1/live", signal, (name, doc) => {
      if (name !== "overview") return;
      alive();
      take(doc);
    });
    return 500;
  }, linked);
}

function take(doc) {
  page.doc = doc;
  page.wallAhead = doc.time_ms - Date.now();
  page.ahead = (doc.store_time_ms ?? doc.time_ms) - Date.now();
  sample({ rates: doc.rates, latency_us: doc.latency_us });
  id("store").title = plain(doc.store);
  text(id("store"), [doc.store, doc.host, doc.version && `v${doc.version}`].filter(Boolean).map((it) => plain(it, 26)).join(" · "));
  document.title = `${plain(doc.store ?? "Statehouse", 40)} · Statehouse`;
  id("ready").hidden = doc.ready === undefined;
  id("ready").className = `badge ${doc.ready ? "good" : "bad"}`;
  text(id("ready"), doc.ready ? "ready" : `not ready: ${plain(doc.why_not_ready)}`);
  document.querySelector("a[href='#/cluster']").hidden = !doc.cluster;
  view?.update?.(doc);
}

function sample(doc) {
  page.samples.push({ at: Date.now(), doc });
  if (page.samples.length > SAMPLES_MAX) page.samples.shift();
}

/** Shows whether the stream works, and what to do if it does not. */
function linked(error, wait) {
  document.body.classList.toggle("is-lost", Boolean(error));
  id("link").className = `link ${error ? "bad" : "good"}`;
  text(id("link"), error ? "not connected" : "live");
  id("lost").hidden = !error;
  if (!error) return;
  if (page.samples.at(-1)?.doc) sample(null);
  const again = el("button", { type: "button", onclick: () => live.now() }, "Try now");
  const what = error instanceof Lost || error instanceof Refused ? error.message : `The page failed: ${error.message}`;
  id("lost").replaceChildren(`${what.replace(/[^.!?]$/, "$&.")} The next attempt is in ${Math.ceil(wait / 1000)} s; the page shows the last known state. `, again);
}

setInterval(() => view?.tick?.(Date.now()), 1000);
addEventListener("online", () => live?.now());

// Views.

function route() {
  if (!hasSession()) return;
  const [, name, rest] = location.hash.match(/^#\/([a-z]+)(?:\/(.*))?$/) ?? [];
  const next = Object.hasOwn(VIEWS, name ?? "") ? name : "overview";
  for (const link of id("views").querySelectorAll("a")) {
    if (link.hash === `#/${next}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (view?.name === next && view.go) return view.go(rest ?? "");
  const was = view && isHolder();
  view?.close?.();
  const main = id("main");
  main.replaceChildren();
  main.className = `view-${next}`;
  view = { ...VIEWS[next].open(main, page, rest ?? ""), name: next };
  if (was !== null && was !== isHolder()) live?.now();
  if (page.doc) view.update?.(page.doc);
  view.tick?.(Date.now());
}

addEventListener("hashchange", () => {
  route();
  if (view?.keepsFocus) return;
  scrollTo(0, 0);
  id("main").focus({ preventScroll: true });
});
id("skip").addEventListener("click", () => id("main").focus());

// Colours.

const THEMES = ["light dark", "light", "dark"];
const THEME_NAMES = ["Auto", "Light", "Dark"];
let theme = Number(localStorage.getItem("statehouse-theme")) || 0;

function colour() {
  document.documentElement.style.setProperty("color-scheme", THEMES[theme]);
  text(id("theme"), THEME_NAMES[theme]);
  id("theme").setAttribute("aria-label", `Colours: ${THEME_NAMES[theme]}`);
}

id("theme").addEventListener("click", () => {
  theme = (theme + 1) % THEMES.length;
  localStorage.setItem("statehouse-theme", theme);
  colour();
});
colour();

// A reload keeps the session of the tab.
function resume() {
  if (!hasSession()) return showLogin("");
  live = repeat(async (signal) => start(await get("/v1/session", signal)), linked);
}
resume();
