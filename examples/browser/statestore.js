// A client of the state store for web pages: MQTT 5 over WebSocket, by MQTT.js.
//
// `connect` takes the URL of a store (ws:// or wss://). Requests return promises, and each change
// of a watched key calls a function. Values are bytes (Uint8Array). A string argument is encoded as
// UTF-8.

import mqtt from "./node_modules/mqtt/dist/mqtt.esm.js";

const REQUESTS = "statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/command/invoke";
const NOTIFICATIONS = "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8";
const ANSWER_WITHIN_MS = 10_000;

const encoder = new TextEncoder();
const decoder = new TextDecoder();

const bytes = (it) => (typeof it === "string" ? encoder.encode(it) : it);

/**
 * Connects, and subscribes to answers and notifications. Options are those of MQTT.js: `username`,
 * `password`.
 */
export async function connect(url, options = {}) {
  // The store identifies a client by its id, so two pages must not share one.
  const clientId = options.clientId ?? `page-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
  const client = await mqtt.connectAsync(url, { ...options, clientId, protocolVersion: 5 });
  const store = new Store(client, clientId);
  await client.subscribeAsync([store.answers, `${store.notifications}+`], { qos: 1 });
  return store;
}

class Store {
  #client;
  #id;
  #number = 0;
  #waiting = new Map();
  #watchers = new Map();

  constructor(client, id) {
    this.#client = client;
    this.#id = id;
    this.answers = `clients/${id}/answers`;
    this.notifications = `${NOTIFICATIONS}/${hex(encoder.encode(id))}/command/notify/`;
    client.on("message", (topic, payload, packet) => this.#receive(topic, payload, packet));
    // Watches end with the connection (protocol, section 8).
    client.on("connect", () => this.#renewWatches());
  }

  /** The value, or null if the key does not exist. */
  async get(key) {
    const answer = await this.#ask(["GET", key]);
    return answer.strings[0] ?? null;
  }

  /** Sets a key. */
  async set(key, value) {
    const answer = await this.#ask(["SET", key, value]);
    if (answer.text !== "+OK") throw new Error(`the store answered ${answer.text}`);
  }

  /** Calls `changed` with the current value or null, and again after each change. */
  async watch(key, changed) {
    this.#watchers.set(hex(bytes(key)), { key, changed });
    await this.#ask(["KEYNOTIFY", key]);
    // Read after the watch has begun, so that no change is missed.
    changed(await this.get(key));
  }

  async close() {
    await this.#client.endAsync();
  }

  #ask(command) {
    const number = String(++this.#number);
    return new Promise((resolve, reject) => {
      const fail = (error) => {
        clearTimeout(timer);
        this.#waiting.delete(number);
        reject(error);
      };
      const timer = setTimeout(() => fail(new Error("the store did not answer in time")), ANSWER_WITHIN_MS);
      this.#waiting.set(number, (answer) => {
        clearTimeout(timer);
        this.#waiting.delete(number);
        if (answer.text.startsWith("-ERR ")) reject(new Error(answer.text.slice(5)));
        else resolve(answer);
      });
      const properties = {
        responseTopic: this.answers,
        correlationData: number,
        messageExpiryInterval: ANSWER_WITHIN_MS / 1000,
        userProperties: { __protVer: "1.0", __ts: timestamp(this.#id) },
      };
      this.#client.publishAsync(REQUESTS, resp(command), { qos: 1, properties }).catch(fail);
    });
  }

  #receive(topic, payload, packet) {
    if (topic === this.answers) {
      const number = decoder.decode(packet.properties?.correlationData ?? new Uint8Array());
      this.#waiting.get(number)?.(parse(payload));
    } else if (topic.startsWith(this.notifications)) {
      const watcher = this.#watchers.get(topic.slice(this.notifications.length));
      // NOTIFY SET VALUE value, or NOTIFY DELETE.
      const [, event, , value] = parse(payload).strings;
      if (watcher && event) watcher.changed(decoder.decode(event) === "SET" ? value : null);
    }
  }

  async #renewWatches() {
    for (const { key, changed } of this.#watchers.values()) {
      await this.watch(key, changed).catch((error) => console.error(`watching again: ${error.message}`));
    }
  }
}

/** The timestamp of a request (protocol, section 5). */
function timestamp(id) {
  return `${String(Date.now()).padStart(15, "0")}:00000:${id}`;
}

/** Encodes an array of bulk strings. */
function resp(command) {
  const parts = [encoder.encode(`*${command.length}\r\n`)];
  for (const argument of command.map(bytes)) {
    parts.push(encoder.encode(`$${argument.length}\r\n`), argument, encoder.encode("\r\n"));
  }
  const all = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  parts.reduce((at, part) => (all.set(part, at), at + part.length), 0);
  return all;
}

/** The first line, and all bulk strings. An absent one is null. */
function parse(payload) {
  const line = (from) => {
    const end = payload.indexOf(13, from);
    return { text: decoder.decode(payload.subarray(from, end)), next: end + 2 };
  };
  const { text, next } = line(0);
  const strings = [];
  let at = text.startsWith("*") ? next : 0;
  while (at < payload.length && payload[at] === 36) {
    const head = line(at);
    const length = Number(head.text.slice(1));
    strings.push(length < 0 ? null : payload.slice(head.next, head.next + length));
    at = length < 0 ? head.next : head.next + length + 2;
  }
  return { text, strings };
}

function hex(it) {
  return Array.from(it, (byte) => byte.toString(16).padStart(2, "0").toUpperCase()).join("");
}
