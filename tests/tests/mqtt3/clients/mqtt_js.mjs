// MQTT.js with MQTT 3.1.1. Arguments: host, port, prefix of topics, and the part.

import assert from "node:assert/strict";
import { once } from "node:events";
import { createRequire } from "node:module";

const library = new URL("../../../../examples/clients/javascript/package.json", import.meta.url);
const mqtt = createRequire(library)("mqtt");
const [host, port, prefix, part] = process.argv.slice(2);
const topic = (name) => `${prefix}/${name}`;

let received = [];
let wake = () => {};

// Connects with the lasting session. Returns the client, and whether the session existed.
async function connect() {
  received = [];
  const client = mqtt.connect(`mqtt://${host}:${port}`, {
    protocolVersion: 4,
    clientId: `${prefix}-client`,
    clean: false,
    reconnectPeriod: 0,
    will: { topic: topic("will"), payload: Buffer.from("died"), qos: 1, retain: true },
  });
  client.on("message", (name, payload, packet) => {
    received.push([name, String(payload), packet.qos, packet.retain]);
    wake();
  });
  const [connack] = await once(client, "connect");
  return [client, connack.sessionPresent];
}

async function subscribe(client, filters) {
  const wanted = Object.fromEntries(filters.map(([name, qos]) => [topic(name), { qos }]));
  const granted = await client.subscribeAsync(wanted);
  assert.deepEqual(granted.map((it) => it.qos), filters.map(([, qos]) => qos));
}

async function expect(name, payload, qos, retain = false) {
  if (received.length === 0) await new Promise((resolve) => (wake = resolve));
  assert.deepEqual(received.shift(), [topic(name), payload, qos, retain]);
}

let [client, resumed] = await connect();
if (part === "first") {
  assert.equal(resumed, false);
  await subscribe(client, [["q0", 0], ["q1", 1], ["q2", 2]]);
  for (const qos of [0, 1, 2]) {
    await client.publishAsync(topic(`q${qos}`), "hello", { qos });
    await expect(`q${qos}`, "hello", qos);
  }
  await client.publishAsync(topic("retained"), "kept", { qos: 1, retain: true });
  await subscribe(client, [["retained", 2]]);
  await expect("retained", "kept", 1, true);
  await client.endAsync();
  [client, resumed] = await connect();
  assert.equal(resumed, true);
  await client.publishAsync(topic("q1"), "again", { qos: 1 });
  await expect("q1", "again", 1);
  console.log("ready");
} else {
  assert.equal(resumed, true);
  await expect("q1", "queued 1", 1);
  await expect("q2", "queued 2", 2);
  await subscribe(client, [["will", 1]]);
  await expect("will", "died", 1, true);
  await client.endAsync();
  assert.deepEqual(received, []);
  console.log("done");
}
