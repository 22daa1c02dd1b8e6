// The clients of the embedded broker: what waits for them, what they watch, lock and own. Behind a
// foreign broker, which has the connections, those that own keys.

import { Refused, ask, get, repeat } from "./api.js";
import { button, confirm, problem } from "./act.js";
import { bytes, el, number, panel, plain, span, table, text } from "./dom.js";

const COUNT = 500;

export function open(main, page) {
  const trouble = problem(), about = el("small.dim");
  const filter = el("input", { type: "search", placeholder: "filter", "aria-label": "Filter clients", maxlength: 200, spellcheck: "false" });
  const count = (title, of, format = number) => ({ title, number: true, of: (it) => format(of(it)), by: of });
  const list = table({
    caption: "Clients", empty: "No client has a session.", limit: COUNT, keyOf: (it) => it.client,
    columns: [
      { title: "Client", of: (it) => el("span.key", {}, plain(it.client || "unknown", 100)), by: (it) => it.client },
      { title: "User", of: (it) => plain(it.user ?? "–", 60), by: (it) => it.user ?? "" },
      { title: "Address", of: (it) => plain(it.address ?? "–", 60), by: (it) => it.address ?? "" },
      { title: "MQTT", of: (it) => it.mqtt ?? "–", by: (it) => it.mqtt ?? "" },
      { title: "Connected", of: (it) => (it.since_ms ? span(page.wall() - it.since_ms) : it.since_ms === null ? el("span.badge.plain", {}, "no connection") : "–"), by: (it) => it.since_ms ?? 0 },
      count("Watches", (it) => it.watches),
      count("Locks", (it) => it.locks),
      count("Subscriptions", (it) => it.subscriptions),
      count("Queued", (it) => it.queued),
      count("Bytes queued", (it) => it.queued_bytes, bytes),
      count("In flight", (it) => it.in_flight),
      count("Keys", (it) => it.keys),
      count("Bytes of keys", (it) => it.bytes, bytes),
      { title: "", of: (it) => (it.since_ms ? button(page, "operate", "Disconnect", () => disconnect(it.client), "small") : "") },
    ],
  });
  let last = null, isForeign = false;

  function show() {
    const wanted = filter.value.toLowerCase();
    const items = last.clients.filter((it) => `${it.client} ${it.user ?? ""} ${it.address ?? ""}`.toLowerCase().includes(wanted));
    if (wanted) list.show(items, null, "No client in the list matches the filter.");
    else if (isForeign) list.show(items, last.owners, "No client owns a key.");
    else list.show(items, last.connected + last.disconnected);
    if (isForeign) return void text(about, "Only clients that own keys are listed. The foreign broker has the connections.");
    const absent = `${number(last.disconnected)} ${last.disconnected === 1 ? "session" : "sessions"}`;
    text(about, `${number(last.connected)} connected, ${absent} without a connection`);
  }

  /** The sessions; null behind a foreign broker. */
  async function sessions(signal) {
    if (isForeign) return null;
    try {
      return await get(`/v1/clients?clients=${COUNT}`, signal);
    } catch (error) {
      isForeign = error instanceof Refused && error.status === 409;
      if (isForeign) return null;
      throw error;
    }
  }

  const polling = repeat(async (signal) => {
    const [clients, usage] = await Promise.all([sessions(signal), get(`/v1/usage?clients=${COUNT}`, signal)]);
    last = clients === null ? usage : withOwned(clients, usage);
    show();
    return 2000;
  }, (error) => trouble.show(error));

  /** Adds what each client owns. */
  function withOwned(clients, usage) {
    const owners = new Map(usage.clients.map((it) => [it.client, it]));
    // What a client owns is unknown if the list of owners is cut.
    const none = usage.owners > usage.clients.length ? undefined : { keys: 0, bytes: 0 };
    const owned = (it) => owners.get(it.client) ?? none;
    return { ...clients, clients: clients.clients.map((it) => ({ ...it, keys: owned(it)?.keys, bytes: owned(it)?.bytes })) };
  }

  async function disconnect(client) {
    const isDone = await confirm({
      title: "Disconnect this client?", yes: "Disconnect it", isDangerous: true,
      body: [el("p.key", {}, plain(client, 200)), "Its connection ends; its session stays. Most clients connect again by themselves."],
      act: async () => {
        await ask("DELETE", `/v1/clients?id=${encodeURIComponent(client)}`);
        return `Disconnected: ${plain(client, 100)}.`;
      },
    });
    if (isDone) polling.now();
  }

  filter.addEventListener("input", () => last && show());
  main.append(el("h1.unseen", {}, "Clients"), trouble.element, panel("Clients", el("span.tools", {}, about, filter), list.element));
  return { close: () => polling.stop() };
}
