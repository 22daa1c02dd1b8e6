// A client of the Statehouse state store: MQTT 5 by MQTT.js, one file, for Node and browsers.
//
//     const store = await connect("ws://127.0.0.1:8080/mqtt");
//     await store.set("room/temperature", "21.5", { ttlMs: 60_000 });
//     const value = await store.get("room/temperature");
//
// MQTT.js resends a request after a reconnect with its packet id and its correlation data, so the
// store recognizes the duplicate. If the broker lost the session, this client resends the requests
// that the broker had acknowledged. Behind a foreign broker the store recognizes these too. A store
// that is the broker recognizes duplicates within one session only, so the session outlives each
// request. If it ends earlier, for example by an operator, that store executes a resent request
// again. A page needs an import map for "mqtt".

import mqtt from "mqtt";

const REQUESTS = "statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8/command/invoke";
const NOTIFICATIONS = "clients/statestore/v1/FA9AE35F-2F64-47CD-9BFF-08E2B32A0FE8";

/** Requests without a response at one time. Later ones are refused. */
const REQUESTS_MAX = 256;
/** Events that a watch buffers for a slow reader before it reports a gap. */
const WATCH_EVENTS_MAX = 1024;
/** Bytes of values that a watch buffers for a slow reader before it reports a gap. */
const WATCH_BYTES_MAX = 16 * 1024 * 1024;
/** The largest packet that is accepted, in bytes. */
const PACKET_BYTES_MAX = 4 * 1024 * 1024;
/** Arrays within arrays in a response. */
const RESP_DEPTH_MAX = 16;
/** How far ahead a version may be and still move the clock; the store refuses later ones. */
const CLOCK_AHEAD_MS_MAX = 60_000;
/** The largest counter of a version that all clients can read. */
const COUNTER_MAX = 2 ** 31 - 2;
/** The client id and a key in hexadecimal must fit a topic. */
const CLIENT_ID_BYTES_MAX = 1024;
/** How long the store keeps the session without a connection, unless a request has more time. */
const SESSION_EXPIRY_S = 60;
/** The pause between two attempts to connect. */
const RECONNECT_PAUSE_MS = 1000;
/** The shortest pause before a held lock is tried again without a notification. */
const LOCK_RETRY_MIN_MS = 100;
/** The pause before a watch is registered once more, after a failure. */
const RETRY_PAUSE_MS = 500;
/** A lock counts as acquired only if this part of its lease is left. */
const LOCK_LEASE_LEFT_DIVISOR = 3;
/** The longest time of a timer, in JavaScript. */
const TIMER_MS_MAX = 2 ** 31 - 1;

const NO_MATCHING_SUBSCRIBERS = 0x10;
/** The text of that error. Behind a broker that restarted, the store may connect later. */
const NO_STORE = "no state store is subscribed to requests";
const SESSION_TAKEN_OVER = 0x8e;
/** A limit of the broker, such as that of the requests per second. */
const QUOTA_EXCEEDED = 0x97;
/**
 * The error of MQTT.js for a PUBACK with the reason 0x95, among others. Mosquitto sends it for a
 * payload above its `message_size_limit`.
 */
const UNREADABLE_PUBACK = "Invalid puback reason code";
/** Instead of the packet id of a request that is acknowledged. MQTT has no packet id 0. */
const ACKNOWLEDGED = 0;

const encoder = new TextEncoder();
const decoder = new TextDecoder();

/**
 * @typedef {string | Uint8Array} Text
 * @typedef {{ data: Uint8Array, version: Version }} Value
 * @typedef {{ applied: boolean, version: Version | null }} SetResult `applied` is false if a
 *   condition did not hold. `version` is that of the value that the key has now; it is null only
 *   if `ifVersion` was given and the key does not exist.
 * @typedef {{ deleted: boolean, version: Version | null }} VdelResult `version` is that of the
 *   deleted value or of the other value; null if there is no key.
 * @typedef {{ kind: "change", data: Uint8Array | null, version: Version }} Change `data` is null if
 *   the key was deleted or expired.
 * @typedef {{ kind: "gap", cause: string }} Gap Changes before this point may be missing; `get`
 *   returns the current value.
 * @typedef {string | number | Uint8Array | null | Array<any>} Reply
 * @typedef {{ reply: Reply, version: Version | null }} Response
 * @typedef {{ payload: Uint8Array, properties: Record<string, any>, deadline: number,
 *   packetId: number | null, resolve: (response: Response) => void,
 *   reject: (error: Error) => void }} Request
 * @typedef {{ username?: string, password?: string, ca?: string | Uint8Array, clientId?: string,
 *   timeoutMs?: number }} Options `ca` is PEM text, and only Node uses it. Two running clients must
 *   not share a client id. `timeoutMs` is that of each request.
 */

/**
 * Why a request has no result. `code` is "refused" (the store answered with this error),
 * "denied" (the broker refused the connection, a subscription or the request), "transport" (there
 * is no connection), "timeout" (it is unknown whether the request took effect), "protocol", or
 * "lock-lost". `passes` is true if a later request may succeed: after a lost connection or a
 * timeout, without a store behind the broker, or if a limit of the broker refused the request.
 */
export class StoreError extends Error {
  /** @param {string} code @param {string} message @param {boolean} [passes] */
  constructor(code, message, passes = code === "timeout" || code === "transport") {
    super(message);
    this.name = "StoreError";
    this.code = code;
    this.passes = passes;
  }
}

/** A version of a value, or a fencing token: a reading of a hybrid logical clock. */
export class Version {
  /** @param {bigint} wallMs @param {number} counter @param {string} node */
  constructor(wallMs, counter, node) {
    this.wallMs = wallMs;
    this.counter = counter;
    this.node = node;
  }

  /** Parses `wall:counter:node`, with or without padding. @param {string} text */
  static parse(text) {
    const parts = /^(\d{1,20}):(\d{1,10}):([^:]+)$/.exec(text);
    if (!parts) throw new StoreError("protocol", `${text.slice(0, 64)} is not a version`);
    return new Version(BigInt(parts[1]), Number(parts[2]), parts[3]);
  }

  /** Negative if this version is older, 0 if it is the same. @param {Version} other */
  compare(other) {
    if (this.wallMs !== other.wallMs) return this.wallMs < other.wallMs ? -1 : 1;
    if (this.counter !== other.counter) return this.counter - other.counter;
    return this.node === other.node ? 0 : this.node < other.node ? -1 : 1;
  }

  toString() {
    const wall = String(this.wallMs).padStart(15, "0");
    return `${wall}:${String(this.counter).padStart(5, "0")}:${this.node}`;
  }
}

/**
 * The hybrid logical clock of a client. Its readings must always rise, unless the wall clock is set
 * back by more than a minute: the store would refuse higher ones.
 */
class Clock {
  #wallMs = 0;
  #counter = 0;
  #node;

  /** @param {string} node */
  constructor(node) {
    this.#node = node.replaceAll(":", "_");
  }

  read() {
    const now = Date.now();
    const isTooFar = this.#wallMs > now + CLOCK_AHEAD_MS_MAX;
    if (now > this.#wallMs || isTooFar) [this.#wallMs, this.#counter] = [now, 0];
    else if (this.#counter < COUNTER_MAX) this.#counter += 1;
    else [this.#wallMs, this.#counter] = [this.#wallMs + 1, 0];
    return String(new Version(BigInt(this.#wallMs), this.#counter, this.#node));
  }

  /** @param {Version} version */
  observe(version) {
    const wallMs = Number(version.wallMs);
    if (wallMs > Date.now() + CLOCK_AHEAD_MS_MAX || version.counter > COUNTER_MAX) return;
    if (wallMs > this.#wallMs || (wallMs === this.#wallMs && version.counter > this.#counter)) {
      [this.#wallMs, this.#counter] = [wallMs, version.counter];
    }
  }
}

/**
 * The changes of one key: `for await (const event of watch)`. It ends with `close`. After a
 * reconnect the client registers the watch again and reports a gap.
 */
export class Watch {
  /** @type {(Change | Gap)[]} */ #events = [];
  #bytes = 0;
  /** @type {Version | null} */ #last = null;
  /** @type {Error | null} */ #end = null;
  #closed = false;
  /** @type {Set<() => void>} */ #waiting = new Set();
  #unwatch;

  /** @param {Uint8Array} key @param {(watch: Watch) => void} unwatch */
  constructor(key, unwatch) {
    this.key = key;
    this.#unwatch = unwatch;
  }

  /**
   * The next event; null after this time in milliseconds, or after `close`.
   * @param {number} [timeoutMs]
   * @returns {Promise<Change | Gap | null>}
   */
  async next(timeoutMs = Infinity) {
    const giveUp = performance.now() + timeoutMs;
    for (;;) {
      const event = this.#events.shift();
      if (event) {
        this.#bytes -= size(event);
        return event;
      }
      if (this.#end) throw this.#end;
      const left = giveUp - performance.now();
      if (this.#closed || left <= 0) return null;
      await new Promise((resolve) => {
        const wake = () => {
          clearTimeout(timer);
          this.#waiting.delete(wake);
          resolve(undefined);
        };
        const timer = left <= TIMER_MS_MAX ? setTimeout(wake, left) : undefined;
        this.#waiting.add(wake);
      });
    }
  }

  /** Ends the watch. */
  close() {
    if (this.#closed) return;
    this.#closed = true;
    this.#unwatch(this);
    this.#wake();
  }

  async *[Symbol.asyncIterator]() {
    try {
      for (let event; (event = await this.next()); ) yield event;
    } finally {
      this.close();
    }
  }

  /** For the client. @param {Change | Gap} event @param {boolean} [dup] */
  add(event, dup = false) {
    if (event.kind === "change") {
      // A packet that is sent again may be here already.
      if (dup && this.#last && event.version.compare(this.#last) <= 0) return;
      this.#last = event.version;
    }
    const bytes = this.#bytes + size(event);
    if (this.#events.length >= WATCH_EVENTS_MAX || bytes > WATCH_BYTES_MAX) {
      const cause = "the reader was too slow";
      const last = this.#events.at(-1);
      if (last?.kind === "gap" && last.cause === cause) return;
      event = { kind: "gap", cause };
    }
    this.#bytes += size(event);
    this.#events.push(event);
    this.#wake();
  }

  /** For the client. @param {Error} error */
  fail(error) {
    this.#end ??= error;
    this.#wake();
  }

  #wake() {
    for (const wake of this.#waiting) wake();
  }
}

/**
 * A held lock, from `Store.lock`, renewed in the background until `release`. The fencing token is
 * above that of every earlier holder: pass it to `set`, `del` and `vdel` of the data that the lock
 * protects. The store then refuses a holder that lost the lock.
 */
export class Lock {
  #store;
  #leaseMs;
  #heldUntil;
  #released = false;
  /** @type {ReturnType<typeof setTimeout> | undefined} */ #timer;
  /** @type {Promise<void>} */ #renewal = Promise.resolve();

  /**
   * @param {Store} store @param {Text} name @param {Text} holder @param {number} leaseMs
   * @param {Version} fencingToken @param {number} heldUntil
   */
  constructor(store, name, holder, leaseMs, fencingToken, heldUntil) {
    this.#store = store;
    this.name = name;
    this.holder = holder;
    this.fencingToken = fencingToken;
    this.#leaseMs = leaseMs;
    this.#heldUntil = heldUntil;
    this.#plan();
  }

  /**
   * Whether the lease has not expired. JavaScript has no clock that counts the time for which the
   * machine was suspended: after a suspension this can be true for a lock that is lost.
   */
  get held() {
    return performance.now() < this.#heldUntil;
  }

  /** Releases the lock. Returns false if it was not held any more. */
  async release() {
    this.#released = true;
    clearTimeout(this.#timer);
    await this.#renewal;
    const held = this.held;
    this.#heldUntil = 0;
    return (await this.#store.vdel(this.name, this.holder)).deleted && held;
  }

  #plan() {
    if (this.#released || !this.held) return;
    const pauseMs = Math.min(this.#leaseMs / LOCK_LEASE_LEFT_DIVISOR, TIMER_MS_MAX);
    this.#timer = setTimeout(() => {
      this.#renewal = this.#renew().finally(() => this.#plan());
    }, pauseMs);
  }

  async #renew() {
    const askedAt = performance.now();
    try {
      const options = { nex: true, ttlMs: this.#leaseMs };
      const { applied } = await this.#store.set(this.name, this.holder, options);
      // A lease that expired before the response may have been another client's.
      this.#heldUntil = applied && this.held ? askedAt + this.#leaseMs : 0;
    } catch (error) {
      // The lease goes on, so there is time to try again.
      if (!(error instanceof StoreError && error.passes)) this.#heldUntil = 0;
    }
  }
}

/** A connection to a state store, from `connect`. */
export class Store {
  #client;
  #clock;
  #nonce = hex(crypto.getRandomValues(new Uint8Array(4)));
  #number = 0;
  // From the event "connect": before it MQTT.js resends, and assigns packet ids late.
  #online = false;
  /** What the store accepts (MQTT 5 section 3.2.2.3.6). */
  #requestBytesMax = Infinity;
  #answers;
  #notifications;
  /** @type {Map<string, Request>} */ #pending = new Map();
  /** @type {Map<string, Set<Watch>>} */ #watches = new Map();
  /** @type {StoreError | null} */ #closed = null;

  /**
   * For `connect`.
   * @param {mqtt.MqttClient} client @param {string} clientId @param {number} timeoutMs
   */
  constructor(client, clientId, timeoutMs) {
    this.clientId = clientId;
    this.timeoutMs = timeoutMs;
    this.#client = client;
    this.#clock = new Clock(clientId);
    this.#answers = `clients/${clientId}/services/statestore/_any_/command/invoke/response`;
    this.#notifications = `${NOTIFICATIONS}/${hex(encoder.encode(clientId))}/command/notify/`;
    client.on("message", (topic, payload, packet) => this.#receive(topic, payload, packet));
    client.on("reconnect", () => this.#beforeConnection());
    client.on("disconnect", (packet) => {
      // To connect again would end the other client's connection.
      const why = "another client connected with the same client id";
      if (packet.reasonCode === SESSION_TAKEN_OVER) this.#end(new StoreError("transport", why));
    });
    client.on("close", () => (this.#online = false));
    client.on("packetreceive", (packet) => {
      if (packet.cmd !== "connack") return;
      this.#requestBytesMax = packet.properties?.maximumPacketSize ?? Infinity;
    });
    // Requests must not wait until the broker has acknowledged earlier packets (Nagle). A WebSocket
    // has no such method.
    client.on("connect", () => /** @type {any} */ (client.stream).setNoDelay?.(true));
    // MQTT.js connects again after each error of a connection.
    client.on("error", (error) => {
      if (error.message === UNREADABLE_PUBACK) this.#unreadable();
    });
  }

  /** For `connect`. */
  async start() {
    // Later connections resume the session, so that the store recognizes a duplicate request.
    this.#client.options.clean = false;
    this.#client.on("connect", (packet) => this.#connected(packet.sessionPresent));
    this.#online = true;
    await this.#subscribe();
  }

  /**
   * The value of a key; null if it does not exist.
   * @param {Text} key
   * @returns {Promise<Value | null>}
   */
  async get(key) {
    const { reply, version } = await this.#ask(["GET", key]);
    if (reply === null) return null;
    if (!(reply instanceof Uint8Array)) throw unexpected("GET");
    return { data: reply, version: stamped(version) };
  }

  /**
   * Sets a key: with `nx` only if it does not exist, with `nex` only if it does not exist or has
   * this value, with `ifVersion` only if it has this version.
   * @param {Text} key @param {Text} value
   * @param {{ nx?: boolean, nex?: boolean, ifVersion?: Version, ttlMs?: number,
   *   fencingToken?: Version }} [options]
   * @returns {Promise<SetResult>}
   */
  async set(key, value, { nx, nex, ifVersion, ttlMs, fencingToken } = {}) {
    if (Number(nx ?? 0) + Number(nex ?? 0) + Number(ifVersion !== undefined) > 1) {
      throw new TypeError("nx, nex and ifVersion exclude each other");
    }
    /** @type {Text[]} */
    const command = ["SET", key, value];
    if (nx) command.push("NX");
    if (nex) command.push("NEX");
    if (ifVersion) command.push("IFVERSION", String(ifVersion));
    if (ttlMs !== undefined) {
      if (!(ttlMs >= 1)) throw new TypeError(`ttlMs is ${ttlMs}; the shortest is 1`);
      command.push("PX", String(Math.round(ttlMs)));
    }
    const { reply, version } = await this.#ask(command, fencingToken);
    if (reply === "OK") return { applied: true, version: stamped(version) };
    if (reply !== -1) throw unexpected("SET");
    return { applied: false, version: ifVersion ? version : stamped(version) };
  }

  /**
   * Deletes a key. Returns the version of the deleted value; null if there was none.
   * @param {Text} key @param {{ fencingToken?: Version }} [options]
   * @returns {Promise<Version | null>}
   */
  async del(key, { fencingToken } = {}) {
    const { reply, version } = await this.#ask(["DEL", key], fencingToken);
    if (reply !== 0 && reply !== 1) throw unexpected("DEL");
    return reply ? stamped(version) : null;
  }

  /**
   * Deletes a key if it has this value.
   * @param {Text} key @param {Text} value @param {{ fencingToken?: Version }} [options]
   * @returns {Promise<VdelResult>}
   */
  async vdel(key, value, { fencingToken } = {}) {
    const { reply, version } = await this.#ask(["VDEL", key, value], fencingToken);
    if (reply !== 0 && reply !== 1 && reply !== -1) throw unexpected("VDEL");
    return { deleted: reply === 1, version: reply === 0 ? null : stamped(version) };
  }

  /**
   * The keys that match a glob of `*`, `?`, `[a-z]`, `[!a-z]` and `\` escapes.
   * @param {Text} pattern
   * @returns {AsyncGenerator<Uint8Array>}
   */
  async *scan(pattern) {
    /** @type {Uint8Array | null} */
    let token = null;
    do {
      const { reply } = await this.#ask(["SCAN", pattern, ...(token ? [token] : [])]);
      const [keys, next] = Array.isArray(reply) && reply.length <= 2 ? reply : [null];
      const repeated = token && next && hex(token) === hex(next);
      if (!Array.isArray(keys) || repeated) throw unexpected("SCAN");
      yield* keys;
      token = next ?? null;
    } while (token);
  }

  /** Watches a key. The watch is registered when this resolves. @param {Text} key */
  async watch(key) {
    const watch = new Watch(bytes(key), (it) => this.#unwatch(it));
    const name = hex(watch.key);
    // Before the request, so that no notification is missed.
    this.#watches.set(name, (this.#watches.get(name) ?? new Set()).add(watch));
    try {
      await this.#ask(["KEYNOTIFY", key]);
    } catch (error) {
      watch.close();
      throw error;
    }
    return watch;
  }

  /**
   * Acquires a lock. Waits while another holder has it, and returns null after `waitMs`. After an
   * error or null the lock may be held until its lease expires.
   * @param {Text} name @param {{ leaseMs?: number, waitMs?: number, holder?: Text }} [options]
   * @returns {Promise<Lock | null>}
   */
  async lock(name, { leaseMs = 10_000, waitMs = Infinity, holder } = {}) {
    // Tasks of one client exclude each other.
    holder ??= `${this.clientId}/${hex(crypto.getRandomValues(new Uint8Array(4)))}`;
    const giveUp = performance.now() + waitMs;
    // The watch precedes the SET, so that a release between the two is noticed.
    const watch = await this.watch(name);
    try {
      for (;;) {
        const askedAt = performance.now();
        const { applied, version } = await this.set(name, holder, { nex: true, ttlMs: leaseMs });
        const end = askedAt + leaseMs;
        const enough = end - performance.now() >= leaseMs / LOCK_LEASE_LEFT_DIVISOR;
        if (applied && enough) return new Lock(this, name, holder, leaseMs, stamped(version), end);
        if (performance.now() >= giveUp) return null;
        // The pause covers a notification that is lost.
        const pause = performance.now() + Math.max(leaseMs, LOCK_RETRY_MIN_MS);
        const retry = Math.min(pause, giveUp);
        for (let left; (left = retry - performance.now()) > 0; ) {
          const event = await watch.next(left);
          if (event?.kind === "gap" || event?.data === null) break;
        }
      }
    } finally {
      watch.close();
    }
  }

  /** Disconnects. Pending requests fail. */
  async close() {
    this.#end(new StoreError("transport", "the client was closed"));
    await this.#client.endAsync();
  }

  /** @param {Text[]} command @param {Version} [fencingToken] @returns {Promise<Response>} */
  #ask(command, fencingToken) {
    if (this.#closed) return Promise.reject(this.#closed);
    if (this.#pending.size >= REQUESTS_MAX) {
      const why = `${REQUESTS_MAX} requests wait for a response`;
      return Promise.reject(new StoreError("transport", why));
    }
    this.#number += 1;
    // 16 bytes. The first half differs between processes with one client id.
    const correlation = this.#nonce + String(this.#number % 1e8).padStart(8, "0");
    /** @type {Record<string, string>} */
    const userProperties = {
      __protVer: "1.0",
      __ts: this.#clock.read(),
      __srcId: this.clientId,
      ...(fencingToken && { __ft: String(fencingToken) }),
    };
    const properties = {
      responseTopic: this.#answers,
      correlationData: correlation,
      messageExpiryInterval: Math.max(1, Math.ceil(this.timeoutMs / 1000)),
      userProperties,
    };
    const payload = encode(command);
    // Names, lengths and the header of the packet take less than 128 bytes beside the texts.
    const texts = [REQUESTS, this.#answers, correlation, ...Object.values(userProperties)];
    const sizes = [128, payload.length, ...texts.map((text) => encoder.encode(text).length)];
    const bytes = sizes.reduce((sum, size) => sum + size);
    if (bytes > this.#requestBytesMax) {
      const most = this.#requestBytesMax;
      const why = `the request has about ${bytes} bytes, and the store takes ${most}`;
      return Promise.reject(new StoreError("denied", why));
    }
    return new Promise((resolve, reject) => {
      /** @type {Request} */
      const request = {
        payload,
        properties,
        deadline: performance.now() + this.timeoutMs,
        packetId: null,
        resolve: (response) => this.#settle(correlation, timer) && resolve(response),
        reject: (error) => this.#settle(correlation, timer) && reject(error),
      };
      const timer = setTimeout(() => this.#expire(request), this.timeoutMs);
      this.#pending.set(correlation, request);
      if (this.#online) this.#send(request);
    });
  }

  /** @param {string} correlation @param {ReturnType<typeof setTimeout>} timer */
  #settle(correlation, timer) {
    clearTimeout(timer);
    return this.#pending.delete(correlation);
  }

  /** @param {Request} request */
  #send(request) {
    /** @type {any} */
    const payload = request.payload;
    const options = /** @type {any} */ ({ qos: 1, properties: request.properties });
    this.#client.publish(REQUESTS, payload, options, (error, packet) => {
      request.packetId = ACKNOWLEDGED;
      const code = /** @type {any} */ (packet)?.reasonCode ?? /** @type {any} */ (error)?.code;
      if (code === NO_MATCHING_SUBSCRIBERS) {
        request.reject(new StoreError("denied", NO_STORE, true));
      } else if (error && code >= 0x80) {
        const why = `the broker rejected the request: ${error.message}`;
        request.reject(new StoreError("denied", why, code === QUOTA_EXCEEDED));
      }
    });
    request.packetId = this.#client.getLastMessageId();
  }

  /** @param {Request} request */
  #expire(request) {
    // It must not be sent again, and take effect later.
    if (request.packetId) this.#client.removeOutgoingMessage(request.packetId);
    const [code, why] = this.#online
      ? ["timeout", `no response within ${this.timeoutMs} ms`]
      : ["transport", "the connection to the store is lost"];
    request.reject(new StoreError(code, why));
  }

  /** MQTT.js resends what is not acknowledged. The store drops what has expired by then. */
  #beforeConnection() {
    for (const { properties, deadline, packetId } of this.#pending.values()) {
      const left = Math.max(1, Math.ceil((deadline - performance.now()) / 1000));
      properties.messageExpiryInterval = left;
      if (!packetId) continue;
      // MQTT.js resends its own copy.
      this.#client.outgoingStore.get({ messageId: packetId }, (_error, packet) => {
        if (packet?.cmd !== "publish" || !packet.properties) return;
        packet.properties.messageExpiryInterval = left;
      });
    }
  }

  #subscribe() {
    const filters = [this.#answers, `${this.#notifications}+`];
    return this.#client.subscribeAsync(filters, { qos: 1 });
  }

  /**
   * MQTT.js reads nothing more after such a packet, and would resend the request for ever. Brokers
   * acknowledge in order (MQTT 5 section 4.6), so this is about the oldest request.
   */
  #unreadable() {
    const sent = [...this.#pending.values()].find((it) => it.packetId);
    if (sent?.packetId) {
      const why = "the broker refused the request, perhaps as too large (message_size_limit)";
      this.#client.removeOutgoingMessage(sent.packetId);
      sent.reject(new StoreError("denied", why));
    }
    this.#client.stream.destroy();
  }

  /** @param {boolean} [sessionPresent] */
  #connected(sessionPresent) {
    this.#online = true;
    this.#subscribe().catch((error) => {
      const why = `the store refused a subscription: ${error.message}`;
      if (this.#online) this.#end(new StoreError("denied", why));
    });
    for (const request of this.#pending.values()) {
      // The broker lost the session and so the responses to requests that it acknowledged. Behind a
      // foreign broker the store recognizes a duplicate by its correlation data and its timestamp.
      // A store that is the broker executes it again.
      const isLost = request.packetId === ACKNOWLEDGED && !sessionPresent;
      if (request.packetId === null || isLost) this.#send(request);
    }
    this.#registerAll();
  }

  /** Registers all watches again, one after the other: registrations end with their connection. */
  async #registerAll() {
    const connection = this.#client.stream;
    for (const [name, watches] of [...this.#watches]) {
      const [first] = watches;
      while (this.#watches.has(name)) {
        // A later connection registers all watches itself.
        if (connection !== this.#client.stream || !this.#online) return;
        try {
          await this.#ask(["KEYNOTIFY", first.key]);
          watches.forEach((it) => it.add({ kind: "gap", cause: "the connection was lost" }));
          break;
        } catch (error) {
          const failure = /** @type {StoreError} */ (error);
          if (!failure.passes) {
            watches.forEach((it) => it.fail(failure));
            break;
          }
          // Other requests may have used up a limit of requests.
          await new Promise((resolve) => setTimeout(resolve, RETRY_PAUSE_MS));
        }
      }
    }
  }

  /** @param {Watch} watch */
  #unwatch(watch) {
    const name = hex(watch.key);
    const watches = this.#watches.get(name);
    if (!watches?.delete(watch) || watches.size > 0) return;
    this.#watches.delete(name);
    // No code needs the response.
    if (!this.#closed) this.#ask(["KEYNOTIFY", watch.key, "STOP"]).catch(() => {});
  }

  /** @param {string} topic @param {Uint8Array} payload @param {mqtt.IPublishPacket} packet */
  #receive(topic, payload, packet) {
    /** @type {Record<string, string | string[]>} */
    const user = packet.properties?.userProperties ?? {};
    /** @param {string} name */
    const property = (name) => [user[name]].flat()[0];
    if (topic === this.#answers) {
      const correlation = packet.properties?.correlationData ?? new Uint8Array();
      const request = this.#pending.get(decoder.decode(correlation));
      try {
        const status = property("__stat");
        if (status !== "200") throw new StoreError("protocol", `the response has __stat ${status}`);
        request?.resolve({ reply: parse(payload), version: this.#observed(property("__ts")) });
      } catch (error) {
        request?.reject(/** @type {Error} */ (error));
      }
    } else if (topic.startsWith(this.#notifications)) {
      const watches = this.#watches.get(topic.slice(this.#notifications.length)) ?? new Set();
      const event = this.#event(payload, property("__ts"));
      watches.forEach((it) => it.add(event, packet.dup));
    }
  }

  /** @param {Uint8Array} payload @param {string | undefined} stamp @returns {Change | Gap} */
  #event(payload, stamp) {
    try {
      const version = stamped(this.#observed(stamp));
      const reply = parse(payload);
      const items = Array.isArray(reply) ? reply : [];
      const words = items.slice(0, 3).map((it) => decoder.decode(it)).join(" ");
      if (words === "NOTIFY SET VALUE" && items.length === 4) {
        return { kind: "change", data: items[3], version };
      }
      if (words === "NOTIFY DELETE") return { kind: "change", data: null, version };
    } catch {
      // The gap reports it.
    }
    return { kind: "gap", cause: "a notification is unreadable" };
  }

  /** @param {string | undefined} stamp */
  #observed(stamp) {
    if (stamp === undefined) return null;
    const version = Version.parse(stamp);
    this.#clock.observe(version);
    return version;
  }

  /** @param {StoreError} why */
  #end(why) {
    if (this.#closed) return;
    this.#closed = why;
    for (const request of [...this.#pending.values()]) request.reject(why);
    for (const watches of this.#watches.values()) watches.forEach((it) => it.fail(why));
    // MQTT.js waits for acknowledgements first, and without a connection none arrives.
    this.#client.end(!this.#online);
  }
}

/**
 * Connects to `mqtt://HOST:PORT`, `mqtts://…`, `ws://HOST:PORT/mqtt` or `wss://…`. Browsers can
 * only use the last two.
 * @param {string} url @param {Options} [options]
 * @returns {Promise<Store>}
 */
export async function connect(url, { username, password, ca, clientId, timeoutMs = 5000 } = {}) {
  // A session of an earlier process would bring its notifications. For a random client id there is
  // none: Mosquitto 2.0 does not save a session whose last connection began with Clean Start.
  const clean = clientId != null;
  clientId ??= `statehouse-${hex(crypto.getRandomValues(new Uint8Array(8)))}`;
  const length = encoder.encode(clientId).length;
  if (length < 1 || length > CLIENT_ID_BYTES_MAX || /[+#\p{Cc}]/u.test(clientId)) {
    const rule = "and no '+', '#' or control character";
    throw new TypeError(`a client id has 1 to ${CLIENT_ID_BYTES_MAX} bytes ${rule}`);
  }
  // A timer with a longer time ends at once.
  timeoutMs = Math.min(timeoutMs, TIMER_MS_MAX);
  const sessionExpiryInterval = Math.max(SESSION_EXPIRY_S, Math.ceil(timeoutMs / 1000));
  const client = mqtt.connect(url, {
    protocolVersion: 5,
    clientId,
    clean,
    username,
    password,
    ca: /** @type {any} */ (ca),
    keepalive: 15,
    connectTimeout: timeoutMs,
    reconnectPeriod: RECONNECT_PAUSE_MS,
    reconnectOnConnackError: true,
    resubscribe: false,
    queueQoSZero: false,
    properties: { sessionExpiryInterval, maximumPacketSize: PACKET_BYTES_MAX },
  });
  const store = new Store(client, clientId, timeoutMs);
  // Errors show no user and no password.
  const place = url.replace(/^(\w+:\/\/)?.*@/, "$1***@");
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;
  try {
    await new Promise((resolve, reject) => {
      const late = `cannot reach a store at ${place} within ${timeoutMs} ms`;
      timer = setTimeout(() => reject(new StoreError("transport", late)), timeoutMs);
      // Until the answer to the SUBSCRIBE, which the timeout also limits.
      client.once("connect", () => store.start().then(resolve, reject));
      client.once("error", (error) => {
        const refused = Number(/** @type {any} */ (error).code) >= 0x80;
        const [code, what] = refused
          ? ["denied", "the store refused the connection"]
          : ["transport", `cannot reach a store at ${place}`];
        reject(new StoreError(code, `${what}: ${error.message}`));
      });
    });
  } catch (error) {
    const { connected } = client;
    client.end(true);
    if (error instanceof StoreError) throw error;
    const { message } = /** @type {Error} */ (error);
    const unreachable = `cannot reach a store at ${place}: ${message}`;
    if (!connected) throw new StoreError("transport", unreachable);
    throw new StoreError("denied", `the store refused a subscription: ${message}`);
  } finally {
    clearTimeout(timer);
  }
  return store;
}

/**
 * Parses one RESP value. Throws a `StoreError` for an error of the store.
 * @param {Uint8Array} payload
 * @returns {Reply}
 */
export function parse(payload) {
  const { reply, next } = parseAt(payload, 0, 0);
  if (next !== payload.length) throw new StoreError("protocol", "bytes follow the response");
  return reply;
}

/**
 * @param {Uint8Array} payload @param {number} at @param {number} depth
 * @returns {{ reply: Reply, next: number }}
 */
function parseAt(payload, at, depth) {
  const malformed = new StoreError("protocol", "the response is not RESP");
  const end = payload.indexOf(13, at);
  if (end < 0 || payload[end + 1] !== 10 || depth > RESP_DEPTH_MAX) throw malformed;
  const kind = String.fromCharCode(payload[at]);
  const line = decoder.decode(payload.subarray(at + 1, end));
  const next = end + 2;
  if (kind === "-") throw new StoreError("refused", line.replace(/^ERR /, ""));
  if (kind === "+") return { reply: line, next };
  if (!/^-?\d{1,19}$/.test(line)) throw malformed;
  const number = Number(line);
  if (kind === ":") return { reply: number, next };
  if (kind === "$" && number === -1) return { reply: null, next };
  if (kind === "$" && number >= 0) {
    const after = next + number;
    if (payload[after] !== 13 || payload[after + 1] !== 10) throw malformed;
    // A copy: a view would keep the whole packet alive.
    return { reply: Uint8Array.prototype.slice.call(payload, next, after), next: after + 2 };
  }
  if (kind !== "*" || number < 0) throw malformed;
  /** @type {Reply[]} */
  const items = [];
  for (let from = next; ; ) {
    if (items.length === number) return { reply: items, next: from };
    const item = parseAt(payload, from, depth + 1);
    items.push(item.reply);
    from = item.next;
  }
}

/** An array of bulk strings. @param {Text[]} command */
function encode(command) {
  /** @type {Uint8Array[]} */
  const parts = [encoder.encode(`*${command.length}\r\n`)];
  for (const argument of command.map(bytes)) {
    parts.push(encoder.encode(`$${argument.length}\r\n`), argument, encoder.encode("\r\n"));
  }
  const all = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  parts.reduce((at, part) => (all.set(part, at), at + part.length), 0);
  return all;
}

/** @param {Version | null} version */
function stamped(version) {
  if (!version) throw new StoreError("protocol", "the response has no version");
  return version;
}

/** @param {string} command */
function unexpected(command) {
  return new StoreError("protocol", `a ${command} has another form of response`);
}

/** @param {Change | Gap} event */
function size(event) {
  return event.kind === "change" ? (event.data?.length ?? 0) : 0;
}

/** @param {Text} text */
function bytes(text) {
  return typeof text === "string" ? encoder.encode(text) : text;
}

/** @param {Uint8Array} data */
function hex(data) {
  return Array.from(data, (byte) => byte.toString(16).padStart(2, "0").toUpperCase()).join("");
}
