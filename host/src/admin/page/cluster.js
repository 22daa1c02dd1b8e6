// The cluster: this host, the one that leads, and how far this one is behind.

import { ask } from "./api.js";
import { button, confirm, field } from "./act.js";
import { bytes, el, number, panel, plain, span, table, text } from "./dom.js";

const NOTE = "Each host shows itself and the links that it knows. `statehouse cluster status` reads the state of all hosts from the log.";

export function open(main, page) {
  const facts = el("dl.facts"), trouble = el("p.why", { hidden: true });
  const hosts = table({
    caption: "Hosts", empty: "This host has a link to no other host.", limit: 32, keyOf: (it) => it.name,
    columns: [
      { title: "Host", of: (it) => el("b", {}, plain(it.name, 60)) },
      { title: "State", of: (it) => el(`span.badge.${it.leads ? "good" : "plain"}`, {}, it.leads ? "leads" : "follows") },
      { title: "", of: (it) => (it.isOwn ? "this host" : "") },
    ],
  });
  const over = button(page, "operate", "Hand over …", handOver);
  let followers = [];
  main.append(el("h1.unseen", {}, "Cluster"), panel("This host", over, trouble, facts), panel("Hosts", null, hosts.element, el("p.note.dim", {}, NOTE)));

  async function handOver() {
    const to = el("select", {}, el("option", { value: "" }, "any host"), followers.map((it) => el("option", { value: it }, plain(it, 60))));
    await confirm({
      title: "Hand the cluster over?", yes: "Hand over", isDangerous: true,
      body: ["This host ends its leadership, and another host leads. Clients connect again within a second.", field("To", to)],
      act: async () => {
        await ask("POST", `/v1/cluster/handover${to.value ? `?to=${encodeURIComponent(to.value)}` : ""}`);
        return "This host has handed over.";
      },
    });
  }

  return {
    update({ host, cluster: it }) {
      over.hidden = it?.role !== "leader";
      if (!it) return hosts.show([]);
      followers = it.followers;
      trouble.hidden = it.reaches_log;
      text(trouble, "The log did not answer the last call of this host. Look at etcd: `statehouse cluster check`.");
      const shown = [
        ["cluster", plain(it.name)], ["host", plain(host)], ["role", it.role], ["leader", it.leader ? plain(it.leader) : "none is known"],
        ["epoch", number(it.epoch)], ["position", number(it.position)], ["behind by", `${number(it.lag_records)} records`],
        ["history", it.history_position ? number(it.history_position) : "not kept"],
        ["log since the snapshot", `${number(it.log_records)} records, ${bytes(it.log_bytes)}`],
        ["age of the snapshot", it.snapshot_age_ms === null ? "none yet" : span(it.snapshot_age_ms)],
        ["lease", it.lease_ms === null ? "none" : `${number(it.lease_ms)} ms`],
        ["not durable yet", it.unreleased === null ? "–" : `${number(it.unreleased)} records`],
      ];
      facts.replaceChildren(...shown.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
      const all = [...new Set([it.leader, ...followers, host].filter(Boolean))];
      hosts.show(all.map((name) => ({ name, leads: name === it.leader, isOwn: name === host })));
    },
  };
}
