// The cluster: its hosts, the leader, and how far the others are behind.

import { ask } from "./api.js";
import { button, confirm } from "./act.js";
import { el, number, panel, plain, table, text } from "./dom.js";

export function open(main, page) {
  const facts = el("dl.facts"), hosts = table({
    caption: "Hosts", empty: "This store is not part of a cluster.", limit: 32, keyOf: (it) => it.name ?? it.host,
    columns: [
      { title: "Host", of: (it) => el("b", {}, plain(it.name ?? it.host, 60)) },
      { title: "State", of: (it) => el(`span.badge.${it.leads ? "good" : "plain"}`, {}, it.leads ? "leads" : "follows") },
      { title: "Epoch", number: true, of: (it) => number(it.epoch) },
      { title: "Behind by records", number: true, of: (it) => number(it.lag) },
      { title: "Program", of: (it) => plain(it.version ?? "", 30) },
    ],
  });
  const over = button(page, "operate", "Hand over …", handOver);
  main.append(el("h1.unseen", {}, "Cluster"), panel("This host", over, facts), panel("Hosts", null, hosts.element));

  async function handOver() {
    const to = el("input", { maxlength: 256, spellcheck: "false", "aria-label": "Host that is to lead", placeholder: "any host" });
    await confirm({
      title: "Hand the cluster over?", yes: "Hand over", isDangerous: true,
      body: ["This host ends its leadership, and another host leads. Clients connect again within a second.", el("label.field", {}, el("span", {}, "To the host"), to)],
      act: async () => {
        await ask("POST", `/v1/cluster/handover${to.value ? `?to=${encodeURIComponent(to.value)}` : ""}`);
        return "Another host leads now.";
      },
    });
  }

  return {
    update({ cluster }) {
      const own = Object.entries(cluster ?? {}).filter(([, value]) => ["string", "number", "boolean"].includes(typeof value));
      facts.replaceChildren(...own.map(([name, value]) => el("div", {}, el("dt", {}, plain(name).replaceAll("_", " ")), el("dd", {}, typeof value === "number" ? number(value) : plain(value)))));
      hosts.show(cluster?.hosts ?? []);
    },
  };
}
