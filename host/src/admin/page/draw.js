// Curves, gauges and bars, drawn as SVG so that they follow the colours of the page.

import { el, svg, text } from "./dom.js";

const PAD = { left: 52, right: 10, top: 10, bottom: 20 };
const HEIGHT = 190;

/**
 * Curves over time. A series is { name, kind, of: (sample) => number }. `stacked` fills the areas
 * between the curves; `log` uses a logarithmic scale. Arrow keys and the pointer choose a moment.
 */
export function chart({ title, series, format, seconds, stacked = false, log = false, least = 1 }) {
  const grid = svg("g.grid"), curves = svg("g.curves"), cursor = svg("line.cursor", { visibility: "hidden" });
  const picture = svg("svg", { height: HEIGHT, "aria-hidden": "true" }, grid, curves, cursor);
  const values = series.map(() => el("b"));
  const at = el("span.at.dim");
  const legend = el("p.legend", {}, at, series.map((it, index) => el("span", {}, el("i", { class: `key ${it.kind}` }), it.name, " ", values[index])));
  const figure = el("figure.chart", { tabindex: 0, role: "group", "aria-label": `${title}. Left and right arrow keys choose a moment.` }, legend, picture);
  let samples = [], width = 0, chosen = null, now = 0;

  /** The window grows with the samples. */
  const range = () => 1000 * Math.min(seconds, Math.max(60, (now - (samples[0]?.at ?? now)) / 1000));
  const x = (sample) => PAD.left + (1 - (now - sample.at) / range()) * (width - PAD.left - PAD.right);

  function scale(top, bottom) {
    const high = HEIGHT - PAD.top - PAD.bottom;
    if (!log) return (value) => PAD.top + high * (1 - value / top);
    const [low, up] = [Math.log10(bottom), Math.log10(top)];
    return (value) => PAD.top + high * (1 - (Math.log10(Math.max(value, bottom)) - low) / (up - low));
  }

  function draw() {
    if (!width || !figure.isConnected) return;
    const shown = samples.filter((it) => it.at >= now - range());
    const highest = Math.max(least, ...shown.filter((it) => it.doc).map((it) => stacked
      ? series.reduce((sum, one) => sum + (one.of(it.doc) || 0), 0)
      : Math.max(...series.map((one) => one.of(it.doc) || 0))));
    const top = log ? 10 ** Math.ceil(Math.log10(highest * 1.05)) : round(highest * 1.1);
    const bottom = log ? 10 : 0;
    const y = scale(top, bottom);
    picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const ticks = log ? decades(bottom, top) : [0, top / 4, top / 2, (3 * top) / 4, top];
    const minutes = Array.from({ length: Math.floor(range() / 60000) + 1 }, (_, it) => it);
    grid.replaceChildren(
      ...ticks.flatMap((value) => [
        svg("line", { x1: PAD.left, x2: width - PAD.right, y1: y(value), y2: y(value) }),
        svg("text", { x: PAD.left - 6, y: y(value) + 3.5, "text-anchor": "end" }, format(value)),
      ]),
      ...minutes.map((minute) => {
        const place = x({ at: now - minute * 60000 });
        return svg("text", { x: place, y: HEIGHT - 4, "text-anchor": minute ? "middle" : "end" }, minute ? `−${minute} min` : "now");
      }));
    curves.replaceChildren(...paths(shown, y));
    mark(shown);
  }

  /** One path for each curve. A moment without a document interrupts it. */
  function paths(shown, y) {
    const below = shown.map(() => 0);
    return series.map((one) => {
      let line = "", area = "", run = [];
      const close = () => {
        if (stacked && run.length) area += "M" + run.map((it) => `${it[0]} ${it[1]}`).join("L") + "L" + run.reverse().map((it) => `${it[0]} ${it[2]}`).join("L") + "Z";
        run = [];
      };
      shown.forEach((sample, index) => {
        const value = sample.doc && one.of(sample.doc);
        if (!Number.isFinite(value) || (log && !value)) return close();
        const total = stacked ? below[index] + value : value;
        const [left, high, low] = [x(sample), y(total), y(below[index])].map((it) => it.toFixed(1));
        line += `${run.length ? "L" : "M"}${left} ${high}`;
        run.push([left, high, low]);
        if (stacked) below[index] = total;
      });
      close();
      return svg(`g.${one.kind}`, {}, stacked && svg("path.area", { d: area }), svg("path.line", { d: line }));
    });
  }

  /** Shows the values of the chosen moment, or the newest ones. */
  function mark(shown = samples) {
    const index = chosen === null ? shown.length - 1 : nearest(shown, chosen);
    const sample = shown[index];
    cursor.setAttribute("visibility", chosen !== null && sample ? "visible" : "hidden");
    if (!sample) return;
    const place = x(sample);
    for (const [name, value] of Object.entries({ x1: place, x2: place, y1: PAD.top, y2: HEIGHT - PAD.bottom })) cursor.setAttribute(name, value);
    text(at, chosen === null ? "" : `${Math.round((now - sample.at) / 1000)} s ago`);
    series.forEach((one, it) => text(values[it], sample.doc ? format(one.of(sample.doc)) : "–"));
  }

  function choose(moment) {
    chosen = moment;
    mark();
  }

  picture.addEventListener("pointermove", (event) => {
    const part = (event.offsetX - PAD.left) / (width - PAD.left - PAD.right);
    choose(now - (1 - part) * range());
  });
  picture.addEventListener("pointerleave", () => choose(null));
  figure.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -5000, ArrowRight: 5000 }[event.key];
    if (event.key === "Escape") choose(null);
    if (!step) return;
    event.preventDefault();
    const next = (chosen ?? now) + step;
    choose(next >= now ? null : next);
  });
  figure.addEventListener("blur", () => choose(null));
  const observer = new ResizeObserver(([entry]) => {
    width = Math.floor(entry.contentRect.width);
    draw();
  });
  observer.observe(picture.parentNode);
  return {
    element: figure,
    show(next, moment) {
      [samples, now] = [next, moment];
      draw();
    },
  };
}

function nearest(samples, moment) {
  let best = samples.length - 1;
  samples.forEach((it, index) => {
    if (Math.abs(it.at - moment) < Math.abs(samples[best].at - moment)) best = index;
  });
  return best;
}

/** A round number that is not below the value. */
function round(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * ([1, 2, 4, 6, 8, 10].find((it) => it * unit >= value) ?? 10);
}

function decades(from, to) {
  const found = [];
  for (let it = from; it <= to * 1.001; it *= 10) found.push(it);
  return found;
}

/** The scale of all gauges of times: 1 µs to 1 s. */
const part = (us) => Math.min(100, Math.max(0, (Math.log10(Math.max(us, 1)) / 6) * 100));

/** A gauge on a logarithmic scale: a set point at p50, and a bar to p99. */
export function gauge(kind) {
  const bar = svg("rect.range", { y: 5, height: 6, rx: 3 });
  const max = svg("rect.max", { y: 5, width: 0.8, height: 6 });
  const mid = svg("rect.mid", { y: 1, width: 1.6, height: 14, rx: 0.8 });
  const ticks = [0, 1, 2, 3, 4, 5, 6].map((it) => svg("rect.tick", { x: (it / 6) * 99.6, y: 7, width: 0.4, height: 2 }));
  const element = svg(`svg.gauge.${kind}`, { viewBox: "0 0 100 16", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("rect.rail", { y: 7.5, width: 100, height: 1 }), ticks, bar, max, mid);
  const set = (node, x, width) => (node.setAttribute("x", x), width === undefined || node.setAttribute("width", width));
  return {
    element,
    show({ p50, p99, max: longest }) {
      const has = Number.isFinite(p50) && Number.isFinite(p99);
      element.classList.toggle("is-empty", !has);
      if (!has) return;
      const [from, to] = [part(p50), part(p99)];
      set(bar, from, Math.max(0.5, to - from));
      set(mid, from - 0.8);
      set(max, Number.isFinite(longest) ? part(longest) : to);
    },
  };
}

/** A bar of a usage with its limit. */
export function meter(name) {
  const value = el("span.used"), fill = el("i"), hint = el("small.dim");
  const bar = el("div.bar", { role: "meter", "aria-label": name, "aria-valuemin": 0 }, fill);
  const element = el("div.meter", {}, el("span", {}, name), value, bar, hint);
  return {
    element,
    show(used, max, format, note = "") {
      element.hidden = !Number.isFinite(used);
      max = max < 2 ** 52 ? max : 0;
      const share = max > 0 ? Math.min(1, used / max) : 0;
      bar.hidden = !(max > 0);
      bar.setAttribute("aria-valuenow", Math.round(used));
      if (max > 0) bar.setAttribute("aria-valuemax", Math.round(max));
      bar.setAttribute("aria-valuetext", max > 0 ? `${format(used)} of ${format(max)}` : format(used));
      fill.style.setProperty("width", `${(share * 100).toFixed(2)}%`);
      element.classList.toggle("is-high", share > 0.8);
      element.classList.toggle("is-full", share > 0.95);
      text(value, max > 0 ? `${format(used)} of ${format(max)}` : format(used));
      text(hint, note);
    },
  };
}

/** A bar of parts that are compared: [[kind, value, label]]. */
export function parts(entries, label) {
  const sum = entries.reduce((total, it) => total + (it[1] || 0), 0);
  const shown = entries.filter((it) => it[1] > 0).map(([kind, value, name]) => {
    const piece = el(`i.${kind}`, { title: name });
    piece.style.setProperty("flex-grow", String(value / sum));
    return piece;
  });
  return el("span.parts", { role: "img", "aria-label": label }, shown);
}
