// The path of a request with live rates and times, curves, limits, hot keys and slow requests.

import { get, repeat } from "./api.js";
import { bytes, el, micros, moment, number, oneLine, panel, plain, rate, shown, span, svg, table, text, encoded } from "./dom.js";
import { chart, gauge, meter, parts } from "./draw.js";

const SECONDS = 300;

const STAGES = [
  { kind: "socket", name: "Sockets", about: "clients send requests" },
  { kind: "queue", name: "Queue", about: "waits for its turn", of: "queue" },
  { kind: "policy", name: "Policy", about: "decides the request", of: "policy" },
  { kind: "flush", name: "Log", about: "waits until it is durable", of: "flush" },
  { kind: "send", name: "Response", about: "leaves the store", of: "send" },
];

const OUTCOMES = [
  ["refused", "refused by the store before a policy saw them"],
  ["failed", "failed in the policy"],
];

export function open(main, { samples }) {
  const flow = path(), limits = gauges(), hot = hotKeys(), slow = slowRequests();
  const throughput = chart({
    title: "Requests per second", seconds: SECONDS, stacked: true, least: 10, format: rate,
    series: ["get", "set", "del", "other"].map((it) => ({ name: it.toUpperCase().replace("OTHER", "other"), kind: `of-${it}`, of: (doc) => doc.rates?.[it] })),
  });
  const latency = chart({
    title: "Time of requests", seconds: SECONDS, log: true, least: 1000, format: micros,
    series: ["p50", "p99", "max"].map((it) => ({ name: it, kind: `of-${it}`, of: (doc) => doc.latency_us?.request?.[it] })),
  });
  main.append(
    el("h1.unseen", {}, "Overview"), flow.element,
    el("div.columns.two", {}, panel("Requests per second", null, throughput.element), panel("Time of requests", el("small.dim", {}, "logarithmic"), latency.element)),
    el("div.columns.three", {}, panel("Limits", null, limits.element), panel("Hot keys", hot.beside, hot.element), panel("Slow requests", slow.beside, slow.element)));
  const polling = repeat(async (signal) => {
    slow.show(await get("/v1/slow?from=0", signal));
    return 3000;
  }, (error) => error && slow.fail(error));
  return {
    update(doc) {
      flow.show(doc);
      limits.show(doc);
      hot.show(doc.hot_keys);
    },
    tick(now) {
      throughput.show(samples, now);
      latency.show(samples, now);
    },
    close: () => polling.stop(),
  };
}

/** The path of a request: a stage for each part of its time, on one scale. */
function path() {
  const total = el("b"), p50 = el("b"), p99 = el("b"), most = el("b");
  const outcomes = OUTCOMES.map(([name, about]) => ({ name, value: el("b"), about }));
  const head = el("p.sum", {},
    el("span.first", {}, total, " requests/s"),
    el("span", {}, p50, " p50"), el("span", {}, p99, " p99"), el("span", {}, most, " longest"),
    outcomes.map((it) => (it.element = el("span", { title: `requests that were ${it.about}` }, it.value, ` ${it.name}/s`))));
  const stages = STAGES.map(stage);
  const scale = el("p.scale.dim", {}, "Gauges: ", el("i.mid"), " p50 to p99, longest ", el("i.max"), "; 1 µs to 1 s, logarithmic. Times of the last seconds.");
  const element = el("section.panel.flow", { "aria-label": "The path of a request" }, head, el("ol.path", {}, stages.map((it) => it.element)), scale);
  return {
    element,
    show(doc) {
      const rates = doc.rates ?? {}, times = doc.latency_us ?? {};
      text(total, rate(rates.requests));
      text(p50, micros(times.request?.p50));
      text(p99, micros(times.request?.p99));
      text(most, micros(times.request?.max));
      for (const it of outcomes) {
        it.element.classList.toggle("is-bad", rates[it.name] > 0);
        text(it.value, rate(rates[it.name]));
      }
      for (const it of stages) it.show(doc);
      // The pipe moves faster with more requests, by the decade.
      const speed = rates.requests > 0 ? 4 / (1 + Math.log10(1 + rates.requests)) : 0;
      element.style.setProperty("--pace", `${speed.toFixed(2)}s`);
      element.classList.toggle("is-idle", !speed);
    },
  };
}

function stage({ kind, name, about, of }) {
  const big = el("b.big"), small = el("span"), facts = el("dl"), dial = of && gauge(kind);
  const pipe = svg("svg.pipe", { viewBox: "0 0 24 8", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("path", { d: "M0 4H24" }));
  const element = el(`li.stage.${kind}`, {}, el("h3", {}, name), el("p.dim", {}, about), el("p.time", {}, big, " ", small), dial?.element, facts, pipe);
  return {
    element,
    show(doc) {
      const times = doc.latency_us?.stages?.[of];
      if (of) {
        text(big, micros(times?.p50));
        text(small, `p99 ${micros(times?.p99)}`);
        dial.show(times ?? {});
      } else {
        text(big, number(doc.clients?.connected));
        text(small, "connected");
      }
      const found = factsOf[kind](doc).filter(([, value]) => value !== null && value !== undefined);
      if (facts.childElementCount !== 2 * found.length) facts.replaceChildren(...found.flatMap(() => [el("dt"), el("dd")]));
      found.forEach(([name, value], at) => (text(facts.children[2 * at], name), text(facts.children[2 * at + 1], value)));
    },
  };
}

const perSecond = (value, format = rate) => (Number.isFinite(value) ? `${format(value)}/s` : null);

/** What else an operator asks at each stage. */
const factsOf = {
  socket: ({ rates, clients }) => [
    ["publishes in", perSecond(rates?.publishes_in)], ["sessions", clients && number(clients.sessions)],
    ["subscriptions", clients && number(clients.subscriptions)],
  ],
  queue: ({ queues }) => {
    const waiting = Object.entries(queues ?? {}).filter((it) => it[1] > 0).map(([name, value]) => [plain(name), bytes(value)]);
    return waiting.length ? waiting.slice(0, 4) : [["nothing waits elsewhere", ""]];
  },
  policy: ({ policies }) => (policies ?? []).filter((it) => !it.roles.every((role) => role === "previous")).slice(0, 3)
    .map((it) => [plain(it.name, 40), it.roles.includes("active") || it.calls_per_s ? perSecond(it.calls_per_s) : it.roles.join(", ")]),
  flush: ({ rates, disk }) => [
    ["writes", perSecond(rates && rates.set + rates.del)], ["flush of the disk", disk && micros(disk.flush_us.p50)],
    ["its p99", disk && micros(disk.flush_us.p99)],
  ],
  send: ({ rates, latency_us: times }) => [
    ["publishes out", perSecond(rates?.publishes_out)], ["notifications", perSecond(rates?.notifications)],
    ["their p99", times?.notification.count ? micros(times.notification.p99) : null],
  ],
};

/** What has a limit. */
function gauges() {
  const meters = Object.fromEntries(["Memory", "Disk", "Keys", "Bytes", "Watches", "Connections", "Open files", "CPU"].map((it) => [it, meter(it)]));
  const element = el("div.meters", {}, Object.values(meters).map((it) => it.element));
  const byName = (values) => Object.entries(values ?? {}).filter((it) => it[1] > 0).sort((a, b) => b[1] - a[1]).slice(0, 3).map(([name, value]) => `${plain(name)} ${bytes(value)}`).join(", ");
  return {
    element,
    show({ memory, disk, store_size: size, clients, process, limits, started_ms, time_ms }) {
      const used = disk ? Object.values(disk.used).reduce((sum, it) => sum + it, 0) : NaN;
      meters.Memory.show(memory.rss ?? NaN, memory.limit, bytes, byName(memory.owners));
      meters.Disk.show(used, used + disk?.room, bytes, disk?.is_full ? "full: the store refuses growth" : byName(disk?.used));
      meters.Keys.show(size?.keys, limits.max_keys, number);
      meters["Bytes"].show(size?.bytes, limits.max_bytes, bytes);
      meters.Watches.show(size?.watches, limits.max_watches, number);
      meters.Connections.show(clients?.connected, clients?.limit, number);
      meters["Open files"].show(process.fds ?? NaN, process.fds_limit, number);
      meters.CPU.show((process.cpu ?? NaN) * 100, 0, (it) => `${number(it)} % of a processor`, `runs for ${span(time_ms - started_ms)}`);
    },
  };
}

function hotKeys() {
  const list = table({
    caption: "Keys with the most requests", empty: "No key has had requests in the last seconds.", limit: 12,
    // Several long keys may have the same beginning.
    keyOf: (it, at) => (it.is_cut ? at : JSON.stringify(it.key)),
    columns: [
      { title: "Key", of: (it) => it.is_cut ? el("span.key", {}, shown(it.key, 60, true)) : el("a.key", { href: `#/keys/${encoded(it.key)}`, title: shown(it.key, 400) }, shown(it.key, 60)) },
      { title: "Requests/s", number: true, of: (it) => rate(it.requests_per_s) },
      { title: "Share", number: true, of: share },
    ],
  });
  list.element.classList.add("hot");
  return { element: list.element, beside: el("small.dim", {}, "sampled"), show: (keys) => list.show(keys ?? []) };
}

function share(it) {
  const fill = el("i");
  fill.style.setProperty("width", `${Math.min(100, it.share * 100).toFixed(1)}%`);
  return el("span.share", {}, el("span.bar", {}, fill), `${number(it.share * 100, 1)} %`);
}

const PARTS = [["queue", "queue_us"], ["policy", "policy_us"], ["flush", "flush_us"], ["send", "socket_us"]];

function slowRequests() {
  const threshold = el("small.dim");
  const list = table({
    caption: "Slow requests, the last first", empty: "No request was slow since the start.", limit: 40,
    keyOf: (it, at) => `${it.at_ms} ${it.client} ${it.total_us} ${at}`,
    columns: [
      { title: "At", of: (it) => moment(it.at_ms), by: (it) => it.at_ms },
      { title: "Total", number: true, of: (it) => micros(it.total_us), by: (it) => it.total_us },
      { title: "Stages", of: where },
      { title: "Command", of: (it) => plain(it.command ?? "–", 20) },
      { title: "Key", of: (it) => el("span.key", {}, oneLine(it.key ?? "–", 60)) },
      { title: "Client", of: (it) => el("span.key", {}, plain(it.client, 60)), by: (it) => it.client },
      { title: "Policy", of: (it) => plain(it.policy ?? "–", 60) },
    ],
  });
  return {
    element: list.element, beside: threshold,
    show({ threshold_us: from, next, requests }) {
      text(threshold, `from ${micros(from)} on; ${number(next)} since the start`);
      list.show([...requests].reverse(), next);
    },
    fail: (error) => text(threshold, error.message),
  };
}

const where = (it) => {
  const label = PARTS.map(([kind, of]) => `${kind} ${micros(it[of])}`).join(", ");
  return parts(PARTS.map(([kind, of]) => [kind, it[of], `${kind} ${micros(it[of])}`]), label);
};
