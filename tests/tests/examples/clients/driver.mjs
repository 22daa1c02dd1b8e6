// Executes requests of a test, one JSON object per line, with the JavaScript client. Keys and
// values are hexadecimal, so that they can be any bytes.

import { readFileSync } from "node:fs";
import { Socket } from "node:net";
import { createInterface } from "node:readline";

import { connect, StoreError, Version } from "../../../../examples/clients/javascript/statehouse.js";

const bytes = (hex) => Uint8Array.from(Buffer.from(hex, "hex"));
const hex = (data) => data && Buffer.from(data).toString("hex");
const version = (text) => (text ? Version.parse(text) : undefined);
const text = (version) => version && String(version);

let store;
const [watches, locks] = [new Map(), new Map()];
const wallMs = Date.now;

// Node cannot read the option of a socket.
let nodelay = false;
const { setNoDelay } = Socket.prototype;
Socket.prototype.setNoDelay = function (on) {
  nodelay = on;
  return setNoDelay.call(this, on);
};

const operations = {
  async connect({ url, user, password, ca, client_id, timeout_ms }) {
    const options = { username: user, password, clientId: client_id, timeoutMs: timeout_ms };
    store = await connect(url, { ...options, ca: ca && readFileSync(ca) });
  },
  async get({ key }) {
    const value = await store.get(bytes(key));
    return value && { data: hex(value.data), version: String(value.version) };
  },
  async set({ key, value, nx, nex, if_version, ttl_ms, token }) {
    const options = { nx, nex, ifVersion: version(if_version), ttlMs: ttl_ms, fencingToken: version(token) };
    const result = await store.set(bytes(key), bytes(value), options);
    return { applied: result.applied, version: text(result.version) };
  },
  async delete({ key, token }) {
    return text(await store.del(bytes(key), { fencingToken: version(token) }));
  },
  async vdelete({ key, value, token }) {
    const result = await store.vdel(bytes(key), bytes(value), { fencingToken: version(token) });
    return { deleted: result.deleted, version: text(result.version) };
  },
  async scan({ pattern }) {
    const keys = [];
    for await (const key of store.scan(bytes(pattern))) keys.push(hex(key));
    return keys;
  },
  async watch({ key }) {
    watches.set(key, await store.watch(bytes(key)));
  },
  async next({ key, timeout_ms, then_wall_ahead_ms }) {
    const next = watches.get(key).next(timeout_ms);
    if (then_wall_ahead_ms) operations.wall({ ahead_ms: then_wall_ahead_ms });
    const event = await next;
    return event && (event.kind === "gap" ? { gap: event.cause } : { data: hex(event.data) });
  },
  async unwatch({ key }) {
    watches.get(key).close();
  },
  async lock({ name, lease_ms, wait_ms }) {
    const lock = await store.lock(name, { leaseMs: lease_ms, waitMs: wait_ms });
    locks.set(name, lock);
    return lock && String(lock.fencingToken);
  },
  async held({ name }) {
    return locks.get(name).held;
  },
  async wall({ ahead_ms }) {
    Date.now = () => wallMs() + ahead_ms;
  },
  async release({ name }) {
    return locks.get(name).release();
  },
  async nodelay() {
    return nodelay;
  },
  async close() {
    await store.close();
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { do: name, ...request } = JSON.parse(line);
  let answer;
  try {
    answer = { ok: (await operations[name](request)) ?? null };
  } catch (error) {
    if (!(error instanceof StoreError)) throw error;
    answer = { error: error.code, text: error.message };
  }
  console.log(JSON.stringify(answer));
}
process.exit();
