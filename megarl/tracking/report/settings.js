// The summary, configuration and failures tabs.
"use strict";

const dotOf = (run) => h("i", { className: "dot", style: { background: run.color } });
const MAIN_KEYS = [
  "model.path", "algorithm.policy_loss.kind", "actor.optim.lr", "trainer.total_steps", "trainer.prompts_per_step",
  "trainer.samples_per_step", "rollout.n", "rollout.engine", "placement.strategy", "model.dtype", "trainer.seed",
];

const sum = (values = []) => values.reduce((total, value) => total + (value ?? 0), 0);

function last(values) {
  for (let index = values.length - 1; index >= 0; index--) if (values[index] !== null) return values[index];
  return null;
}

function stateOf(about) {
  if (about.failure) return ["failed", "failed"];
  if (about.summary) return ["complete", "complete"];
  return ["open", report.isLive ? "running" : "not finished"];
}

function writtenAt(run) {
  const milliseconds = Object.entries(run.versions)
    .filter(([name]) => name !== "about")
    .map(([, version]) => Number(version.split(".")[0]) / 1e6);
  return milliseconds.length ? new Date(Math.max(...milliseconds)).toLocaleString() : "nothing";
}

const summaryTab = {
  async render(root) {
    const cards = h("div", { className: "cards" });
    for (const run of report.shown) {
      const about = await run.part("about"), metrics = (await run.part("metrics")) || { steps: [], values: {} };
      cards.append(this.card(run, about, metrics));
    }
    root.append(cards);
    const metrics = await metricsOfShown(), names = metricNames(metrics);
    root.append(h("div", { className: "charts wide" }, headlineMetrics(names).map((name) => new Chart(name, curvesOf(name, metrics), 220).element)));
  },

  card(run, about, metrics) {
    const [state, words] = stateOf(about), { steps, values } = metrics, total = about.config["trainer.total_steps"], { validation, seconds, samples, recovery } = about.summary || {};
    const facts = [["estimator", about.config["algorithm.advantage.estimator"] ?? "fine-tuning"], ["steps", `${steps.length ? formatted(steps[steps.length - 1]) : 0}${total ? ` of ${formatted(Number(total))}` : ""}`], ["last written", writtenAt(run)]];
    if (validation) facts.push(["held-out score", `${formatted(validation.before, 3)} → ${formatted(validation.after, 3)}`]);
    if (typeof seconds === "number") facts.push(["time", formattedSeconds(seconds)]);
    if (typeof samples === "number") facts.push(["samples", formatted(samples)]);
    const recoveries = sum(values["recovery/num_recoveries"]);
    if (recoveries) facts.push(["recoveries", `${formatted(recoveries)}, ${formattedSeconds(sum(values["recovery/lost_s"]))} lost${recovery ? `, goodput ${formatted(100 * recovery.goodput)} %` : ""}`]);
    if (recovery && recovery.excluded_nodes.length) facts.push(["excluded nodes", recovery.excluded_nodes.join(", ")]);
    const shown = [...headlineMetrics(Object.keys(values)), "actor/entropy", "perf/throughput", "timing_s/step"];
    for (const name of shown) if (name in values) facts.push([name, formatted(last(values[name]))]);
    const keys = MAIN_KEYS.filter((key) => key in about.config).map((key) => [key, about.config[key]]);
    const list = (pairs) => h("dl", { className: "facts" }, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    const problems = [...about.problems, metrics.problem].filter(Boolean);
    return h("section", { className: "card run", data: { state } },
      h("h2", {}, dotOf(run), ` ${run.name} `, h("span", { className: `state ${state}` }, words)),
      h("p", { className: "muted path" }, about.path),
      list(facts),
      ...problems.map((problem) => h("p", { className: "problem" }, problem)),
      ...(about.failure ? [h("pre", { className: "failure" }, lastPage(about.failure))] : []),
      h("details", { className: "group" }, h("summary", {}, "settings"), list(keys)));
  },
};

// The last part that begins with ==== is the failure page that the run printed last.
function lastPage(text) {
  const start = text.lastIndexOf("\n==== ");
  return start < 0 ? text : text.slice(start + 1);
}

const configurationTab = {
  search: "",
  all: false,

  kindsDiffer(runs, abouts) {
    const kinds = runs.map((run, number) => `${run.name}: ${abouts[number].kind}`).join(", ");
    return `The kinds of these runs differ (${kinds}); only keys that all kinds share are compared.`;
  },

  async render(root) {
    const runs = report.shown, abouts = await Promise.all(runs.map((run) => run.part("about")));
    const kinds = [...new Set(abouts.map(({ kind }) => kind))], foreign = new Set(kinds.length > 1 ? abouts.flatMap((each) => each.foreign) : []);
    const keys = [...new Set(abouts.flatMap(({ config }) => Object.keys(config)))].filter((key) => !foreign.has(key)).sort();
    if (!keys.length) return void root.append(h("p", { className: "muted" }, "No configuration was written."));
    const isOne = runs.length === 1, body = h("div", { className: "scroll card" });
    const differs = (key) => (isOne ? key in abouts[0].defaults : new Set(abouts.map(({ config }) => config[key])).size > 1);
    const fill = () => {
      const shown = keys.filter((key) => (this.all || differs(key)) && key.toLowerCase().includes(this.search.toLowerCase()));
      const head = ["key", ...runs.map((run) => h("span", {}, dotOf(run), ` ${run.name}`)), ...(isOne ? ["default"] : [])];
      const cells = (key) => [
        ...abouts.map(({ config }) => h("td", {}, config[key] ?? "–")),
        ...(isOne ? [h("td", { className: "muted" }, differs(key) ? abouts[0].defaults[key] : "same")] : []),
      ];
      const rows = shown.map((key) => h("tr", { className: differs(key) ? "differs" : "", data: { key } }, h("th", {}, key), cells(key)));
      const none = isOne ? "Every key has its default value." : "The runs do not differ.";
      body.replaceChildren(rows.length ? h("table", { className: "plain" }, h("thead", {}, h("tr", {}, head.map((cell) => h("th", {}, cell)))), h("tbody", {}, rows)) : h("p", { className: "muted" }, none));
    };
    root.append(
      h("div", { className: "toolbar" },
        input("search", { placeholder: "Filter keys", id: "key-filter", value: this.search, "aria-label": "Filter keys" }, (value) => {
          this.search = value;
          fill();
        }),
        h("label", {}, input("checkbox", { checked: this.all, id: "all-keys" }, (value) => {
          this.all = value;
          fill();
        }), isOne ? " show keys with default values" : " show keys that are equal in all runs")),
      ...(kinds.length > 1 ? [h("p", { className: "muted", id: "kinds" }, this.kindsDiffer(runs, abouts))] : []),
      body);
    fill();
  },
};

const failuresTab = {
  async render(root) {
    for (const run of report.shown) {
      const about = await run.part("about"), parts = await Promise.all(["metrics", "timeline", "generations"].map((name) => run.part(name)));
      const problems = [...about.problems, ...parts.map((part) => part?.problem).filter(Boolean)];
      if (!about.failure && !problems.length) continue;
      const page = about.failure && lastPage(about.failure), before = about.failure?.slice(0, about.failure.length - page.length).trim();
      root.append(h("section", { className: "card" },
        h("h2", {}, dotOf(run), ` ${run.name}`),
        ...problems.map((problem) => h("p", { className: "problem" }, problem)),
        ...(page ? [h("pre", { className: "failure" }, page)] : []),
        ...(before ? [h("details", { className: "group" }, h("summary", {}, "earlier output"), h("pre", {}, before))] : [])));
    }
    if (!root.children.length) root.append(h("p", { className: "muted" }, "No failures, and every file is readable."));
  },
};
