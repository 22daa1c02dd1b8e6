// Requests to the admin API, streams, and the session of this tab.
//
// The secret of the session is in sessionStorage, so that a reload keeps it and another tab does not
// have it. It goes into the Authorization header only, never into a URL.

const SECRET = "statehouse-session";

/** The statuses of a request with a head that is too long. A key is the only long part of one. */
const TOO_LONG = [414, 431];

/** An answer of the store that is no success. */
export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

/** The store cannot be reached, or does not answer. */
export class Lost extends Error {}

const UNREACHABLE = "The store does not answer. It may be stopped, or this machine has no connection to it.";

/** A browser has few connections to a host, and keeps requests back while streams hold all. */
const LATE = "The store does not answer. It may be stopped, or too many windows of this page are open.";

const UNKNOWN = "It is not known whether this took effect: look at the present state before you try again.";

let ended = () => {};

/** Calls `handler(why)` when the session has ended. */
export const onEnd = (handler) => (ended = handler);

export const hasSession = () => sessionStorage.getItem(SECRET) !== null;

const forget = () => sessionStorage.removeItem(SECRET);

/** Logs in with `Bearer TOKEN` or `Basic ...`. */
export async function logIn(authorization) {
  const answer = await send("POST", "/v1/session", { authorization, signal: AbortSignal.timeout(ANSWER_MS) });
  const session = await answer.json();
  sessionStorage.setItem(SECRET, session.session);
  return session;
}

export async function logOut() {
  try {
    await ask("DELETE", "/v1/session", { within: BEGIN_MS });
  } finally {
    forget();
  }
}

/** The store answers a GET within 20 s, so a longer wait means that the connection is dead. */
const ANSWER_MS = 40000;

/** The same for an act: a change waits 20 s for the one before, and then 20 s for the disk. */
const ACT_MS = 45000;

/** The same for the past of a key, and for a policy: reading or compiling much takes minutes. */
export const LONG_MS = 300000;

/** The same for the beginning of a stream, the overview and a log out: the store needs no time. */
export const BEGIN_MS = 10000;

/** Sends a request. Answers with its JSON, or text; throws Refused or Lost. */
async function exchange(method, path, { body, signal, within }) {
  const limit = AbortSignal.timeout(within);
  const answer = await authorized(method, path, { body, signal: signal ? AbortSignal.any([signal, limit]) : limit });
  const text = await read(answer.text());
  try {
    return text === "" ? null : JSON.parse(text);
  } catch {
    return text;
  }
}

/**
 * Sends an act. It must not wait in the browser for long: the state that it was meant for changes
 * meanwhile, and the operator believes that it has failed.
 */
export async function ask(method, path, { body, within = ACT_MS } = {}) {
  try {
    return await exchange(method, path, { body, within });
  } catch (error) {
    throw error instanceof Refused ? error : new Lost(`${error.message} ${UNKNOWN}`);
  }
}

export const get = (path, signal, within = ANSWER_MS) => exchange("GET", path, { signal, within });

export const past = (path) => get(path, null, LONG_MS);

export const json = (method, path, document) => ask(method, path, { body: JSON.stringify(document) });

async function authorized(method, path, { body, signal, headers }) {
  const secret = sessionStorage.getItem(SECRET);
  try {
    return await send(method, path, { authorization: `Bearer ${secret}`, body, signal, headers });
  } catch (error) {
    if (error instanceof Refused && error.status === 401 && sessionStorage.getItem(SECRET) === secret) {
      forget();
      ended("The session has ended: it was idle for too long, the store was restarted, or your role changed. Log in again.");
    }
    throw error;
  }
}

async function send(method, path, { authorization, body, signal, headers }) {
  const answer = await read(fetch(path, {
    method, body, signal, cache: "no-store", credentials: "omit", redirect: "error",
    headers: authorization ? { ...headers, Authorization: authorization } : headers,
  }));
  if (answer.ok) return answer;
  const text = await read(answer.text());
  throw new Refused(answer.status, reason(text) || (TOO_LONG.includes(answer.status)
    ? "The key is too long for the requests of this page. Use the command line: `statehouse get`, `set`, `del` or `history`."
    : `The store answers ${answer.status}.`));
}

function reason(text) {
  try {
    return JSON.parse(text).error;
  } catch {
    return text;
  }
}

async function read(promise) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Lost(error.name === "TimeoutError" ? LATE : UNREACHABLE);
  }
}

/** Waits before the next attempt: longer each time, and never all pages at once. */
const backOff = (failures) => Math.min(15000, 500 * 2 ** failures) * (0.75 + Math.random() / 2);

/**
 * Repeats `work(signal)` until it is stopped: at once after a success, later after a failure. It
 * rests while the tab is hidden. `onstate(error, wait)` gets null when the work succeeds.
 * `alive()`, which the work gets too, tells that the connection works before the work ends.
 */
export function repeat(work, onstate) {
  let abort = null, timer = null, failures = 0, stopped = false;

  async function run() {
    timer = null;
    if (stopped || document.hidden || abort) return;
    const own = (abort = new AbortController());
    const alive = () => ((failures = 0), onstate(null));
    try {
      const rest = await work(own.signal, alive);
      if (own.signal.aborted) return;
      alive();
      abort = null;
      timer = setTimeout(run, rest ?? 0);
    } catch (error) {
      if (own.signal.aborted) return;
      abort = null;
      if (error instanceof Refused && error.status === 401) return;
      const wait = backOff(failures++);
      onstate(error, wait);
      timer = setTimeout(run, wait);
    }
  }

  function pause() {
    clearTimeout(timer);
    abort?.abort();
    abort = timer = null;
  }

  const onshow = () => (document.hidden ? pause() : now());
  const now = () => (pause(), run());
  document.addEventListener("visibilitychange", onshow);
  run();
  return {
    now,
    stop() {
      stopped = true;
      document.removeEventListener("visibilitychange", onshow);
      pause();
    },
  };
}

/** The store breaks a silence after 15 s, so a longer one means that the connection is dead. */
const SILENCE_MS = 40000;

/** The most characters of one event, so that a broken stream cannot fill the memory. */
const EVENT_MAX = 16 << 20;

/**
 * Follows server-sent events: calls `onevent(name, document)` until the stream ends. The first
 * event is `open`: the stream has all events from then on, and none from before.
 */
export async function follow(path, signal, onevent) {
  const silence = new AbortController();
  let timer = setTimeout(() => silence.abort(), BEGIN_MS);
  let reader = null, rest = "";
  try {
    const answer = await authorized("GET", path, {
      signal: AbortSignal.any([signal, silence.signal]),
      headers: { Accept: "text/event-stream" },
    });
    reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    onevent("open", null);
    for (;;) {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(), SILENCE_MS);
      const { value, done } = await read(reader.read());
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      if (rest.length > EVENT_MAX) throw new Lost("An event of the store is too long.");
      for (const block of blocks) deliver(block, onevent);
    }
  } catch (error) {
    if (silence.signal.aborted && !signal.aborted) throw new Lost(reader ? "The store has been silent for too long." : LATE);
    throw error;
  } finally {
    clearTimeout(timer);
    reader?.cancel().catch(() => {});
  }
}

function deliver(block, onevent) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  if (data.length) onevent(name, JSON.parse(data.join("\n")));
}
